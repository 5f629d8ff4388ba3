"""The routes of embedding models and rerankers, for the OpenAPI document."""

from __future__ import annotations

from cppbatch.server.endpoint import generation_endpoint
from cppbatch.server.vectors.schemas import EmbeddingRequest, RerankRequest
from cppbatch.server.vectors.shapes import EmbeddingAnswer, RerankAnswer

ENDPOINTS = {
    ("post", "/v1/embeddings"): generation_endpoint(
        "A vector for each input", EmbeddingRequest, EmbeddingAnswer, streams=False
    ),
    ("post", "/v1/rerank"): generation_endpoint(
        "Documents by how well they answer a query", RerankRequest, RerankAnswer, streams=False
    ),
}
