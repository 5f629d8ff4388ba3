"""What others need to know of a loaded model. Its own module: who only talks to an engine needs no llama.cpp."""

from __future__ import annotations

import msgspec


class FillIn(msgspec.Struct, frozen=True, kw_only=True):
    """The control tokens, as they are written, of a model that can fill in between two texts."""

    prefix: str
    suffix: str
    middle: str
    repository: str = ""
    """Before the name of the repository that files belong to; "" if the model knows nothing of that."""
    file: str = ""
    """Before a file's name, of several; "" as well."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that was loaded with the model. Its id is its place among them."""

    name: str
    """The file's name without its ending."""
    path: str
    scale: float
    """What requests get that do not say."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What others need to know of the loaded model."""

    name: str
    """The file's name without its ending: the model's id in the API."""
    path: str
    description: str
    size_bytes: int
    n_params: int
    n_vocab: int
    n_ctx: int
    """KV cells in all."""
    kv_layout: str
    """unified or per-sequence."""
    sampling: str
    """Where the likeliest tokens are found: host or backend."""
    n_ctx_train: int
    max_sequence: int
    """Most tokens, prompt and completion together, of one request."""
    bos: str
    eos: str
    chat_template: str | None
    fill_in: FillIn | None = None
    """None: it was not trained for that."""
    pooling: str | None = None
    """None: it generates text. Else it gives vectors: mean, cls or last; or it is a reranker: rank."""
    n_embd: int = 0
    """Numbers in a vector; of a reranker, its scores for a pair of texts."""
    rerank_template: str | None = None
    """How a reranker wants a pair of texts, with {query} and {document} in it; None: as one text after the other."""
    labels: list[str] = []
    """What a reranker's scores mean, where its file says so: one for each, but mostly none."""
    adapters: tuple[AdapterInfo, ...] = ()
