"""The bodies of embedding and rerank requests."""

from __future__ import annotations

from typing import Literal

import msgspec

from cppbatch.errors import InvalidRequest

_MOST_INPUTS = 2048  # OpenAI's limit


class _Options(msgspec.Struct, kw_only=True):
    """What every request has; None: not given."""

    model: str | None = None
    priority: int | None = None
    timeout: float | None = None
    queue_timeout: float | None = None
    user: str | None = None
    """Not used here."""


class EmbeddingRequest(_Options, kw_only=True):
    """`POST /v1/embeddings`."""

    input: str | list[str | int | list[int]]
    """A text, token ids, or a list of either."""
    dimensions: int | None = None
    """Only the first so many numbers of each vector, for models that were trained for that."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: float32, little-endian."""

    def inputs(self) -> list[str | list[int]]:
        """What vectors are wanted of. Raises `InvalidRequest`."""
        given = [self.input] if isinstance(self.input, str) else self.input
        if given and all(isinstance(item, int) for item in given):
            return [[item for item in given if isinstance(item, int)]]
        inputs = [item for item in given if not isinstance(item, int)]
        if not inputs or len(inputs) < len(given):
            raise InvalidRequest("input", "must be a text, token ids, or a list of those, and not empty")
        _refuse_many("input", len(inputs))
        return inputs


class Document(msgspec.Struct):
    """A document as Cohere's and Jina's clients may send it."""

    text: str


class RerankRequest(_Options, kw_only=True):
    """`POST /v1/rerank`."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    """Only so many of the best; None: all."""
    return_documents: bool | None = None
    """Each result has its document with it."""

    def texts(self) -> list[str]:
        """The documents. Raises `InvalidRequest`."""
        if not self.documents:
            raise InvalidRequest("documents", "is empty; give at least one")
        _refuse_many("documents", len(self.documents))
        if self.top_n is not None and self.top_n < 1:
            raise InvalidRequest("top_n", f"is {self.top_n}; it must be at least 1")
        return [document.text if isinstance(document, Document) else document for document in self.documents]


def _refuse_many(field: str, n: int) -> None:
    if n > _MOST_INPUTS:
        raise InvalidRequest(field, f"has {n} entries; one request may have {_MOST_INPUTS}")
