"""`POST /embeddings` and `/embedding`: vectors in llama-server's format."""

from __future__ import annotations

from typing import Any

import msgspec

from cppbatch.engine.embeddings import AS_COMPUTED, normalise_vectors
from cppbatch.engine.request import GenerationEvent
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.response import generation
from cppbatch.server.api.embeddings import EmbeddingRequest, resolve_vectors
from cppbatch.server.api.pooling import PoolingBuilder
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.models.serving import Json, ResolvedRequest, Serving
from cppbatch.server.settings import MOST_NORM

routes = Routes()


class LlamaEmbeddingRequest(EmbeddingRequest, kw_only=True):
    """The body of `POST /embeddings`."""

    input: str | list[Any] | Json = msgspec.field(default_factory=list)
    content: str | list[Any] | Json | None = None
    """Another name for `input`."""
    embd_normalize: int | None = None
    """2: normalise vectors to length 1. -1 (default with pooling none): return them as computed. 0: the largest number
    is 32,760. 1, 3 ...: the norm of this order is 1. Default: --embd-normalize."""


class LlamaEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors of an input."""

    index: int
    embedding: list[list[float]]
    """One vector for the input; with pooling none, one per token."""


@generation(routes, "/embeddings", LlamaEmbeddingRequest, list[LlamaEmbedding], streams=False)
@generation(routes, "/embedding", LlamaEmbeddingRequest, list[LlamaEmbedding], streams=False)
async def prepare_llama_embeddings(body: LlamaEmbeddingRequest, serving: Serving) -> LlamaEmbeddingBuilder:
    """Compute embeddings, in llama-server's format.

    Raises `InvalidRequest`.
    """
    if body.embd_normalize is not None and not AS_COMPUTED <= body.embd_normalize <= MOST_NORM:
        raise InvalidRequest(
            "embd_normalize", f"is {body.embd_normalize}; it must be from -1 (as computed) to {MOST_NORM}"
        )
    if body.encoding_format == "base64":
        raise InvalidRequest(
            "encoding_format", "is base64, which is only supported by /v1/embeddings; use that path, or leave it out"
        )
    if body.content is not None:
        body = msgspec.structs.replace(body, input=body.content)
    return LlamaEmbeddingBuilder(await resolve_vectors(body, serving), body, serving)


class LlamaEmbeddingBuilder(PoolingBuilder):
    """Builds the response of `/embeddings`."""

    def __init__(self, resolved: ResolvedRequest, body: LlamaEmbeddingRequest, serving: Serving) -> None:
        super().__init__(resolved, serving.name, body)
        self._body = body
        self._info, self._default = serving.info, serving.settings.embd_normalize

    def build(self, completions: list[list[GenerationEvent]]) -> list[LlamaEmbedding]:
        """Returns the vectors of each input; without pooling, one per token."""
        default = AS_COMPUTED if self._info.pooling == "none" else self._default
        norm = default if self._body.embd_normalize is None else self._body.embd_normalize
        n = self._body.dimensions
        each = [row.reshape(-1, self._info.n_embd) for row in self.rows()]
        return [
            LlamaEmbedding(index=i, embedding=normalise_vectors(vectors, n, norm).tolist())
            for i, vectors in enumerate(each)
        ]
