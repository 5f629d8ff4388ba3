"""The native half of an engine: a model and a context over it, made from an `EngineConfig`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.config import EngineConfig, Sharing, available_threads
from cppbatch.engine.kv_pool import Memory
from cppbatch.engine.layout import choose_flash_attn, choose_layout
from cppbatch.engine.model_info import FillIn, ModelInfo
from cppbatch.engine.vocabulary import Tokens
from cppbatch.errors import LlamaError, ModelError
from cppbatch.llama import Backend, Batch, Context, DeviceCandidates, Model, find_candidates_on_device, find_sharing
from cppbatch.llama.selfcheck import safe_use_extra_bufts
from cppbatch.llama.vocab import Vocab


class Computation(Memory, Protocol):
    """The part of a context that the engine uses (`cppbatch.llama.Context`)."""

    n_batch: int
    candidates: DeviceCandidates | None

    def decode(self, batch: Batch) -> None: ...
    def logits(self, n_outputs: int) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True)
class Runtime:
    """What the step loop drives. Tests put a fake context here."""

    context: Computation
    vocab: Tokens
    info: ModelInfo
    sharing: Sharing
    close: Callable[[], None]


def load_runtime(config: EngineConfig, progress: Callable[[float], bool] | None = None) -> Runtime:
    """Loads the model and makes its context; `progress` as in `Model`.

    A build whose fast CPU path crashes is found out first, in a child process, and used without that path.
    Raises `ModelError`, `LibraryError` or `LlamaError`.
    """
    use_extra_bufts = config.use_extra_bufts and safe_use_extra_bufts()
    model = Model(
        config.model_path,
        n_gpu_layers=config.n_gpu_layers,
        device=config.device,
        use_extra_bufts=use_extra_bufts,
        progress=progress,
    )
    try:
        if not model.can_generate:
            raise ModelError(
                f"{model.path} ({model.description}) cannot generate text: it is an encoder, an embedding model or "
                "another kind that is no plain decoder. Use a text-generating model"
            )
        on_gpu = config.n_gpu_layers != 0 and Backend.get().supports_gpu
        layout = choose_layout(
            config, on_gpu=on_gpu, n_ctx_train=model.n_ctx_train, has_kv_cells=not model.is_recurrent
        )
        context = Context(
            model,
            n_ctx=config.n_ctx,
            n_batch=config.n_batch,
            n_ubatch=config.n_ubatch,
            n_seq_max=config.n_parallel,
            n_threads=config.n_threads or available_threads(),
            flash_attn=choose_flash_attn(config, layout, on_gpu=on_gpu, has_amx=Backend.get().has_amx),
            kv_unified=layout == "unified",
            type_k=config.cache_type_k,
            type_v=config.cache_type_v,
        )
        sharing = find_sharing(context) if config.prefix_cache else "none"
        if config.sampling == "backend" or (config.sampling == "auto" and on_gpu):
            found = find_candidates_on_device(context)
            if not found and config.sampling == "backend":
                raise LlamaError("--sampling backend: llama.cpp cannot sample on this device; use --sampling host")
        return Runtime(context, model.vocab, _info(model, context), sharing, model.close)
    except BaseException:
        model.close()
        raise


def _fill_in(vocab: Vocab) -> FillIn | None:
    if vocab.fill_in is None:
        return None
    prefix, suffix, middle = map(vocab.text, vocab.fill_in)
    repository, file = map(vocab.text, vocab.fill_in_files)
    return FillIn(prefix=prefix, suffix=suffix, middle=middle, repository=repository, file=file)


def _info(model: Model, context: Context) -> ModelInfo:
    return ModelInfo(
        name=model.path.stem,
        path=str(model.path),
        description=model.description,
        size_bytes=model.size_bytes,
        n_params=model.n_params,
        n_vocab=model.vocab.n_tokens,
        n_ctx=context.n_ctx,
        kv_layout="unified" if context.kv_unified else "per-sequence",
        sampling="backend" if context.candidates else "host",
        n_ctx_train=model.n_ctx_train,
        max_sequence=min(context.n_ctx_seq, model.n_ctx_train),
        bos=model.vocab.text(model.vocab.bos),
        eos=model.vocab.text(model.vocab.eos),
        chat_template=model.chat_template,
        fill_in=_fill_in(model.vocab),
    )
