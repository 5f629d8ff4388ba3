"""`POST /v1/embeddings`."""

from __future__ import annotations

from base64 import b64encode
from typing import Literal

import msgspec
from aiohttp import web

from cppbatch.engine.embeddings import Vector, check_dimensions, normalised
from cppbatch.engine.request import GenerationEvent
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


class EmbeddingRequest(PoolingFields, kw_only=True):
    """The body of `POST /v1/embeddings`."""

    input: str | list[str | int | list[int]]
    """A text, token ids, or a list of either."""
    dimensions: int | None = None
    """Truncates each vector to this many numbers, for models that were trained for that."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: of float32, little-endian."""

    def inputs(self) -> list[str | list[int]]:
        """The inputs, each a text or token ids. Raises `InvalidRequest`."""
        given = [self.input] if isinstance(self.input, str) else self.input
        if given and all(isinstance(item, int) for item in given):
            return [[item for item in given if isinstance(item, int)]]
        inputs = [item for item in given if not isinstance(item, int)]
        if not inputs or len(inputs) < len(given):
            raise InvalidRequest("input", "must be a text, token ids, or a list of those, and not empty")
        check_count("input", len(inputs))
        return inputs


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of an input, of length 1."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of float32."""


class EmbeddingResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/embeddings`."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: PoolingUsage


@routes.post("/v1/embeddings")
async def embeddings(request: web.Request) -> web.StreamResponse:
    """Computes a vector for each input."""
    body = await read_json(request, EmbeddingRequest)
    return await respond(request, await prepare_embeddings(body, request.app[SERVING]))


ENDPOINTS = {
    ("post", "/v1/embeddings"): generation_endpoint(
        "Computes a vector for each input", EmbeddingRequest, EmbeddingResponse, streams=False
    ),
}


async def prepare_embeddings(body: EmbeddingRequest, serving: Serving) -> PreparedRequest:
    """The engine requests and the builder. Batch jobs use it too. Raises `InvalidRequest`."""
    return prepare_vectors(body, serving, EmbeddingBuilder(body, serving.name))


def prepare_vectors(body: EmbeddingRequest, serving: Serving, builder: PoolingBuilder) -> PreparedRequest:
    """The engine requests for any builder of vectors. Raises `InvalidRequest`."""
    info = serving.info
    if info.pooling == "rank":
        raise InvalidRequest("model", f"{info.name} is a reranker and has no embeddings; use /v1/rerank")
    if info.pooling is not None:
        check_dimensions(body.dimensions, info.n_embd)
    requests = pooling_requests(body, serving, builder.id, body.inputs())
    return PreparedRequest(requests, builder, field_names={"prompt": "input"})


class EmbeddingBuilder(PoolingBuilder):
    """Builds the response of `/v1/embeddings`."""

    def __init__(self, body: EmbeddingRequest, model: str) -> None:
        super().__init__("embd-", model, body)
        self._dimensions = body.dimensions
        self._as_base64 = body.encoding_format == "base64"

    def build(self, completions: list[list[GenerationEvent]]) -> EmbeddingResponse:
        """As in `ResponseBuilder`."""
        data = [
            Embedding(index=index, embedding=_base64(vector) if self._as_base64 else vector.tolist())
            for index, vector in enumerate(normalised(self.vectors(), self._dimensions))
        ]
        return EmbeddingResponse(data=data, model=self.model, usage=self.usage())


def _base64(vector: Vector) -> str:
    return b64encode(vector.astype("<f4").tobytes()).decode()
