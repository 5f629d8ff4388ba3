"""Converts the events of a request to the format of llama-cpp-python's results."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Generator, Iterator
from typing import Any, Protocol

import msgspec

from cppbatch.engine.params import SamplingParams, replace_fields
from cppbatch.engine.request import FinishReason, GenerationEvent, TokenLogprob
from cppbatch.errors import GenerationFailed
from cppbatch.llama_cpp_python.arguments import Callbacks

Json = dict[str, Any]

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Kept:
    """The events of a request, until its stopping criteria are met.

    Iteration raises the exceptions of logits processors and stopping criteria, and `GenerationFailed`.
    """

    def __init__(
        self, llama: object, events: Generator[GenerationEvent, None, None], callbacks: Callbacks | None, n_prompt: int
    ) -> None:
        """`llama`: a reference to the `Llama` object, which closes its engine when it is garbage-collected."""
        self._llama = llama
        self._events, self._callbacks, self.n_prompt = events, callbacks, n_prompt
        self.n_tokens = 0
        """Tokens so far, without an end token."""
        self.has_end_token = False

    def __iter__(self) -> Iterator[GenerationEvent]:
        text = texts = ""
        for event in map(_readable, self._events):
            self._check(event)
            n, left = len(event.tokens), self._n_left()
            if left is not None and (left < n or event.finish_reason):
                n = min(left, n)
                texts += "".join(event.token_texts[:n])
                self.n_tokens += n
                yield msgspec.structs.replace(
                    event, text=texts[len(text) :], tokens=event.tokens[:n], logprobs=event.logprobs[:n],
                    finish_reason=FinishReason.STOP,
                )  # fmt: skip
                self.close()
                return
            text, texts, self.n_tokens = text + event.text, texts + "".join(event.token_texts), self.n_tokens + n
            if event.finish_reason and event.usage:
                self.has_end_token = event.usage.completion_tokens > self.n_tokens
            yield event

    def _n_left(self) -> int | None:
        """The number of tokens until the criteria were met; None if they are not met."""
        n_kept = self._callbacks.n_kept if self._callbacks else None
        return None if n_kept is None else max(0, n_kept - self.n_prompt - self.n_tokens)

    def tokens(self, *, end: int) -> Iterator[int]:
        """The token ids, with `end` instead of an end token of the model."""
        for event in self:
            yield from event.tokens
        if self.has_end_token:
            yield end

    def close(self) -> None:
        """Cancels the request if it has not ended."""
        self._events.close()

    def _check(self, event: GenerationEvent) -> None:
        if event.finish_reason in (None, *_FINISH_REASONS):
            return
        if self._callbacks and self._callbacks.error:
            raise self._callbacks.error
        assert event.finish_reason is not None
        raise GenerationFailed(event.error or f"the request ended: {event.finish_reason.value}")


class _Model(Protocol):
    model_path: str

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes: ...
    def token_bos(self) -> int: ...


class Completion:
    """One call of `create_completion`."""

    def __init__(self, llama: _Model, given: Json, prompt_tokens: list[int], *, after: str = "") -> None:
        """`after`: text appended to the model's."""
        self._tokens, self._after = prompt_tokens, after
        prompt = given["prompt"]
        self._n_before = len(prompt)  # as in llama-cpp-python: characters of a text, or token ids
        self._is_scored, self._is_stream = given["logprobs"] is not None, given["stream"]
        self._shown = ""
        self._n_special = self._n_hidden = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        if given["echo"] and not given["stream"]:
            self._shown = prompt if isinstance(prompt, str) else _text(llama.detokenize(prompt))
            if self._is_scored:
                self._n_special, self._n_before = int(prompt_tokens[:1] == [llama.token_bos()]), 0
                pieces = (llama.detokenize([token], special=True) for token in prompt_tokens)
                self._n_hidden = len(_text(b"".join(pieces)))
        self._starts_line = not prompt_tokens or prompt == ""
        self._head = {
            "id": f"cmpl-{uuid.uuid4()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": given["model"] if given["model"] is not None else llama.model_path,
        }

    def with_echo(self, params: SamplingParams) -> SamplingParams:
        """The parameters, with scoring of the prompt if the result includes it with log-probabilities."""
        return replace_fields(params, echo=True) if self._n_hidden else params

    def whole(self, kept: Kept) -> Json:
        """The result of a request."""
        text, logprobs, reason = "", list[TokenLogprob](), None
        for event in kept:
            text += event.text
            logprobs += event.logprobs
            reason = event.finish_reason
        text = text[self._n_hidden :]
        if self._starts_line:
            text = text.removeprefix(" ")
        n_scored = kept.n_tokens + (len(self._tokens) if self._n_hidden else 0)
        n_prompt = len(self._tokens)
        usage = {
            "prompt_tokens": n_prompt,
            "completion_tokens": kept.n_tokens,
            "total_tokens": n_prompt + kept.n_tokens,
        }
        choice = self._choice(self._shown + text + self._after, logprobs[self._n_special : n_scored], reason)
        return {**self._head, "choices": [choice], "usage": usage}

    def chunks(self, kept: Kept) -> Iterator[Json]:
        """The chunks of a stream; the last one has the finish reason and no text."""
        reason, is_first = None, self._starts_line
        try:
            for event in kept:
                reason = event.finish_reason
                for text, logprobs in self._tokens_of(event):
                    shown, is_first = text.removeprefix(" ") if is_first else text, is_first and not text
                    if shown or logprobs:
                        yield {**self._head, "choices": [self._choice(shown, logprobs, None)]}
        finally:
            kept.close()
        yield {**self._head, "choices": [self._choice("", [], reason)]}

    @staticmethod
    def _tokens_of(event: GenerationEvent) -> Iterator[tuple[str, list[TokenLogprob]]]:
        """The text of each token, with its log-probabilities; the whole event at once if some text is held back."""
        logprobs = event.logprobs[: len(event.tokens)]
        if "".join(event.token_texts) != event.text or not event.tokens:
            yield event.text, logprobs
            return
        for i, text in enumerate(event.token_texts):
            yield text, logprobs[i : i + 1]

    def _choice(self, text: str, entries: list[TokenLogprob], reason: FinishReason | None) -> Json:
        logprobs = None
        if self._is_scored and (entries or not self._is_stream):
            logprobs = logprobs_of(entries)
            logprobs["text_offset"] = [self._offset(entry.piece) for entry in entries]
            if self._n_hidden:  # as in OpenAI's API, even if another token precedes it
                logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
        shown = reason and _FINISH_REASONS[reason]
        return {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": shown}

    def _offset(self, piece: bytes) -> int:
        """The text offset of the next token."""
        start, self._n_before = self._n_before, self._n_before + len(self._decoder.decode(piece))
        return start


def logprobs_of(entries: list[TokenLogprob]) -> Json:
    """The log-probabilities in llama-cpp-python's format."""
    texts = [_text(entry.piece) for entry in entries]
    tops: list[dict[str, float | None]] = [
        {**{_text(piece): logprob for _, piece, logprob in entry.top}, text: entry.logprob}
        for entry, text in zip(entries, texts, strict=True)
    ]
    return {
        "tokens": texts,
        "text_offset": [entry.text_offset for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": tops,
    }


def _readable(event: GenerationEvent) -> GenerationEvent:
    """The event without invalid UTF-8 bytes: llama-cpp-python omits them, the engine returns them as U+FFFD."""
    if "\ufffd" not in event.text and not any("\ufffd" in text for text in event.token_texts):
        return event
    texts = [text.replace("\ufffd", "") for text in event.token_texts]
    return msgspec.structs.replace(event, text=event.text.replace("\ufffd", ""), token_texts=texts)


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "ignore")
