"""`POST /v1/embeddings` and `POST /v1/rerank`."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from cppbatch.engine.embeddings import Vector, check_dimensions, normalise_vectors, vector_of
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest, Pair
from cppbatch.engine.request import Prompt as AnyPrompt
from cppbatch.errors import GenerationFailed, InvalidRequest
from cppbatch.server.answer.mixed_prompts import engine_prompt, prompts_of
from cppbatch.server.answer.response import ResponseBuilder, generation
from cppbatch.server.http.endpoint import Routes, json_content, schema_ref
from cppbatch.server.http.event_stream import ServerSentEvent
from cppbatch.server.models.serving import Json, Prompt, ResolvedRequest, Serving, new_id
from cppbatch.server.run_requests import prompt_name

# --- what both share -------------------------------------------------------------------------------------------------
# Shared by `/v1/embeddings` and `/v1/rerank`: request fields, engine requests, and reading the engine's vectors.


_MAX_INPUTS = 2048  # OpenAI's limit


class PoolingFields(msgspec.Struct, kw_only=True):
    """The common request fields. None: not given."""

    model: str | None = None
    priority: int | None = None
    timeout: float | None = None
    queue_timeout: float | None = None
    user: str | None = None
    """Not used."""


class PoolingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class PoolingBuilder(ResponseBuilder):
    """Builds a response from one vector for each input. It cannot be streamed."""

    def __init__(self, resolved: ResolvedRequest, model: str, body: PoolingFields) -> None:
        super().__init__(resolved)
        self.id, self.model = resolved.id, model
        self._timeouts = {"timeout": body.timeout, "queue_timeout": body.queue_timeout}

    def stream_events(self, index: int, event: GenerationEvent) -> list[ServerSentEvent]:
        """Raises `NotImplementedError`: vectors cannot be streamed."""
        raise NotImplementedError("embeddings cannot be streamed")

    def vectors(self) -> Vector:
        """float32[n_inputs, n_embd], in the order of the inputs. Raises as `rows`."""
        return np.stack(self.rows())

    def rows(self) -> list[Vector]:
        """The engine's result for each input: float32[n_embd], or with pooling none float32[n_tokens * n_embd].

        If some inputs timed out, raises `InvalidRequest` when the client set the timeout, otherwise `GenerationFailed`.
        """
        late = [event.usage for event in self.last_events.values() if event.finish_reason is FinishReason.TIMEOUT]
        if late:
            passed = f"expired before {len(late)} of {len(self.last_events)} vectors were computed"
            longest = max(usage.total_seconds for usage in late if usage)
            for name, seconds in self._timeouts.items():
                if seconds is not None and seconds <= longest:
                    raise InvalidRequest(name, f"of {seconds:g} s {passed}; increase it, or send fewer inputs")
            raise GenerationFailed(f"the server's --request-timeout {passed}")
        return [vector_of(self.last_events[i].embedding or b"") for i in range(len(self.last_events))]

    def usage(self) -> PoolingUsage:
        """The usage of the whole request."""
        tokens = self.token_counts().prompt
        return PoolingUsage(prompt_tokens=tokens, total_tokens=tokens)


def check_count(field: str, n: int) -> None:
    """Raises `InvalidRequest` for more inputs than the limit per request."""
    if n > _MAX_INPUTS:
        raise InvalidRequest(field, f"has {n} entries; the limit per request is {_MAX_INPUTS}; send fewer inputs")


def pooling_requests(
    body: PoolingFields, serving: Serving, id_prefix: str, prompts: Sequence[AnyPrompt], field: str
) -> ResolvedRequest:
    """An engine request for each input. Raises `InvalidRequest`, which names `field`."""
    name = new_id(id_prefix)
    serving.check_model(body.model)
    timeout = serving.limits.timeout(body.timeout)
    requests = []
    for i, prompt in enumerate(prompts):
        with prompt_name(i, len(prompts), field):
            request = GenerationRequest(
                id=f"{name}-{i}",
                prompt=prompt,
                task="embed",
                priority=body.priority or 0,
                timeout=timeout,
                queue_timeout=body.queue_timeout,
                lora=serving.lora,
            )
        requests.append(request)
    return ResolvedRequest(name, requests, {"prompt": field})


# --- /v1/embeddings --------------------------------------------------------------------------------------------------


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


# --- /v1/rerank ------------------------------------------------------------------------------------------------------
# `POST /v1/rerank`, in the format of Jina and Cohere, or with `texts` in that of TEI (text-embeddings-inference).


class Document(msgspec.Struct):
    """A document as an object, accepted instead of a string, as in Cohere's and Jina's APIs."""

    text: str


class RerankRequest(PoolingFields, kw_only=True):
    """The body of `POST /v1/rerank`."""

    query: str
    documents: list[str | Document] | None = None
    """Required without `texts`."""
    texts: list[str] | None = None
    """TEI's name for the documents. The response then has TEI's format: a list of scores."""
    top_n: int | None = None
    """Return only the best documents, up to this number; None: all."""
    return_documents: bool | None = None
    """Include the document in each result."""
    return_text: bool | None = None
    """The same, for `texts`."""
    raw_scores: bool | None = None
    """For `texts`. False: scores from 0 to 1, the sigmoid of the model's output. True or None (as in llama-server): the
    model's output."""
    truncate: bool | None = None
    """Ignored: texts that are too long are refused."""

    @property
    def named(self) -> str:
        """The field with the documents."""
        return "documents" if self.texts is None else "texts"

    def check(self) -> None:
        """Raises `InvalidRequest`."""
        documents = getattr(self, self.named)
        if not documents:
            raise InvalidRequest(self.named, f"is {'required' if documents is None else 'empty; give at least one'}")
        if self.texts is not None and self.documents is not None:
            raise InvalidRequest("texts", "is TEI's name for `documents`; give only one of them")
        check_count(self.named, len(documents))
        if self.top_n is not None and self.top_n < 1:
            raise InvalidRequest("top_n", f"is {self.top_n}; it must be at least 1")

    def documents_as_text(self) -> list[str]:
        """The documents of a validated request."""
        given = self.texts if self.texts is not None else self.documents or []
        return [document.text if isinstance(document, Document) else document for document in given]


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document of the request."""

    text: str


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    """The score of a document."""

    index: int
    """Index of the document in the request."""
    relevance_score: float
    """The model's output; higher is more relevant."""
    document: RankedDocument | UnsetType = UNSET
    """With `return_documents`."""


class RerankResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/rerank` with `documents`."""

    object: Literal["list"] = "list"
    id: str
    model: str
    results: list[RerankResult]
    """Most relevant first."""
    usage: PoolingUsage


class TextScore(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one of `texts`."""

    index: int
    score: float
    text: str | UnsetType = UNSET
    """With `return_text`."""


_SCORES = {"type": "array", "description": "With `texts`", "items": schema_ref(TextScore)}


@generation(
    routes,
    "/v1/rerank",
    RerankRequest,
    json_content({"anyOf": [schema_ref(RerankResponse), _SCORES]}),
    types=(RerankResponse, TextScore),
    streams=False,
    in_batches=True,
    also=("/rerank", "/reranking", "/v1/reranking"),
)
async def prepare_rerank(body: RerankRequest, serving: Serving) -> RerankBuilder:
    """Rank documents by their relevance to a query.

    Raises `InvalidRequest`.
    """
    info = serving.info
    if info.pooling != "rank":
        raise InvalidRequest(
            "model", f"{info.name} is not a reranker; start the server with a reranker to rank documents"
        )
    body.check()
    pairs = [Pair(body.query, text) for text in body.documents_as_text()]
    return RerankBuilder(pooling_requests(body, serving, "rerank-", pairs, body.named), body, serving.name)


class RerankBuilder(PoolingBuilder):
    """Builds the response of `/v1/rerank`."""

    def __init__(self, resolved: ResolvedRequest, body: RerankRequest, model: str) -> None:
        super().__init__(resolved, model, body)
        self._body = body

    def build(self, completions: list[list[GenerationEvent]]) -> RerankResponse | list[TextScore]:
        """Returns the documents or texts by score, best first."""
        scores = self.vectors()[:, 0]
        best = np.argsort(-scores, kind="stable")[: self._body.top_n]
        if self._body.texts is not None:
            return self._text_scores(scores, best)
        texts = self._body.documents_as_text() if self._body.return_documents else None
        results = [
            RerankResult(
                index=int(i),
                relevance_score=float(scores[i]),
                document=RankedDocument(text=texts[i]) if texts else UNSET,
            )
            for i in best
        ]
        return RerankResponse(id=self.id, model=self.model, results=results, usage=self.usage())

    def _text_scores(self, scores: Vector, best: npt.NDArray[np.intp]) -> list[TextScore]:
        """`scores`: float32[n]. `best`: the indices to show."""
        if self._body.raw_scores is False:
            scores = np.exp(-np.logaddexp(np.float32(0), -scores)).astype(np.float32)  # the sigmoid
        texts = self._body.documents_as_text() if self._body.return_text else None
        return [TextScore(index=int(i), score=float(scores[i]), text=texts[i] if texts else UNSET) for i in best]
