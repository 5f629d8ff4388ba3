"""`POST /v1/embeddings`."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Literal

import msgspec

from cppbatch.engine.embeddings import Vector, check_dimensions, normalised
from cppbatch.engine.request import GenerationEvent
from cppbatch.errors import InvalidRequest
from cppbatch.server.endpoint import Routes
from cppbatch.server.generation import generation
from cppbatch.server.mixed_prompts import engine_prompt, prompts_of
from cppbatch.server.pooling.pooling_response import (
    PoolingBuilder,
    PoolingFields,
    PoolingUsage,
    check_count,
    pooling_requests,
)
from cppbatch.server.response import PreparedRequest
from cppbatch.server.serving import Json, Prompt, Serving

routes = Routes()


class EmbeddingRequest(PoolingFields, kw_only=True):
    """The body of `POST /v1/embeddings`."""

    input: str | list[Any] | Json
    """A text, token ids, both mixed, or a list of any of these. As in llama-server, an object with `prompt_string`, or
    with `content`, a list of text parts, may replace a text."""
    dimensions: int | None = None
    """Truncates each vector to this many numbers, for models that were trained for that."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: of float32, little-endian."""

    async def prompts(self, serving: Serving) -> list[Prompt]:
        """The inputs, each a text or token ids. Raises `InvalidRequest`."""
        one = not isinstance(self.input, list)
        given = [self.input] if one else self.input
        texts = [_joined(item, "input" if one else f"input[{i}]") for i, item in enumerate(given)]
        prompts = prompts_of(texts[0] if one else texts, "input")
        check_count("input", len(prompts))
        fields = [f"input[{i}]" for i in range(len(prompts))] if len(prompts) > 1 else ["input"]
        return [await engine_prompt(serving, prompt, field) for prompt, field in zip(prompts, fields, strict=True)]


def _joined(item: Any, field: str) -> Any:
    """The text of an object with `content`; anything else is returned unchanged. Raises `InvalidRequest`."""
    if not isinstance(item, dict) or "content" not in item:
        return item
    parts = item["content"]
    if not isinstance(parts, list):
        raise InvalidRequest(f"{field}.content", "must be a list of parts such as {'type': 'text', 'text': ...}")
    for i, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{field}.content[{i}]", "is not a part of type text; only text is supported")
    return "".join(part["text"] for part in parts)


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


@generation(routes, "/v1/embeddings", EmbeddingRequest, EmbeddingResponse, streams=False, in_batches=True)
async def prepare_embeddings(body: EmbeddingRequest, serving: Serving) -> PreparedRequest:
    """Compute an embedding for each input.

    Raises `InvalidRequest`.
    """
    if serving.info.pooling == "none":
        message = "has pooling none (one vector per token), which this API cannot return; use /embeddings"
        raise InvalidRequest("model", f"{serving.info.name} {message}")
    return await prepare_vectors(body, serving, EmbeddingBuilder(body, serving.name))


async def prepare_vectors(body: EmbeddingRequest, serving: Serving, builder: PoolingBuilder) -> PreparedRequest:
    """The engine requests for any builder of vectors. Raises `InvalidRequest`."""
    info = serving.info
    if info.pooling == "rank":
        raise InvalidRequest("model", f"{info.name} is a reranker and has no embeddings; use /v1/rerank")
    if info.pooling is not None:
        check_dimensions(body.dimensions, info.n_embd)
    requests = pooling_requests(body, serving, builder.id, await body.prompts(serving))
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
