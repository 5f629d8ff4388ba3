"""Log-probabilities as OpenAI's two families show them."""

from __future__ import annotations

from typing import Any

from cppbatch.engine.request import TokenLogprob

Json = dict[str, Any]


def chat_logprobs(entries: list[TokenLogprob]) -> Json:
    """`logprobs` of a chat choice."""
    return {
        "content": [
            {
                **_chat_token(entry.piece, entry.logprob),
                "top_logprobs": [_chat_token(piece, logprob) for _, piece, logprob in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_token(piece: bytes, logprob: float | None) -> Json:
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}


def completion_logprobs(entries: list[TokenLogprob]) -> Json:
    """`logprobs` of a completion choice. The token taken is among the likeliest ones shown, even if it was not."""
    return {
        "tokens": [_text(entry.piece) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            None
            if entry.logprob is None
            else _by_text([*((piece, logprob) for _, piece, logprob in entry.top), (entry.piece, entry.logprob)])
            for entry in entries
        ],
        "text_offset": [entry.text_offset for entry in entries],
    }


def _by_text(entries: list[tuple[bytes, float]]) -> dict[str, float]:
    """Different tokens may read alike: then the likelier one is shown."""
    shown: dict[str, float] = {}
    for piece, logprob in entries:
        shown[_text(piece)] = max(logprob, shown.get(_text(piece), logprob))
    return shown


def _text(piece: bytes) -> str:
    """A token as text; half a character as OpenAI writes it, `bytes:\\xf0\\x9f`."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
