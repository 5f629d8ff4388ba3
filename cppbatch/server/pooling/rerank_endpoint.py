"""`POST /v1/rerank`."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from aiohttp import web
from msgspec import UNSET, UnsetType

from cppbatch.engine.request import GenerationEvent, Pair
from cppbatch.errors import InvalidRequest
from cppbatch.server.endpoint import generation_endpoint
from cppbatch.server.parse import read_json
from cppbatch.server.pooling.pooling_response import (
    PoolingBuilder,
    PoolingFields,
    PoolingUsage,
    check_count,
    pooling_requests,
)
from cppbatch.server.response import PreparedRequest, respond
from cppbatch.server.serving import SERVING, Serving

routes = web.RouteTableDef()


class Document(msgspec.Struct):
    """A document as an object, which Cohere's and Jina's clients may send instead of a string."""

    text: str


class RerankRequest(PoolingFields, kw_only=True):
    """The body of `POST /v1/rerank`."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    """Return only this many of the best documents; None: all."""
    return_documents: bool | None = None
    """Include the document in each result."""

    def texts(self) -> list[str]:
        """The documents. Raises `InvalidRequest`."""
        if not self.documents:
            raise InvalidRequest("documents", "is empty; give at least one")
        check_count("documents", len(self.documents))
        if self.top_n is not None and self.top_n < 1:
            raise InvalidRequest("top_n", f"is {self.top_n}; it must be at least 1")
        return [document.text if isinstance(document, Document) else document for document in self.documents]


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document of the request."""

    text: str


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    """The score of a document."""

    index: int
    """Of the document in the request."""
    relevance_score: float
    """The model's output: the higher, the more relevant."""
    document: RankedDocument | UnsetType = UNSET
    """With `return_documents`."""


class RerankResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/rerank`."""

    object: Literal["list"] = "list"
    id: str
    model: str
    results: list[RerankResult]
    """The most relevant first."""
    usage: PoolingUsage


@routes.post("/v1/rerank")
async def rerank(request: web.Request) -> web.StreamResponse:
    """Ranks documents by their relevance to a query."""
    body = await read_json(request, RerankRequest)
    return await respond(request, await prepare_rerank(body, request.app[SERVING]))


ENDPOINTS = {
    ("post", "/v1/rerank"): generation_endpoint(
        "Ranks documents by their relevance to a query", RerankRequest, RerankResponse, streams=False
    ),
}


async def prepare_rerank(body: RerankRequest, serving: Serving) -> PreparedRequest:
    """The engine requests and the builder. Batch jobs use it too. Raises `InvalidRequest`."""
    info = serving.info
    if info.pooling != "rank":
        raise InvalidRequest("model", f"{info.name} is no reranker; start the server with one to rank documents")
    pairs = [Pair(body.query, text) for text in body.texts()]
    builder = RerankBuilder(body, serving.name)
    requests = pooling_requests(body, serving, builder.id, pairs)
    return PreparedRequest(requests, builder, field_names={"prompt": "documents"})


class RerankBuilder(PoolingBuilder):
    """Builds the response of `/v1/rerank`."""

    def __init__(self, body: RerankRequest, model: str) -> None:
        super().__init__("rerank-", model, body)
        self._body = body

    def build(self, completions: list[list[GenerationEvent]]) -> RerankResponse:
        """As in `ResponseBuilder`."""
        scores = self.vectors()[:, 0]
        texts = self._body.texts() if self._body.return_documents else None
        results = [
            RerankResult(
                index=int(i),
                relevance_score=float(scores[i]),
                document=RankedDocument(text=texts[i]) if texts else UNSET,
            )
            for i in np.argsort(-scores, kind="stable")[: self._body.top_n]
        ]
        return RerankResponse(id=self.id, model=self.model, results=results, usage=self.usage())
