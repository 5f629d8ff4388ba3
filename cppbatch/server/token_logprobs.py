"""Log-probabilities of tokens as llama-server and our own API show them: with ids, and in full."""

from __future__ import annotations

from typing import Any

from cppbatch.engine.request import TokenLogprob

Json = dict[str, Any]


def token_logprobs(entries: list[TokenLogprob]) -> list[Json]:
    """Each token, and the likeliest ones at its place."""
    return [
        {
            **_token(entry.token, entry.piece, entry.logprob),
            "top_logprobs": [_token(token, piece, logprob) for token, piece, logprob in entry.top],
        }
        for entry in entries
    ]


def _token(token: int, piece: bytes, logprob: float | None) -> Json:
    return {"id": token, "token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": logprob}
