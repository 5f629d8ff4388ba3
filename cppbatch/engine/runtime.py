"""The native half of an engine: a model and a context over it, made from an `EngineConfig`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cppbatch.config import EngineConfig, available_threads
from cppbatch.engine.kv_pool import Memory
from cppbatch.errors import ModelError
from cppbatch.llama import Batch, Context, Model
from cppbatch.llama.selfcheck import safe_use_extra_bufts


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
    n_ctx_train: int
    max_sequence: int
    """Most tokens, prompt and completion together, of one request."""
    bos: str
    eos: str
    chat_template: str | None


class Tokens(Protocol):
    """The part of a vocabulary that the engine uses (`cppbatch.llama.Vocab`)."""

    n_tokens: int
    eog: frozenset[int]

    def tokenize(self, text: str) -> npt.NDArray[np.int32]: ...
    def piece(self, token: int) -> bytes: ...


class Computation(Memory, Protocol):
    """The part of a context that the engine uses (`cppbatch.llama.Context`)."""

    n_ctx: int
    n_ctx_seq: int
    n_batch: int
    n_seq_max: int
    kv_unified: bool

    def decode(self, batch: Batch) -> None: ...
    def logits(self, n_outputs: int) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True)
class Runtime:
    """What the step loop drives. Tests put a fake context here."""

    context: Computation
    vocab: Tokens
    info: ModelInfo
    close: Callable[[], None]


def load_runtime(config: EngineConfig, progress: Callable[[float], bool] | None = None) -> Runtime:
    """Loads the model and makes its context; `progress` as in `Model`.

    A build whose fast CPU path crashes is found out first, in a child process, and used without that path.
    Raises `ModelError`, `LibraryError` or `LlamaError`.
    """
    use_extra_bufts = config.use_extra_bufts and safe_use_extra_bufts()
    model = Model(
        config.model_path, n_gpu_layers=config.n_gpu_layers, use_extra_bufts=use_extra_bufts, progress=progress
    )
    try:
        if not model.can_generate:
            raise ModelError(
                f"{model.path} ({model.description}) cannot generate text: it is an encoder, an embedding model or "
                "another kind that is no plain decoder. Use a text-generating model"
            )
        context = Context(
            model,
            n_ctx=config.n_ctx,
            n_batch=config.n_batch,
            n_ubatch=config.n_ubatch,
            n_seq_max=config.n_parallel,
            n_threads=config.n_threads or available_threads(),
            flash_attn=config.flash_attn,
            kv_unified=config.kv_layout == "unified",
        )
        return Runtime(context, model.vocab, _info(model, context), model.close)
    except BaseException:
        model.close()
        raise


def _info(model: Model, context: Context) -> ModelInfo:
    return ModelInfo(
        name=model.path.stem,
        path=str(model.path),
        description=model.description,
        size_bytes=model.size_bytes,
        n_params=model.n_params,
        n_vocab=model.vocab.n_tokens,
        n_ctx=context.n_ctx,
        n_ctx_train=model.n_ctx_train,
        max_sequence=min(context.n_ctx_seq, model.n_ctx_train),
        bos=model.vocab.text(model.vocab.bos),
        eos=model.vocab.text(model.vocab.eos),
        chat_template=model.chat_template,
    )
