"""The routes. Each reads its request, runs it, and sends the answer."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import msgspec
from aiohttp import web

from cppbatch.chat.template import ChatTemplate
from cppbatch.cluster.client import EngineClient
from cppbatch.engine.params import SamplingParams
from cppbatch.errors import EngineClosed, InvalidRequest
from cppbatch.server.admission import LIMITS
from cppbatch.server.answers import Answer
from cppbatch.server.errors import json_response
from cppbatch.server.generation import expand, run
from cppbatch.server.metrics import CONTENT_TYPE, METRICS, endpoint_of
from cppbatch.server.openapi import document
from cppbatch.server.respond import send_stream, send_whole
from cppbatch.server.sampling_fields import SamplingFields
from cppbatch.server.schemas import ChatRequest, CompletionRequest, parse
from cppbatch.server.shapes import Model, ModelList, ModelMeta, ModelWorker, ServerFigures

CLIENT = web.AppKey("client", EngineClient)
STARTED = web.AppKey("started", int)

_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chat has none of its own

routes = web.RouteTableDef()


@routes.get("/stats")
async def stats(request: web.Request) -> web.Response:
    """The sums over all engines, the last minute, and each engine by itself."""
    client = request.app[CLIENT]
    try:
        totals = await client.stats()
    except EngineClosed:  # none answers just now, and that is worth knowing too
        totals = None
    tokens_per_second = totals.recent_steps.tokens_per_second if totals else None
    figures = ServerFigures(
        last_minute=request.app[METRICS].recent.last_minute(tokens_per_second), workers=await client.workers()
    )
    return json_response({**(msgspec.structs.asdict(totals) if totals else {}), **msgspec.structs.asdict(figures)})


@routes.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    """Everything for Prometheus."""
    page = request.app[METRICS].page(await request.app[CLIENT].workers())
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE})


@routes.get("/openapi.json")
async def openapi(_request: web.Request) -> web.Response:
    """What every route takes and gives."""
    return web.Response(body=document(), content_type="application/json")


@routes.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    """The loaded model, as a list of one."""
    return json_response(ModelList(data=[await _model(request)]))


@routes.get("/v1/models/{id:.+}")
async def model(request: web.Request) -> web.Response:
    """The loaded model by its id."""
    name = request.match_info["id"]
    if name != request.app[CLIENT].info.name:
        raise web.HTTPNotFound(text=f"there is no model {name!r}; this server has {request.app[CLIENT].info.name!r}")
    return json_response(await _model(request))


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    """Continues one or more prompts."""
    body = parse(await request.read(), CompletionRequest)
    params = body.params(max_tokens=request.app[LIMITS].default_tokens(_COMPLETION_TOKENS))
    return await _answer(request, body, body.prompts(), params, "completion")


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Continues a conversation with the assistant's next message."""
    info = request.app[CLIENT].info
    body = parse(await request.read(), ChatRequest)
    prompt = _template(info.chat_template, info.bos, info.eos).render(body.conversation())
    params = body.params(max_tokens=request.app[LIMITS].default_tokens(None))
    return await _answer(request, body, [prompt], params, "chat")


async def _answer(
    request: web.Request,
    body: SamplingFields,
    prompts: list[str | list[int]],
    params: SamplingParams,
    family: Literal["completion", "chat"],
) -> web.StreamResponse:
    """Runs the prompts, as many completions of each as are wanted, and sends the answer as the client wants it."""
    client = request.app[CLIENT]
    if body.model is not None and body.model != client.info.name:
        raise InvalidRequest("model", f"there is no {body.model!r} here; this server has {client.info.name!r}")
    limits = request.app[LIMITS]
    limits.check(body)
    n, n_candidates = body.n_choices, body.n_candidates
    logprobs = params.logprobs is not None
    answer = Answer(family, client.info.name, n=n, n_candidates=n_candidates, logprobs=logprobs)
    options = body.options() | {"timeout": limits.timeout(body.timeout)}
    requests = expand(answer.id, prompts, params, n_candidates, options, ranked=n_candidates > n)
    events = request.app[METRICS].observe(run(client, requests), endpoint_of(request), len(requests))
    if not body.stream:
        return await send_whole(events, answer, len(requests))
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    return await send_stream(request, events, answer, include_usage=include_usage)


async def _model(request: web.Request) -> Model:
    info, workers = request.app[CLIENT].info, await request.app[CLIENT].workers()
    meta = ModelMeta(
        description=info.description,
        n_ctx=info.n_ctx,
        kv_layout=info.kv_layout,
        sampling=info.sampling,
        n_ctx_train=info.n_ctx_train,
        max_sequence=info.max_sequence,
        n_params=info.n_params,
        n_vocab=info.n_vocab,
        size=info.size_bytes,
        workers=[ModelWorker(name=each.name, device=each.device, status=each.health.status) for each in workers],
    )
    return Model(id=info.name, created=request.app[STARTED], meta=meta)


@lru_cache(maxsize=4)
def _template(source: str | None, bos: str, eos: str) -> ChatTemplate:
    """A model's template, compiled once."""
    return ChatTemplate(source, bos=bos, eos=eos)
