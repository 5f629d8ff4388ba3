"""`POST /api/embed` and `POST /api/embeddings`."""

from __future__ import annotations

from aiohttp import web

from cppbatch.engine.embeddings import normalise_vectors
from cppbatch.engine.request import GenerationEvent
from cppbatch.server.answer.response import respond
from cppbatch.server.api.embeddings import check_embeds_whole
from cppbatch.server.api.ollama.builder import ERRORS, STATUSES, KeptLease, load_or_unload, nanoseconds
from cppbatch.server.api.ollama.types import (
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
)
from cppbatch.server.api.pooling import PoolingBuilder, PoolingFields, check_count, pooling_requests
from cppbatch.server.fields.parse import read_json
from cppbatch.server.http.api_errors import json_response
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.models.served import ModelLease
from cppbatch.server.models.serving import Prompt, ResolvedRequest, Serving

routes = Routes()


@routes.post("/api/embed", OllamaEmbedResponse, OllamaEmbedRequest, STATUSES, **ERRORS)
async def embed(request: web.Request) -> web.StreamResponse:
    """Compute an embedding for each text, in Ollama's API; without texts, load or unload the model."""
    body = await read_json(request, OllamaEmbedRequest)
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    if not any(texts):
        await load_or_unload(request, body)
        return json_response(OllamaEmbedResponse(model=body.model, embeddings=[]))
    async with KeptLease(request, body) as lease:
        check_count("input", len(texts))
        most = None if body.truncate is False else lease.serving.info.max_sequence
        resolved = await _resolve(lease.serving, texts, "input", most)
        return await respond(request, lease, EmbedBuilder(resolved, body, lease))


@routes.post("/api/embeddings", OllamaEmbeddingsResponse, OllamaEmbeddingsRequest, STATUSES, **ERRORS)
async def embeddings(request: web.Request) -> web.StreamResponse:
    """Compute the embedding of one text, in Ollama's older API; without a text, load or unload the model."""
    body = await read_json(request, OllamaEmbeddingsRequest)
    if not body.prompt:
        await load_or_unload(request, body)
        return json_response(OllamaEmbeddingsResponse(embedding=[]))
    async with KeptLease(request, body) as lease:
        resolved = await _resolve(lease.serving, [body.prompt], "prompt", lease.serving.info.max_sequence)
        return await respond(request, lease, EmbeddingsBuilder(resolved, lease.serving.name, PoolingFields()))


async def _resolve(serving: Serving, texts: list[str], field: str, most: int | None) -> ResolvedRequest:
    """`most`: tokens of a text, whose end is cut off; None: longer texts are refused. Raises `InvalidRequest`."""
    check_embeds_whole(serving.info)
    prompts = [text if most is None else await _cut(serving, text, most) for text in texts]
    return pooling_requests(PoolingFields(), serving, "embd-", prompts, field)


async def _cut(serving: Serving, text: str, most: int) -> Prompt:
    """The text, or the first tokens of one that has more than `most`. A last token that ends texts remains."""
    # a token has at least one byte, and at most 4 special ones are added
    if len(text.encode()) + 4 <= most:
        return text
    tokens = [piece.id for piece in await serving.client.tokenize(text[: serving.max_length])]
    if len(tokens) <= most:
        return text
    plain = [piece.id for piece in await serving.client.tokenize(text[: serving.max_length], add_special=False)]
    end = tokens[-1:] if tokens[-1] != plain[-1] else []
    return [*tokens[: most - len(end)], *end]


class EmbedBuilder(PoolingBuilder):
    """Builds the response of `/api/embed`."""

    def __init__(self, resolved: ResolvedRequest, body: OllamaEmbedRequest, lease: ModelLease) -> None:
        super().__init__(resolved, body.model, PoolingFields())
        self._dimensions, self._load_seconds = body.dimensions, lease.waited

    def build(self, completions: list[list[GenerationEvent]]) -> OllamaEmbedResponse:
        """Returns the vectors. More dimensions than a vector has mean all of them, as in Ollama."""
        vectors = self.vectors()
        n = self._dimensions if self._dimensions and self._dimensions < vectors.shape[-1] else None
        seconds = max(event.usage.total_seconds for event in self.last_events.values() if event.usage)
        return OllamaEmbedResponse(
            model=self.model,
            embeddings=normalise_vectors(vectors, n).tolist(),
            total_duration=nanoseconds(seconds),
            load_duration=nanoseconds(self._load_seconds),
            prompt_eval_count=self.usage().prompt_tokens,
        )


class EmbeddingsBuilder(PoolingBuilder):
    """Builds the response of `/api/embeddings`."""

    def build(self, completions: list[list[GenerationEvent]]) -> OllamaEmbeddingsResponse:
        return OllamaEmbeddingsResponse(embedding=self.rows()[0].tolist())
