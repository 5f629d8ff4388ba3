"""llama-server's routes that others do not have, and its names of those that they have."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from cppbatch import __version__
from cppbatch.chat.template import CHATML
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import TokenPiece
from cppbatch.server.api_errors import json_response
from cppbatch.server.llama_server.plans import prepare_completion, prepare_infill
from cppbatch.server.llama_server.replies import generation_settings
from cppbatch.server.llama_server.schemas import (
    DetokenizeRequest,
    InfillRequest,
    LlamaCompletionRequest,
    LlamaFields,
    TokenizeRequest,
)
from cppbatch.server.llama_server.shapes import DefaultSettings, LoraAdapter, Modalities, Props, Slot
from cppbatch.server.llama_server.time_limit import run_with_time_limit
from cppbatch.server.llama_server.tokens import text_of, tokens_of
from cppbatch.server.openai.chat_completions import chat_completions, prepare_chat
from cppbatch.server.openai.chat_types import ChatCompletionRequest
from cppbatch.server.openai.models_endpoint import models
from cppbatch.server.parse import read_json
from cppbatch.server.response import PreparedRequest, respond
from cppbatch.server.serving import SERVING, Serving

routes = web.RouteTableDef()
routes.post("/chat/completions")(chat_completions)
routes.get("/models")(models)


@routes.post("/completion")
@routes.post("/completions")
async def completion(request: web.Request) -> web.StreamResponse:
    """Continues one or more prompts."""
    body = await read_json(request, LlamaCompletionRequest)
    return await _answer(request, body, await prepare_completion(body, request.app[SERVING]))


@routes.post("/infill")
async def infill(request: web.Request) -> web.StreamResponse:
    """Finds what stands between two texts."""
    body = await read_json(request, InfillRequest)
    return await _answer(request, body, await prepare_infill(body, request.app[SERVING]))


async def _answer(request: web.Request, body: LlamaFields, prepared: PreparedRequest) -> web.StreamResponse:
    seconds = (body.t_max_predict_ms or 0) / 1000
    if seconds <= 0:
        return await respond(request, prepared)
    client = request.app[SERVING].client
    return await respond(request, prepared, run_with_time_limit(client, prepared.requests, seconds))


@routes.post("/tokenize")
async def tokenize(request: web.Request) -> web.Response:
    """A text's tokens."""
    body = await read_json(request, TokenizeRequest)
    tokens = await tokens_of(
        request.app[SERVING], body.content, "content", add_special=body.add_special, parse_special=body.parse_special
    )
    return json_response({"tokens": await asyncio.to_thread(_shown, tokens, with_pieces=body.with_pieces)})


def _shown(tokens: list[TokenPiece], *, with_pieces: bool) -> list[Any]:
    """Each token once as JSON: there may be a million, of a few thousand."""
    if not with_pieces:
        return [token.id for token in tokens]
    known = {token.id: token for token in tokens}
    pieces = {id_: msgspec.Raw(msgspec.json.encode({"id": id_, "piece": _piece(known[id_])})) for id_ in known}
    return [pieces[token.id] for token in tokens]


def _piece(token: TokenPiece) -> str | list[int]:
    """As text, or as bytes where it is no whole character."""
    try:
        return token.piece.decode()
    except UnicodeDecodeError:
        return list(token.piece)


@routes.post("/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    """The text of tokens."""
    body = await read_json(request, DetokenizeRequest)
    ids: list[str | int] = list(body.tokens)
    return json_response({"content": text_of(await tokens_of(request.app[SERVING], ids, "tokens"))})


@routes.post("/apply-template")
async def apply_template(request: web.Request) -> web.Response:
    """The prompt of a conversation."""
    body, serving = await read_json(request, ChatCompletionRequest), request.app[SERVING]
    return json_response({"prompt": (await prepare_chat(body, serving)).prompt})


@routes.get("/props")
async def props(request: web.Request) -> web.Response:
    """What the server has loaded, and what it does unless told otherwise."""
    serving = request.app[SERVING]
    info = serving.info
    return json_response(
        Props(
            default_generation_settings=DefaultSettings(params=_defaults(serving), n_ctx=info.max_sequence),
            total_slots=serving.client.config.n_parallel * len(await serving.client.workers()),
            model_alias=info.name,
            model_path=info.path,
            modalities=Modalities(),
            chat_template=serving.template or CHATML,
            bos_token=info.bos,
            eos_token=info.eos,
            build_info=f"cppbatch {__version__}",
        )
    )


def _defaults(serving: Serving) -> dict[str, Any]:
    params = SamplingParams(max_tokens=serving.limits.default_tokens(None))
    return generation_settings(params, LlamaFields())


@routes.get("/slots")
async def slots(request: web.Request) -> web.Response:
    """A slot for each sequence that can run at once, with `fail_on_no_slot` 503 when all do.

    Which request has which is not known here: the first ones are the busy ones.
    """
    serving = request.app[SERVING]
    n, n_ctx = serving.client.config.n_parallel, serving.info.max_sequence
    found: list[Slot] = []
    for worker in await serving.client.workers():
        running = worker.stats.running if worker.stats else worker.in_flight
        found += [Slot(id=len(found) + i, n_ctx=n_ctx, is_processing=i < running) for i in range(n)]
    if request.query.get("fail_on_no_slot") and all(slot.is_processing for slot in found):
        raise web.HTTPServiceUnavailable(text="no slot available")
    return json_response(msgspec.to_builtins(found))


@routes.get("/lora-adapters")
async def lora_adapters(request: web.Request) -> web.Response:
    """The adapters that a request's `lora` can name. Their scales are set by --lora, and by each request for itself."""
    adapters = request.app[SERVING].info.adapters
    found = [LoraAdapter(id=i, name=its.name, path=its.path, scale=its.scale) for i, its in enumerate(adapters)]
    return json_response(found)
