"""What clients of an engine need to know of its model. Needs no llama.cpp."""

from __future__ import annotations

from typing import Literal

import msgspec


class FillIn(msgspec.Struct, frozen=True, kw_only=True):
    """The control tokens, as text, of a model that can fill in between two texts (fill-in-the-middle)."""

    prefix: str
    suffix: str
    middle: str
    repository: str = ""
    """Before the name of the files' repository; "" if the model has no such token."""
    file: str = ""
    """Before the name of each of several files; "" if the model has no such token."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that was loaded with the model. Its id is its index among them."""

    name: str
    """The file's name without its ending."""
    path: str
    scale: float
    """The scale for requests without `lora`."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The loaded model."""

    name: str
    """The file's name without its ending: the model's id in the API."""
    path: str
    description: str
    size_bytes: int
    n_params: int
    n_vocab: int
    n_ctx: int
    """KV cells in all, of the larger layout."""
    kv_layout: str
    """unified, per-sequence, or auto: the engine switches between these two, and `EngineStats` has the present one."""
    sampling: str
    """Where the most likely tokens are selected: "host" (the CPU) or "backend" (the device)."""
    on_gpu: bool = False
    """Whether layers compute on a GPU."""
    not_repacked: str | None = None
    """One sentence, if the engine found that the weights are faster as they are in the file."""
    n_ctx_train: int
    max_sequence: int
    """Tokens of a request at most, prompt and completion together. An engine that switches takes them as unified."""
    bos: str
    eos: str
    end_tokens: tuple[int, ...] = ()
    """The tokens that end a text."""
    chat_template: str | None
    fill_in: FillIn | None = None
    """None: the model cannot fill in."""
    pooling: str | None = None
    """None: the model generates text. mean, cls or last: it returns vectors. none: it returns a vector for each
    token. rank: it is a reranker."""
    n_embd: int = 0
    """Numbers of a vector; for a reranker, the number of its scores."""
    rerank_template: str | None = None
    """The text for a reranker, with the placeholders {query} and {document}; None: one text after the other."""
    labels: list[str] = []
    """Names of a reranker's scores, if its file has them; mostly it has none."""
    adapters: tuple[AdapterInfo, ...] = ()
    modalities: tuple[Literal["image", "audio"], ...] = ()
    """What prompts may contain besides text; empty without a projector (`EngineConfig.mmproj`)."""

    def is_same_model(self, other: ModelInfo) -> bool:
        """Whether texts and tokens mean the same to both: architecture, vocabulary and chat template are equal."""
        return self._identity() == other._identity()

    def _identity(self) -> tuple[object, ...]:
        described = (self.description, self.n_params, self.n_vocab, self.n_embd, self.pooling)
        return (*described, self.bos, self.eos, self.end_tokens, self.chat_template)
