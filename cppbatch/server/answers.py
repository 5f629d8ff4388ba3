"""OpenAI's answer objects for completions and chat, whole and streamed.

Both families answer alike: choices with a finish reason, and usage. An `Answer` knows the family's shapes.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

from cppbatch.engine.request import FinishReason, GenerationEvent
from cppbatch.errors import EngineClosed
from cppbatch.server.errors import GenerationFailed

Json = dict[str, Any]


class Answer:
    """Builds the objects of one answer, whose choices are `n` for each prompt."""

    def __init__(self, family: Literal["completion", "chat"], model: str, *, n: int) -> None:
        self.id = f"{'chatcmpl' if family == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        self._chat = family == "chat"
        self._model = model
        self._created = int(time.time())
        self._n = n
        self._last: dict[int, GenerationEvent] = {}

    def note(self, index: int, event: GenerationEvent) -> None:
        """Remembers how a choice ended. Raises `GenerationFailed` or `EngineClosed` when it was not finished."""
        if event.finish_reason is FinishReason.ERROR:
            raise GenerationFailed(event.error or "the generation failed")
        if event.finish_reason is FinishReason.CANCELLED:  # not by its client, who would not be listening
            raise EngineClosed("the server is going down")
        if event.finish_reason:
            self._last[index] = event

    def whole(self, texts: list[str]) -> Json:
        """The answer of a request that is not streamed."""
        choices = [self._choice(i, self._message(text), self._finish(i)) for i, text in enumerate(texts)]
        return self._object(choices, streamed=False) | {"usage": self.usage()}

    def opening(self, index: int) -> Json | None:
        """The first chunk of a choice: in chat, it names the role."""
        if not self._chat:
            return None
        return self._object([self._choice(index, {"delta": {"role": "assistant", "content": ""}}, None)], streamed=True)

    def delta(self, index: int, text: str) -> Json:
        """A chunk with new text."""
        body = {"delta": {"content": text}} if self._chat else {"text": text}
        return self._object([self._choice(index, body, None)], streamed=True)

    def closing(self, index: int) -> Json:
        """The last chunk of a choice, with its finish reason."""
        body: Json = {"delta": {}} if self._chat else {"text": ""}
        return self._object([self._choice(index, body, self._finish(index))], streamed=True)

    def usage_chunk(self) -> Json:
        """The chunk with no choices that `include_usage` asks for."""
        return self._object([], streamed=True) | {"usage": self.usage()}

    def usage(self) -> Json:
        """Token counts of all choices; choices of one prompt count that prompt once, as OpenAI does."""
        ends = [event.usage for event in self._last.values() if event.usage]
        completion = sum(usage.completion_tokens for usage in ends)
        prompt = sum(usage.prompt_tokens for usage in ends) // self._n
        of_prompts: dict[int, int] = {}  # what no choice of a prompt had to compute
        for index, event in self._last.items():
            if event.usage:
                known = of_prompts.get(index // self._n, event.usage.cached_tokens)
                of_prompts[index // self._n] = min(known, event.usage.cached_tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(of_prompts.values())},
        }

    def _finish(self, index: int) -> str | None:
        reason = self._last[index].finish_reason
        return reason.value if reason else None

    def _message(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}

    @staticmethod
    def _choice(index: int, body: Json, finish_reason: str | None) -> Json:
        return {"index": index, **body, "logprobs": None, "finish_reason": finish_reason}

    def _object(self, choices: list[Json], *, streamed: bool) -> Json:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self._chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}
