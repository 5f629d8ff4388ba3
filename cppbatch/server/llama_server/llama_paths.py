"""llama-server's paths of endpoints that have other paths in OpenAI's API."""

from __future__ import annotations

from aiohttp import web

from cppbatch.server import input_tokens
from cppbatch.server.openai import chat_completions, models_endpoint
from cppbatch.server.pooling import rerank_endpoint
from cppbatch.server.responses import create_response

_CHAT, _RESPONSES, _RERANK = "/v1/chat/completions", "/v1/responses", "/v1/rerank"

_POST = {
    "/chat/completions": (_CHAT, chat_completions.chat_completions),
    "/chat/completions/input_tokens": (f"{_CHAT}/input_tokens", input_tokens.chat_input_tokens),
    "/responses": (_RESPONSES, create_response.responses),
    "/responses/input_tokens": (f"{_RESPONSES}/input_tokens", input_tokens.response_input_tokens),
    "/rerank": (_RERANK, rerank_endpoint.rerank),
    "/reranking": (_RERANK, rerank_endpoint.rerank),
    "/v1/reranking": (_RERANK, rerank_endpoint.rerank),
}
"""By path: the path in OpenAI's API, and the handler."""
_DOCUMENTED = {
    **chat_completions.ENDPOINTS,
    **create_response.ENDPOINTS,
    **input_tokens.ENDPOINTS,
    **rerank_endpoint.ENDPOINTS,
}

routes = [web.get("/models", models_endpoint.models), *(web.post(path, to) for path, (_, to) in _POST.items())]

ENDPOINTS = {
    ("get", "/models"): models_endpoint.ENDPOINTS["get", "/v1/models"]._replace(summary="Same as /v1/models"),
    **{
        ("post", path): _DOCUMENTED["post", known]._replace(summary=f"Same as {known}")
        for path, (known, _) in _POST.items()
    },
}
