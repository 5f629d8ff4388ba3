"""`POST /v1/embeddings`."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Literal

import msgspec

from cppbatch.engine.embeddings import Vector, check_dimensions, normalise_vectors
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.request import GenerationEvent
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.mixed_prompts import engine_prompt, prompts_of
from cppbatch.server.answer.response import generation
from cppbatch.server.api.pooling import PoolingBuilder, PoolingFields, PoolingUsage, check_count, pooling_requests
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.models.serving import Json, Prompt, ResolvedRequest, Serving

routes = Routes()


class EmbeddingRequest(PoolingFields, kw_only=True):
    """The body of `POST /v1/embeddings`."""

    input: str | list[Any] | Json
    """A text, token ids, a mix of both, or a list of any of these. As in llama-server, an object with `prompt_string`,
    or with a list of text parts in `content`, may replace a text."""
    dimensions: int | None = None
    """Truncate each vector to this many numbers, for models trained for it."""
    encoding_format: Literal["float", "base64"] | None = None
    """float, or base64 of little-endian float32."""

    async def prompts(self, serving: Serving) -> list[Prompt]:
        """The inputs, each a text or token ids. Raises `InvalidRequest`."""
        one = not isinstance(self.input, list)
        given = [self.input] if one else self.input
        texts = [_join_text_parts(item, "input" if one else f"input[{i}]") for i, item in enumerate(given)]
        prompts = prompts_of(texts[0] if one else texts, "input")
        check_count("input", len(prompts))
        fields = [f"input[{i}]" for i in range(len(prompts))] if len(prompts) > 1 else ["input"]
        return [await engine_prompt(serving, prompt, field) for prompt, field in zip(prompts, fields, strict=True)]


def _join_text_parts(item: Any, field: str) -> Any:
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
    """The vector of an input, normalised to length 1."""

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
async def prepare_embeddings(body: EmbeddingRequest, serving: Serving) -> EmbeddingBuilder:
    """Compute an embedding for each input.

    Raises `InvalidRequest`.
    """
    check_embeds_whole(serving.info)
    return EmbeddingBuilder(await resolve_vectors(body, serving), body, serving)


async def resolve_vectors(body: EmbeddingRequest, serving: Serving) -> ResolvedRequest:
    """The engine requests of any API of vectors. Raises `InvalidRequest`."""
    check_embeds(serving.info)
    if serving.info.pooling is not None:
        check_dimensions(body.dimensions, serving.info.n_embd)
    return pooling_requests(body, serving, "embd-", await body.prompts(serving), "input")


def check_embeds(info: ModelInfo) -> None:
    """Raises `InvalidRequest` for a reranker. The engine refuses a model that generates text."""
    if info.pooling == "rank":
        raise InvalidRequest("model", f"{info.name} is a reranker and has no embeddings; use /v1/rerank")


def check_embeds_whole(info: ModelInfo) -> None:
    """Raises as `check_embeds`, and for a vector per token, which most APIs cannot return."""
    check_embeds(info)
    if info.pooling == "none":
        message = "has pooling none (one vector per token), which this API cannot return; use /embeddings"
        raise InvalidRequest("model", f"{info.name} {message}")


class EmbeddingBuilder(PoolingBuilder):
    """Builds the response of `/v1/embeddings`."""

    def __init__(self, resolved: ResolvedRequest, body: EmbeddingRequest, serving: Serving) -> None:
        super().__init__(resolved, serving.name, body)
        self._dimensions, self._norm = body.dimensions, serving.settings.embd_normalize
        self._as_base64 = body.encoding_format == "base64"

    def build(self, completions: list[list[GenerationEvent]]) -> EmbeddingResponse:
        """Returns OpenAI's list of vectors, as numbers or base64."""
        data = [
            Embedding(index=index, embedding=_base64(vector) if self._as_base64 else vector.tolist())
            for index, vector in enumerate(normalise_vectors(self.vectors(), self._dimensions, self._norm))
        ]
        return EmbeddingResponse(data=data, model=self.model, usage=self.usage())


def _base64(vector: Vector) -> str:
    return b64encode(vector.astype("<f4").tobytes()).decode()
