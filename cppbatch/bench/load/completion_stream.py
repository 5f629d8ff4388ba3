"""Reading a streamed completion: the arrival time of each chunk of text, and the usage that the server reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec


class RequestFailure(Exception):
    """A request failed. Reports count failures by `kind`."""

    def __init__(self, kind: str, message: str = "", status: int | None = None) -> None:
        super().__init__(message or kind)
        self.kind, self.status = kind, status


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def content(self) -> str | None:
        """Returns the text without reasoning; None: the chunk has neither, as the first one of a chat."""
        delta = self.delta
        text = self.text or (delta and delta.content) or ""
        return text if text or (delta and (delta.reasoning_content or delta.reasoning)) else None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class TokenUsage(msgspec.Struct):
    """OpenAI's usage object."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: TokenUsage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


class CompletionStream:
    """Parses the stream of one request. Times are in seconds, on the clock of the caller of `feed`."""

    def __init__(self) -> None:
        self.first: float | None = None
        """When the first text arrived."""
        self.gaps: list[float] = []
        """Between two chunks of text of the same choice."""
        self.n_chunks = 0
        self.texts: list[str] = []
        """Of each chunk, without reasoning."""
        self.usage: TokenUsage | None = None
        self._rest = b""
        self._last: dict[int, float] = {}  # arrival time of the last chunk, by choice
        self._ended = False

    def feed(self, data: bytes, now: float) -> None:
        """Reads bytes that arrived at `now`. Raises `RequestFailure` if they are not chunks of a completion."""
        for payload in self._payloads(data):
            if payload == b"[DONE]":
                self._ended = True
            else:
                self._take(payload, now)

    def finish(self, now: float) -> None:
        """The stream has ended. Raises `RequestFailure` if the completion is incomplete."""
        self.feed(b"\n", now)
        if not self._ended:
            raise RequestFailure("stream cut short", "the stream ended without a finish_reason or [DONE]")
        if self.first is None:
            raise RequestFailure("empty answer", "the stream ended without any text")

    def _payloads(self, data: bytes) -> Iterator[bytes]:
        """Yields the data of the lines that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"data":
                yield value.strip()

    def _take(self, payload: bytes, now: float) -> None:
        try:
            chunk = _DECODER.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestFailure("unreadable answer", f"{error}: {error_text(payload)}") from error
        if chunk.error:
            raise RequestFailure("error in the stream", error_text(payload))
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self._ended |= choice.finish_reason is not None
            if (text := choice.content()) is not None:
                self._add_text(choice.index, text, now)

    def _add_text(self, index: int, text: str, now: float) -> None:
        self.n_chunks += 1
        self.texts.append(text)
        if self.first is None:
            self.first = now
        if index in self._last:
            self.gaps.append(now - self._last[index])
        self._last[index] = now


def error_text(body: bytes) -> str:
    """Returns the message of an OpenAI error, or else the body, in one short line."""
    try:
        error = msgspec.json.decode(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(text.split())[:300]
