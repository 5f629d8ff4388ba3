"""A request on its way through a worker, with what another worker would need to go on with it."""

from __future__ import annotations

from array import array
from time import perf_counter

import msgspec

from cppbatch.cluster.output_collector import OutputCollector
from cppbatch.cluster.worker_messages import Check, Checked, Submit, Tokenize, Tokenized
from cppbatch.engine.params import actual_seed, replaced
from cppbatch.engine.request import GenerationEvent, GenerationRequest, ResumeState


class Flight:
    """`crashes`: how many workers in a row have died while they had it in hand."""

    def __init__(self, number: int, request: GenerationRequest, question: Check | Tokenize | None = None) -> None:
        """`question`: asked in place of running the request; `answer` is what a worker says to it."""
        params = replaced(request.params, seed=actual_seed(request.params.seed))  # the same everywhere
        self.number = number
        self.request = replaced(request, params=params)
        self._question = question
        self.answer: Checked | Tokenized | None = None
        self.mailbox = OutputCollector()
        self.crashes = 0
        self.cancelled = False
        self._tokens = array("i")
        self._arrived_at = perf_counter()
        self._first_token_at = 0.0

    def message(self) -> Check | Tokenize | Submit:
        """What a worker is told."""
        if self._question:
            return msgspec.structs.replace(self._question, number=self.number)
        progress = ResumeState(
            tokens=self._tokens.tolist(),
            age=perf_counter() - self._arrived_at,
            first_token_seconds=max(0.0, self._first_token_at - self._arrived_at),
        )
        request = replaced(self.request, id=str(self.number))
        return Submit(self.number, request, progress)

    def take(self, event: GenerationEvent) -> None:
        """Notes what is told, and passes it on."""
        if not self._tokens:
            self._first_token_at = perf_counter()
        self._tokens.extend(event.tokens)
        self.mailbox.put(event)
