"""The routes of embedding models and rerankers."""

from __future__ import annotations

from aiohttp import web

from cppbatch.server.parse import read_json
from cppbatch.server.respond import answer
from cppbatch.server.serving import SERVING
from cppbatch.server.vectors.plans import embedding_plan, rerank_plan
from cppbatch.server.vectors.schemas import EmbeddingRequest, RerankRequest

routes = web.RouteTableDef()


@routes.post("/v1/embeddings")
async def embeddings(request: web.Request) -> web.StreamResponse:
    """A vector for each input."""
    body = await read_json(request, EmbeddingRequest)
    return await answer(request, await embedding_plan(body, request.app[SERVING]))


@routes.post("/v1/rerank")
async def rerank(request: web.Request) -> web.StreamResponse:
    """Documents by how well they answer a query."""
    body = await read_json(request, RerankRequest)
    return await answer(request, await rerank_plan(body, request.app[SERVING]))
