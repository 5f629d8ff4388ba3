"""Unfinished requests, and which of them the next worker gets after a crash."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Collection, Iterator
from time import monotonic, perf_counter
from typing import Generic, TypeVar

import msgspec

from cppbatch.cluster.engines.output_collector import OutputCollector
from cppbatch.cluster.link import Answer, Check, Question, Submit, Update
from cppbatch.engine.params import actual_seed, replace_fields
from cppbatch.engine.request import GenerationEvent, GenerationRequest, ResumeState

MAX_CRASHES = 3
"""The number of consecutive crashes during its computation or preparation after which a request fails."""


class InFlightRequest:
    """An unfinished request, with everything the next worker needs to continue it."""

    def __init__(
        self,
        request_id: str,
        request: GenerationRequest,
        question: Question | Update | None = None,
        resume: ResumeState | None = None,
    ) -> None:
        """`question` is sent instead of running the request; the worker's reply to it becomes `answer`. `resume`: the
        progress of the request in another engine."""
        params = replace_fields(request.params, seed=actual_seed(request.params.seed))  # the same seed in every worker
        self.request = replace_fields(request, id=request_id, params=params)
        """The request as sent to the engine."""
        self._question = question
        self.answer: Answer | None = None
        self.outputs = OutputCollector(request.id)
        self.n_crashes = 0
        """Consecutive workers that died while computing or preparing the request."""
        self.cancelled = False
        self._has_output = False
        self._tokens = array("i", resume.tokens if resume else ())
        self._arrived_at = perf_counter() - (resume.age if resume else 0.0)
        self._first_token_at = self._arrived_at + resume.first_token_seconds if resume else 0.0

    @property
    def id(self) -> str:
        """Identifies the request in all messages to and from the engine, unlike the client's id, which may be reused
        while the last events of an earlier request are in transit."""
        return self.request.id

    def send_as(self, request_id: str) -> None:
        """Assigns a new id, so that events that still arrive for the old one are ignored."""
        self.request = replace_fields(self.request, id=request_id)

    @property
    def has_tokens(self) -> bool:
        """Whether an event with a token has arrived."""
        return bool(self._tokens)

    def message(self) -> Submit | Question | Update:
        """The message that starts the request in a worker, or continues it after the tokens so far."""
        if isinstance(self._question, Check):
            return Check(self.request)
        if self._question:
            return msgspec.structs.replace(self._question, id=self.id)
        return Submit(self.request, self.resume_state())

    def resume_state(self) -> ResumeState:
        """The progress so far."""
        return ResumeState(
            tokens=self._tokens.tolist(),
            age=perf_counter() - self._arrived_at,
            first_token_seconds=max(0.0, self._first_token_at - self._arrived_at),
        )

    @property
    def is_untouched(self) -> bool:
        """Whether it has had no event yet, and no worker has died while working on it."""
        return not self._has_output and self.n_crashes == 0

    def put(self, event: GenerationEvent) -> None:
        """Keeps the event's tokens for the next worker, and passes the event to the reader."""
        self._has_output = True
        if event.tokens and not self._tokens:
            self._first_token_at = perf_counter()
        self._tokens.extend(event.tokens)
        self.outputs.put(event)


Request = TypeVar("Request", bound=InFlightRequest)


class InFlightRequests(Generic[Request]):
    """The table of unfinished requests: which are sent to the current worker, and which wait in quarantine.

    After a first crash, all requests are resent together: usually no request caused it. Requests that were active
    (computed or being prepared) in two consecutive crashes, without a token in between, are suspects. While there are
    suspects, all requests are held, and one suspect at a time is sent alone, until its next token. A request behaves
    the same regardless of the rest of the batch. So after a token it is cleared, and after a crash it fails; then the
    next suspect follows. When no suspects are left, all requests are sent again.
    """

    def __init__(self, kind: type[Request], prefix: str = "") -> None:
        """`kind`: the class of the requests, whose ids are `prefix` and a number."""
        self._kind = kind
        self._ids = (f"{prefix}{n}" for n in itertools.count())
        self._requests: dict[str, Request] = {}
        self._held: dict[str, Request] = {}  # not sent to the current worker
        self._suspects: dict[str, Request] = {}
        self._empty_since = monotonic()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterates over a copy, so that requests may be removed in the loop."""
        return iter(list(self._requests.values()))

    def __contains__(self, request: Request) -> bool:
        return request.id in self._requests

    @property
    def idle_seconds(self) -> float:
        """Seconds without requests; 0.0 while there are any."""
        return 0.0 if self._requests else monotonic() - self._empty_since

    def get(self, request_id: str) -> Request | None:
        """The request with this id; None if it has ended, or has a new id (`requeue`)."""
        return self._requests.get(request_id)

    def add(
        self, request: GenerationRequest, question: Question | Update | None = None, resume: ResumeState | None = None
    ) -> Request:
        """Adds a new request, or one started by another engine; not sent yet."""
        added = self._kind(next(self._ids), request, question, resume)
        self._hold(added)
        return added

    def _hold(self, request: Request) -> None:
        self._requests[request.id] = self._held[request.id] = request

    def take_sendable(self) -> list[Request]:
        """The requests to send to the worker now; marks them as sent."""
        if not self._suspects:
            chosen = list(self._held.values())
        elif self._suspects.keys() <= self._held.keys():
            chosen = [next(iter(self._suspects.values()))]
        else:  # one suspect runs
            chosen = []
        for request in chosen:
            del self._held[request.id]
        return chosen

    def is_sent(self, request: Request) -> bool:
        """Whether the request was sent to the current worker."""
        return request.id not in self._held

    def token_received(self, request: Request) -> bool:
        """Clears a suspect. Returns whether it was one and other suspects are waiting: then `requeue` it."""
        request.n_crashes = 0
        was_suspect = self._suspects.pop(request.id, None) is not None
        return was_suspect and bool(self._suspects)

    def requeue(self, request: Request) -> None:
        """Holds a sent request again, under a new id, so that further messages for the old one are ignored."""
        self.remove(request)
        request.send_as(next(self._ids))
        self._hold(request)

    def remove(self, request: Request) -> None:
        """Removes a finished request."""
        for table in (self._requests, self._held, self._suspects):
            table.pop(request.id, None)
        self._empty_since = monotonic()

    def worker_died(self, active: Collection[int]) -> list[Request]:
        """Counts a crash of the requests whose ids were `active` in the worker. Removes and returns those that must
        fail.

        All other requests are held for the next worker.
        """
        for number in active:
            if request := self._requests.get(str(number)):
                request.n_crashes += 1
        failed = [request for request in self if request.n_crashes >= MAX_CRASHES]
        for request in failed:
            self.remove(request)
        self._held = dict(self._requests)
        self._suspects = {n: request for n, request in self._requests.items() if request.n_crashes == MAX_CRASHES - 1}
        return failed
