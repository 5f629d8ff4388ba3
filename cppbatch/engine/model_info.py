"""What clients of an engine need to know about its model. Does not need llama.cpp."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class FillIn(msgspec.Struct, frozen=True, kw_only=True):
    """The control tokens, as text, of a model that supports fill-in-the-middle."""

    prefix: str
    suffix: str
    middle: str
    repository: str = ""
    """Precedes the repository name of the files; "" if the model has no such token."""
    file: str = ""
    """Precedes the name of each of several files; "" if the model has no such token."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter or control vector loaded with the model. Its id is its index in the list."""

    name: str
    """The file name without its extension."""
    path: str
    scale: float
    """The scale for requests without `lora` or `control_vectors`."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The loaded model."""

    name: str
    """The file name without its extension: the model's id in the API."""
    path: str
    description: str
    size_bytes: int
    n_params: int
    n_vocab: int
    n_ctx: int
    """Total KV cells, in the larger layout."""
    kv_layout: str
    """`unified`, `per-sequence`, or `auto`: the engine switches between them, and `EngineStats` has the current one."""
    sampling: str
    """Where the most likely tokens are selected: `host` (CPU) or `backend` (device)."""
    on_gpu: bool = False
    """Whether layers compute on a GPU, where rows are almost free, but ubatches are not."""
    not_repacked: str | None = None
    """A sentence, if the engine found that the weights are faster without repacking."""
    n_ctx_train: int
    max_sequence: int
    """Maximum tokens of a request, prompt and completion together; for `auto`, those of the unified layout."""
    bos: str
    eos: str
    end_tokens: tuple[int, ...] = ()
    """The tokens that end a text."""
    control_tokens: tuple[str, ...] = ()
    """The texts of all control tokens."""
    chat_template: str | None
    fill_in: FillIn | None = None
    """None: fill-in-the-middle is not supported."""
    pooling: str | None = None
    """None: the model generates text. `mean`, `cls` or `last`: it returns vectors. `none`: it returns a vector per
    token. `rank`: it is a reranker."""
    n_embd: int = 0
    """Dimensions of a vector; for a reranker, the number of scores."""
    rerank_template: str | None = None
    """The text for a reranker, with the placeholders {query} and {document}; None: the two texts in sequence."""
    labels: list[str] = []
    """Names of a reranker's scores, if its file has them, which is rare."""
    changes: dict[str, Any] = {}
    """The given settings that change what the model computes (`ModelChanges.model_changes`)."""
    adapters: tuple[AdapterInfo, ...] = ()
    control_vectors: tuple[AdapterInfo, ...] = ()
    modalities: tuple[Literal["image", "audio"], ...] = ()
    """Media that prompts may contain; empty without a projector (`EngineConfig.mmproj`)."""

    def is_same_model(self, other: ModelInfo) -> bool:
        """Whether both treat texts and tokens alike: architecture, vocabulary and chat template are equal."""
        return self._identity() == other._identity()

    def _identity(self) -> tuple[object, ...]:
        described = (self.description, self.n_params, self.n_vocab, self.n_embd, self.pooling)
        return (*described, self.bos, self.eos, self.end_tokens, self.chat_template)
