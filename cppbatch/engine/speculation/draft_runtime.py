"""Opens a draft model: its settings, its checks, its context."""

from __future__ import annotations

import msgspec

from cppbatch.config import DRAFT_MODELS, EngineConfig, available_threads
from cppbatch.engine.compute_threads import ComputeThreads
from cppbatch.engine.kv_layout import choose_flash_attn
from cppbatch.engine.speculation.draft_model import DraftModel, DraftModelProposer
from cppbatch.errors import ModelError
from cppbatch.llama import Backend, Context, Model, probe_prefix_sharing


def draft_config(config: EngineConfig) -> EngineConfig | None:
    """The settings of the draft model of an engine; None if the engine has none, or if `spec` does not use it."""
    if not config.draft_model or config.spec not in ("auto", "mtp", *DRAFT_MODELS):
        return None
    return msgspec.structs.replace(
        config,
        model_path=config.draft_model,
        draft_model="",
        spec="off",
        n_gpu_layers=config.draft_gpu_layers,
        rpc=(),  # a draft token over a network takes longer than it saves
        tensor_split=(),
        kv_layout="unified",
        deterministic=False,  # drafts do not change the text
        lora=(),
    )


def check_draft_model(draft: Model, target: Model) -> None:
    """Raises `ModelError` if a model cannot draft for another one, with what differs first."""
    if draft.is_recurrent or draft.n_swa:
        memory = "a recurrent state" if draft.is_recurrent else "a sliding window"
        raise ModelError(
            f"{draft.path} ({draft.description}) has {memory}, from which rejected drafts cannot be removed. Use a "
            "draft model (-md) with full attention in all layers"
        )
    if not (draft.is_one_stack and draft.can_generate):
        raise ModelError(
            f"{draft.path} ({draft.description}) does not generate text, so it cannot be used as a draft model (-md)"
        )
    check_vocabulary(draft, target)


def check_vocabulary(draft: Model, target: Model, other: str = "a smaller model of the same family") -> None:
    """Raises `ModelError` if the vocabularies of two models differ, with what differs first. `other`: the remedy."""
    if difference := target.vocab.difference(draft.vocab):
        raise ModelError(
            f"the draft model {draft.path.name} has a different vocabulary from {target.path.name}: {difference}. Use "
            f"{other} (-md)"
        )


def make_draft_context(config: EngineConfig, draft: Model) -> Context:
    """The context of a draft model, with as many cells as the engine has. `config`: from `draft_config`."""
    backend = Backend.get()
    on_gpu = backend.offloads(config.n_gpu_layers)
    return Context(
        draft,
        n_ctx=config.n_ctx,
        n_batch=config.n_batch,
        n_ubatch=config.n_ubatch,
        n_seq_max=config.n_parallel,
        n_threads=config.n_threads or available_threads(),
        flash_attn=choose_flash_attn(config, "unified", on_gpu=on_gpu, has_amx=backend.has_amx),
        type_k=config.cache_type_k,
        type_v=config.cache_type_v,
        kv_unified=True,
    )


def open_draft_model(
    config: EngineConfig, draft: Model, target: Model, threads: ComputeThreads | None
) -> DraftModelProposer:
    """Checks a loaded draft model, makes its context and tries it. `config`: from `draft_config`. `threads`: the
    engine's. Raises `ModelError` or `LlamaError`."""
    check_draft_model(draft, target)
    context = make_draft_context(config, draft)
    if (sharing := probe_prefix_sharing(context)) != "cells":
        raise ModelError(
            f"{draft.path.name} cannot be used as a draft model (-md): its sequences cannot share and remove KV cells "
            f"(found: {sharing})"
        )
    longest = min(context.n_ctx_seq, draft.n_ctx_train)
    threads = None if Backend.get().offloads(config.n_gpu_layers) else threads
    return DraftModelProposer(DraftModel(context, longest), target.vocab.eog, threads=threads)
