"""`POST /v1/rerank`, in the format of Jina and Cohere, or with `texts` in that of TEI (text-embeddings-inference)."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from cppbatch.engine.embeddings import Vector
from cppbatch.engine.request import GenerationEvent, Pair
from cppbatch.errors import InvalidRequest
from cppbatch.server.answer.response import generation
from cppbatch.server.api.pooling import PoolingBuilder, PoolingFields, PoolingUsage, check_count, pooling_requests
from cppbatch.server.http.endpoint import Routes, json_content, schema_ref
from cppbatch.server.models.serving import ResolvedRequest, Serving

routes = Routes()


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
