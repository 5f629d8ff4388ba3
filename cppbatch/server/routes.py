"""The routes. Each reads its request, runs it, and sends the answer."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from aiohttp import web

from cppbatch.cluster.client import EngineClient
from cppbatch.engine.params import SamplingParams
from cppbatch.errors import InvalidRequest
from cppbatch.server.answers import Answer
from cppbatch.server.chat_template import ChatTemplate
from cppbatch.server.errors import json_response
from cppbatch.server.generation import expand, run
from cppbatch.server.respond import send_stream, send_whole
from cppbatch.server.sampling_fields import SamplingFields
from cppbatch.server.schemas import ChatRequest, CompletionRequest, parse

CLIENT = web.AppKey("client", EngineClient)
STARTED = web.AppKey("started", int)

_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chat has none of its own

routes = web.RouteTableDef()


@routes.get("/health")
async def health(request: web.Request) -> web.Response:
    """200 when requests are served, 503 with the state (and how far loading is) when not."""
    state = request.app[CLIENT].health()
    return json_response(state, 200 if state.status == "ok" else 503)


@routes.get("/stats")
async def stats(request: web.Request) -> web.Response:
    """The engine's counters."""
    return json_response(await request.app[CLIENT].stats())


@routes.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    """The loaded model, as a list of one."""
    return json_response({"object": "list", "data": [_model_object(request)]})


@routes.get("/v1/models/{id:.+}")
async def model(request: web.Request) -> web.Response:
    """The loaded model by its id."""
    name = request.match_info["id"]
    if name != request.app[CLIENT].info.name:
        raise web.HTTPNotFound(text=f"there is no model {name!r}; this server has {request.app[CLIENT].info.name!r}")
    return json_response(_model_object(request))


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    """Continues one or more prompts."""
    body = parse(await request.read(), CompletionRequest)
    return await _answer(request, body, body.prompts(), body.params(max_tokens=_COMPLETION_TOKENS), "completion")


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Continues a conversation with the assistant's next message."""
    info = request.app[CLIENT].info
    body = parse(await request.read(), ChatRequest)
    prompt = _template(info.chat_template, info.bos, info.eos).render(body.conversation())
    return await _answer(request, body, [prompt], body.params(), "chat")


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
    n, n_candidates = body.n_choices, body.n_candidates
    logprobs = params.logprobs is not None
    answer = Answer(family, client.info.name, n=n, n_candidates=n_candidates, logprobs=logprobs)
    requests = expand(answer.id, prompts, params, n_candidates, body.options(), ranked=n_candidates > n)
    events = run(client, requests)
    if not body.stream:
        return await send_whole(events, answer, len(requests))
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    return await send_stream(request, events, answer, include_usage=include_usage)


def _model_object(request: web.Request) -> dict[str, object]:
    info = request.app[CLIENT].info
    return {
        "id": info.name,
        "object": "model",
        "created": request.app[STARTED],
        "owned_by": "cppbatch",
        "meta": {
            "description": info.description,
            "n_ctx": info.n_ctx,
            "kv_layout": info.kv_layout,
            "sampling": info.sampling,
            "n_ctx_train": info.n_ctx_train,
            "max_sequence": info.max_sequence,
            "n_params": info.n_params,
            "n_vocab": info.n_vocab,
            "size": info.size_bytes,
        },
    }


@lru_cache(maxsize=4)
def _template(source: str | None, bos: str, eos: str) -> ChatTemplate:
    """A model's template, compiled once."""
    return ChatTemplate(source, bos=bos, eos=eos)
