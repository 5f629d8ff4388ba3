"""Log-probabilities of tokens, in the format of each API."""

from __future__ import annotations

import math

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.engine.request import GenerationEvent, TokenLogprob


class ChatTopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A generated token with its log-probability."""

    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """`logprobs` of a chat choice."""

    content: list[ChatTokenLogprob]
    refusal: None = None


def chat_token_logprobs(entries: list[TokenLogprob]) -> list[ChatTokenLogprob]:
    """The tokens in the format of OpenAI's chat completions."""
    return [
        ChatTokenLogprob(
            token=_text(entry.piece),
            logprob=entry.logprob,
            bytes=list(entry.piece),
            top_logprobs=[
                ChatTopLogprob(token=_text(piece), logprob=logprob, bytes=list(piece))
                for _, piece, logprob in entry.top
            ],
        )
        for entry in entries
    ]


class TokenSplitter:
    """Splits the events of a completion into events of one token each, with its log-probability.

    An event may have several tokens (drafts, a slow client), of reasoning as well as of the text after it.
    """

    def __init__(self) -> None:
        self._n_held_back = 0  # characters of earlier tokens that no event's text had: the start of a stop string

    def split(self, event: GenerationEvent) -> list[GenerationEvent]:
        """The events of its tokens. The last one has the remaining text, and what else the event has."""
        events: list[GenerationEvent] = []
        start, end = 0, self._n_held_back
        for token, text, logprob in zip(event.tokens, event.token_texts, event.logprobs, strict=False):  # no end token
            end += len(text)
            events.append(
                GenerationEvent(
                    request_id=event.request_id,
                    text=event.text[start:end],
                    tokens=[token],
                    token_texts=[text],
                    logprobs=[logprob],
                )
            )
            start = end
        self._n_held_back = max(end - len(event.text), 0)
        if not events:
            return [msgspec.structs.replace(event, logprobs=[])]
        last = events.pop()
        fields = {name: getattr(last, name) for name in ("tokens", "token_texts", "logprobs")}
        return [*events, msgspec.structs.replace(event, text=last.text + event.text[start:], **fields)]


# --- completions ----------------------------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """`logprobs` of a completion choice: lists with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens at each position, always including the generated one."""
    text_offset: list[int]
    """The number of characters before each token."""


def completion_logprobs(entries: list[TokenLogprob]) -> CompletionLogprobs:
    """The tokens in the format of OpenAI's completions."""
    return CompletionLogprobs(
        tokens=[_format_token(entry.piece) for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[
            None
            if entry.logprob is None
            else _by_text([*((piece, logprob) for _, piece, logprob in entry.top), (entry.piece, entry.logprob)])
            for entry in entries
        ],
        text_offset=[entry.text_offset for entry in entries],
    )


def _by_text(entries: list[tuple[bytes, float]]) -> dict[str, float]:
    """If different tokens have the same text, keeps the more likely one."""
    shown: dict[str, float] = {}
    for piece, logprob in entries:
        text = _format_token(piece)
        shown[text] = max(logprob, shown.get(text, logprob))
    return shown


def _format_token(piece: bytes) -> str:
    """A token as text; an incomplete UTF-8 character in OpenAI's notation, `bytes:\\xf0\\x9f`."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


# --- /generate, and llama-server's API -------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One of the most likely tokens at a position, with its id."""

    id: int
    token: str
    bytes: list[int]
    logprob: float | None


class LogprobEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A token with its id and log-probability."""

    id: int
    token: str
    bytes: list[int]
    logprob: float | None
    """None for the first token of an echoed prompt."""
    top_logprobs: list[TopLogprob]


def logprob_entries(entries: list[TokenLogprob]) -> list[LogprobEntry]:
    """The tokens in the format of llama-server's API and `/generate`."""
    return [
        LogprobEntry(
            id=entry.token,
            token=_text(entry.piece),
            bytes=list(entry.piece),
            logprob=entry.logprob,
            top_logprobs=[
                TopLogprob(id=token, token=_text(piece), bytes=list(piece), logprob=logprob)
                for token, piece, logprob in entry.top
            ],
        )
        for entry in entries
    ]


class TopProb(msgspec.Struct, frozen=True, kw_only=True):
    """One of the most likely tokens after sampling filters, with its id."""

    id: int
    token: str
    bytes: list[int]
    prob: float


class CompletionProbability(msgspec.Struct, frozen=True, kw_only=True):
    """A token with its id, and `logprob` and `top_logprobs`, or `prob` and `top_probs` with `post_sampling_probs`."""

    id: int
    token: str
    bytes: list[int]
    logprob: float | UnsetType | None = UNSET
    top_logprobs: list[TopLogprob] | UnsetType = UNSET
    prob: float | UnsetType = UNSET
    top_probs: list[TopProb] | UnsetType = UNSET


def completion_probabilities(entries: list[TokenLogprob], *, post_sampling: bool) -> list[CompletionProbability]:
    """The tokens in the format of llama-server's `/completion`."""
    if not post_sampling:
        return [
            CompletionProbability(**{name: getattr(entry, name) for name in LogprobEntry.__struct_fields__})
            for entry in logprob_entries(entries)
        ]
    return [
        CompletionProbability(
            id=entry.token,
            token=_text(entry.piece),
            bytes=list(entry.piece),
            prob=math.exp(entry.logprob or 0.0),
            top_probs=[
                TopProb(id=token, token=_text(piece), bytes=list(piece), prob=math.exp(logprob))
                for token, piece, logprob in entry.top
            ],
        )
        for entry in entries
    ]


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")
