"""The answers with vectors and scores."""

from __future__ import annotations

from typing import Literal

import msgspec


class VectorUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One vector, of length 1."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of float32."""


class EmbeddingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/embeddings`."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: VectorUsage


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document as it was given."""

    text: str


class RerankResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How well a document answers the query."""

    index: int
    """Its place among the documents."""
    relevance_score: float
    """As the model gives it: the higher, the better."""
    document: RankedDocument | None = None


class RerankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/rerank`: the best first."""

    object: Literal["list"] = "list"
    id: str
    model: str
    results: list[RerankResult]
    usage: VectorUsage
