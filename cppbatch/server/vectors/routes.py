"""The routes of embedding models and rerankers."""

from __future__ import annotations

from aiohttp import web

from cppbatch.server.parse import read_json
from cppbatch.server.response import respond
from cppbatch.server.serving import SERVING
from cppbatch.server.vectors.plans import prepare_embeddings, prepare_rerank
from cppbatch.server.vectors.schemas import EmbeddingRequest, RerankRequest

routes = web.RouteTableDef()


@routes.post("/v1/embeddings")
async def embeddings(request: web.Request) -> web.StreamResponse:
    """A vector for each input."""
    body = await read_json(request, EmbeddingRequest)
    return await respond(request, await prepare_embeddings(body, request.app[SERVING]))


@routes.post("/v1/rerank")
async def rerank(request: web.Request) -> web.StreamResponse:
    """Documents by how well they answer a query."""
    body = await read_json(request, RerankRequest)
    return await respond(request, await prepare_rerank(body, request.app[SERVING]))
