"""OpenAI's answer objects for completions and chat, whole and streamed.

Both families answer alike: choices with a finish reason, and usage. An `Answer` knows the family's shapes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from cppbatch.engine.collect import mean_logprob
from cppbatch.engine.request import FinishReason, GenerationEvent, TokenLogprob
from cppbatch.errors import EngineClosed, GenerationFailed, InvalidRequest
from cppbatch.server.logprobs import chat_logprobs, completion_logprobs

Json = dict[str, Any]


class Answer:
    """Builds the objects of one answer: of each prompt's `n_candidates` completions, the `n` likeliest are choices."""

    def __init__(
        self, family: Literal["completion", "chat"], model: str, *, n: int, n_candidates: int, logprobs: bool
    ) -> None:
        self.id = f"{'chatcmpl' if family == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        self._chat = family == "chat"
        self._model = model
        self._created = int(time.time())
        self._n, self._n_candidates = n, n_candidates
        self._logprobs = logprobs
        self._last: dict[int, GenerationEvent] = {}

    def note(self, index: int, event: GenerationEvent) -> None:
        """Remembers how a choice ended. When it was not finished, raises `InvalidRequest` if that is the request's own
        doing, else `GenerationFailed` or `EngineClosed`."""
        if event.error_field:
            raise InvalidRequest(event.error_field, event.error or "the text cannot go on")
        if event.finish_reason is FinishReason.ERROR:
            raise GenerationFailed(event.error or "the generation failed")
        if event.finish_reason is FinishReason.CANCELLED:  # not by its client, who would not be listening
            raise EngineClosed("the server is going down")
        if event.finish_reason:
            self._last[index] = event

    def whole(self, completions: Sequence[Sequence[GenerationEvent]]) -> Json:
        """The answer of a request that is not streamed, from all events of each completion."""
        logprobs = [[entry for event in events for entry in event.logprobs] for events in completions]
        choices = [
            self._choice(index, self._message("".join(event.text for event in completions[i])), logprobs[i], of=i)
            for index, i in enumerate(self._best(logprobs))
        ]
        return self._object(choices, streamed=False) | {"usage": self.usage()}

    def _best(self, logprobs: list[list[TokenLogprob]]) -> list[int]:
        """Which completions are shown, in order."""
        if self._n == self._n_candidates:
            return list(range(len(logprobs)))

        def badness(i: int) -> float:
            usage = self._last[i].usage
            return -mean_logprob(logprobs[i], usage.completion_tokens if usage else 0)

        groups = range(0, len(logprobs), self._n_candidates)
        return [i for first in groups for i in sorted(range(first, first + self._n_candidates), key=badness)[: self._n]]

    def opening(self, index: int) -> Json | None:
        """The first chunk of a choice: in chat, it names the role."""
        if not self._chat:
            return None
        return self._object([self._choice(index, {"delta": {"role": "assistant", "content": ""}})], streamed=True)

    def delta(self, index: int, event: GenerationEvent) -> Json:
        """A chunk with what is new."""
        body = {"delta": {"content": event.text}} if self._chat else {"text": event.text}
        return self._object([self._choice(index, body, event.logprobs or None)], streamed=True)

    def closing(self, index: int) -> Json:
        """The last chunk of a choice, with its finish reason."""
        body: Json = {"delta": {}} if self._chat else {"text": ""}
        return self._object([self._choice(index, body, of=index)], streamed=True)

    def usage_chunk(self) -> Json:
        """The chunk with no choices that `include_usage` asks for."""
        return self._object([], streamed=True) | {"usage": self.usage()}

    def usage(self) -> Json:
        """Token counts of all completions; those of one prompt count that prompt once, as OpenAI does."""
        ends = [event.usage for event in self._last.values() if event.usage]
        completion = sum(usage.completion_tokens for usage in ends)
        prompt = sum(usage.prompt_tokens for usage in ends) // self._n_candidates
        of_prompts: dict[int, int] = {}  # what no completion of a prompt had to compute
        for index, event in self._last.items():
            if event.usage:
                known = of_prompts.get(index // self._n_candidates, event.usage.cached_tokens)
                of_prompts[index // self._n_candidates] = min(known, event.usage.cached_tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(of_prompts.values())},
        }

    def _message(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}

    def _choice(
        self, index: int, body: Json, logprobs: list[TokenLogprob] | None = None, *, of: int | None = None
    ) -> Json:
        """`of`: the completion that ends with this choice."""
        show = chat_logprobs if self._chat else completion_logprobs
        shown = show(logprobs) if self._logprobs and logprobs is not None else None
        choice: Json = {"index": index, **body, "logprobs": shown, "finish_reason": None}
        if of is not None and (reason := self._last[of].finish_reason):
            choice |= {"finish_reason": reason.value, "seed": self._last[of].seed}
        return choice

    def _object(self, choices: list[Json], *, streamed: bool) -> Json:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self._chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}
