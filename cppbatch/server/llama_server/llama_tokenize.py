"""`POST /tokenize`, `/detokenize` and `/apply-template`: prompts as tokens and as text."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from cppbatch.engine.request import TokenPiece, detokenize
from cppbatch.server.api_errors import json_response
from cppbatch.server.endpoint import generation_endpoint
from cppbatch.server.mixed_prompts import tokenize
from cppbatch.server.openai.chat_completions import prepare_chat
from cppbatch.server.openai.chat_types import ChatCompletionRequest
from cppbatch.server.parse import read_json
from cppbatch.server.serving import SERVING

routes = web.RouteTableDef()


class TokenizeRequest(msgspec.Struct):
    """The body of `POST /tokenize`."""

    content: str | list[str | int] = ""
    """A text, or texts and token ids mixed."""
    add_special: bool = False
    """Begin with BOS if the model wants it."""
    parse_special: bool = True
    """Read the texts of control tokens as control tokens."""
    with_pieces: bool = False


class TokenAndPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A token with its text, or with its bytes if they are not valid UTF-8."""

    id: int
    piece: str | list[int]


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`."""

    tokens: list[int | TokenAndPiece]
    """Objects with `with_pieces`, otherwise ids."""


class DetokenizeRequest(msgspec.Struct):
    """The body of `POST /detokenize`."""

    tokens: list[int] = []


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    content: str


class ApplyTemplateResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /apply-template`."""

    prompt: str


@routes.post("/tokenize")
async def tokenize_text(request: web.Request) -> web.Response:
    """Returns the tokens of a text."""
    body = await read_json(request, TokenizeRequest)
    tokens = await tokenize(
        request.app[SERVING], body.content, "content", add_special=body.add_special, parse_special=body.parse_special
    )
    shown = await asyncio.to_thread(_shown, tokens, with_pieces=body.with_pieces)
    return json_response(TokenizeResponse(tokens=shown))


def _shown(tokens: list[TokenPiece], *, with_pieces: bool) -> list[Any]:
    """The ids, or the JSON of a `TokenAndPiece` for each token. Each distinct token is encoded once, because a text may
    have a million tokens, but only a few thousand distinct ones."""
    if not with_pieces:
        return [token.id for token in tokens]
    encoded = {
        token.id: msgspec.Raw(msgspec.json.encode(TokenAndPiece(id=token.id, piece=_text_or_bytes(token.piece))))
        for token in {token.id: token for token in tokens}.values()
    }
    return [encoded[token.id] for token in tokens]


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


@routes.post("/detokenize")
async def detokenize_tokens(request: web.Request) -> web.Response:
    """Returns the text of tokens."""
    body = await read_json(request, DetokenizeRequest)
    ids: list[str | int] = list(body.tokens)
    tokens = await tokenize(request.app[SERVING], ids, "tokens")
    return json_response(DetokenizeResponse(content=detokenize(tokens)))


@routes.post("/apply-template")
async def apply_template(request: web.Request) -> web.Response:
    """Returns the prompt of a conversation."""
    body, serving = await read_json(request, ChatCompletionRequest), request.app[SERVING]
    return json_response(ApplyTemplateResponse(prompt=(await prepare_chat(body, serving)).prompt))


ENDPOINTS = {
    ("post", "/tokenize"): generation_endpoint(
        "Returns the tokens of a text", TokenizeRequest, TokenizeResponse, streams=False
    ),
    ("post", "/detokenize"): generation_endpoint(
        "Returns the text of tokens", DetokenizeRequest, DetokenizeResponse, streams=False
    ),
    ("post", "/apply-template"): generation_endpoint(
        "Returns the prompt of a conversation", ChatCompletionRequest, ApplyTemplateResponse, streams=False
    ),
}
