"""Opens draft models and draft heads: their settings, their checks, their contexts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from cppbatch.config import DRAFT_MODELS, EngineConfig, Speculation, available_threads, setting_name
from cppbatch.engine.compute_threads import ComputeThreads
from cppbatch.engine.kv.layout import choose_flash_attn
from cppbatch.engine.kv.sharing import SHARING
from cppbatch.engine.speculation.chain_proposer import ChainProposer
from cppbatch.engine.speculation.dflash_proposer import DFlashProposer
from cppbatch.engine.speculation.draft_model import DraftModel, DraftModelProposer
from cppbatch.engine.speculation.head_proposer import AssistantProposer, HeadProposer
from cppbatch.engine.speculation.row_proposer import RowProposer
from cppbatch.errors import ModelError
from cppbatch.llama import (
    AssistantContext,
    Backend,
    Context,
    DFlashContext,
    EagleContext,
    HeadContext,
    Model,
    probe_prefix_sharing,
    why_no_heads,
    why_no_layer_rows,
)
from cppbatch.models.draft_files import ASSISTANT, NAMES, DraftFile, RowKind, draft_heads, read_draft_file, row_kind


def draft_config(config: EngineConfig) -> EngineConfig | None:
    """The settings of the draft model of an engine; None if the engine has none, or if `spec` does not use it."""
    if not config.draft_model or config.spec not in ("auto", "mtp", *DRAFT_MODELS):
        return None
    return msgspec.structs.replace(
        config,
        model_path=config.draft_model,
        draft_model="",
        spec="off",
        **_draft_devices(config),
        override_tensor=config.draft_override_tensor,
        cpu_moe=config.draft_cpu_moe,
        n_cpu_moe=config.draft_n_cpu_moe,
        n_cpu_ffn=0,
        kv_layout="unified",
        deterministic=False,  # drafts do not change the text
        lora=(),
        control_vectors=(),
        kv_overrides=(),
        cache_type_k=config.draft_cache_type_k or config.cache_type_k,
        cache_type_v=config.draft_cache_type_v or config.cache_type_v,
    )


def _draft_devices(config: EngineConfig) -> dict[str, Any]:
    """Returns the devices of the model, as in llama-server, unless the draft model has its own. RPC workers are used
    only in the second case: a draft token over a network takes longer than it saves."""
    if names := config.draft_device_names:
        shares = config.tensor_split[: len(names)]
        split_mode = "layer" if len(names) == 1 else config.split_mode
        found = {"device_names": names, "tensor_split": shares if any(shares) else (), "split_mode": split_mode}
        return {"n_gpu_layers": config.draft_gpu_layers, **found}
    if not config.rpc:
        return {"n_gpu_layers": config.draft_gpu_layers}
    local = tuple(name for name in config.device_names if not name.startswith("RPC"))
    n_gpu_layers = 0 if config.device_names and not local else config.draft_gpu_layers
    no_split: dict[str, Any] = {"tensor_split": (), "split_mode": "layer", "main_gpu": 0}
    return {"n_gpu_layers": n_gpu_layers, "rpc": (), "device_names": local, **no_split}


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
    sharing = probe_prefix_sharing(context)
    if not SHARING[sharing].shares_any_cells:
        raise ModelError(
            f"{draft.path.name} cannot be used as a draft model (-md): its sequences cannot share and remove KV cells "
            f"(found: {sharing})"
        )
    longest = min(context.n_ctx_seq, draft.n_ctx_train)
    threads = None if Backend.get().offloads(config.n_gpu_layers) else threads
    return DraftModelProposer(DraftModel(context, longest), target.vocab.eog, threads=threads)


# --- head runtime ----------------------------------------------------------------------------------------------------
# Opens the draft heads in a model's file: whether they are used, their contexts.


log = logging.getLogger("cppbatch.engine")


def uses_head(config: EngineConfig) -> bool:
    """Whether an engine loads the draft head in the model's file.

    Not beside a draft model. With `spec` auto: on a CPU, if the file has a head that can be used. Raises `ModelError`
    with `spec` mtp if it has none.
    """
    if config.draft_model:
        return False
    is_auto = config.spec == "auto" and not config.pooling
    if not (config.spec == "mtp" or (is_auto and not Backend.get().offloads(config.n_gpu_layers, config.rpc))):
        return False
    reason = _why_not(Path(config.model_path))
    if reason and config.spec == "mtp":
        raise ModelError(f"{setting_name('spec')} is 'mtp', but {reason}; leave it out")
    if reason and "has no draft head" not in reason:
        log.info("the draft head is not used: %s", reason)
    return reason is None


def _why_not(path: Path) -> str | None:
    try:
        heads = draft_heads(path)
    except ModelError as error:  # loading says what is wrong with the file
        return f"{path.name} has no draft head ({error})"
    return heads.why_not_usable(path.name) or why_no_heads()


def make_head_context(config: EngineConfig, model: Model, head: int = 0) -> HeadContext:
    """The context of a draft head of the file, with as many cells as the engine has."""
    backend = Backend.get()
    on_gpu = backend.offloads(config.n_gpu_layers, config.rpc)
    # a prompt is read in pieces of up to 512 tokens, which delay no step for long
    n_batch = max(config.n_parallel * model.n_draft_heads, min(config.n_ubatch, 512))
    return HeadContext(
        model,
        n_ctx=config.n_ctx,
        n_batch=n_batch,
        n_seq_max=config.n_parallel,
        n_threads=config.n_threads or available_threads(),
        flash_attn=choose_flash_attn(config, "unified", on_gpu=on_gpu, has_amx=backend.has_amx),
        type_k=config.cache_type_k,
        type_v=config.cache_type_v,
        head=head,
    )


def open_head(config: EngineConfig, context: Context, threads: ComputeThreads | None) -> HeadProposer:
    """Makes the contexts of the heads of a loaded model, and lets `context` give hidden rows. Closing the model frees
    them. `threads`: the engine's. Raises `LlamaError`."""
    model = context.model
    heads = [make_head_context(config, model, i) for i in range(model.n_draft_heads)]
    context.give_hidden_rows()
    longest = min(heads[0].n_ctx_seq, model.n_ctx_train)
    if len(heads) > 1:
        return ChainProposer(heads, context.hidden_rows, longest, model.vocab.eog, threads=threads)
    return HeadProposer(heads[0], context.hidden_rows, longest, model.vocab.eog, threads=threads)


# --- row runtime -----------------------------------------------------------------------------------------------------
# Opens a draft model that reads hidden rows of the model it drafts for (EAGLE-3, DFlash, Gemma 4's assistant): its
# checks, its context.


SPECS: dict[Speculation, RowKind] = {"eagle3": "eagle3", "dflash": "dflash", "mtp": ASSISTANT}
"""The kind of draft model that a setting of `spec` demands."""


def choose_row_draft(config: EngineConfig) -> tuple[DraftFile | None, bool]:
    """The header of the draft model of an engine, if that reads hidden rows; None: it is of another kind.

    The second value: whether it is left out, because llama.cpp's library lacks the functions; the log says so. Raises
    `ModelError` if `spec` asks for another kind, or for one that cannot be used, and as `read_draft_file`.
    """
    path, spec = Path(config.draft_model), config.spec
    try:
        kind = row_kind(path)
    except ModelError:
        if spec in SPECS:
            raise
        return None, False  # loading says what is wrong with the file
    if spec in SPECS and SPECS[spec] != kind:
        found = f"{'an' if kind == 'eagle3' else 'a'} {NAMES[kind]} draft model" if kind else "another kind of model"
        fitting = next((name for name, of_kind in SPECS.items() if of_kind == kind), "draft")
        raise ModelError(
            f"{setting_name('spec')} is '{spec}', but {path.name} is {found}; set it to '{fitting}', or use another "
            f"file ({setting_name('draft_model')})"
        )
    if kind is None:
        return None, False
    if reason := why_no_heads() if kind == ASSISTANT else why_no_layer_rows():
        if spec in SPECS:
            raise ModelError(f"{setting_name('spec')} is '{spec}', but {reason}; leave it out")
        log.info("%s is not used: %s", path.name, reason)
        return None, True
    file = read_draft_file(path, Path(config.model_path))
    backend = Backend.get()
    on_gpu = backend.offloads(config.n_gpu_layers, config.rpc)
    if file.shares and on_gpu and (config.rpc or not backend.offloads(config.draft_gpu_layers)):
        raise ModelError(
            f"{path.name} shares embeddings or the output matrix with the model, which are on different devices; leave "
            f"{setting_name('rpc')} out, and set {setting_name('draft_gpu_layers')} to -1"
        )
    return file, False


def make_row_context(
    config: EngineConfig, file: DraftFile, draft: Model, target: Context
) -> EagleContext | DFlashContext | AssistantContext:
    """The context of a draft model that reads hidden rows, with as many cells as the engine has. `config`: from
    `draft_config`. `target`: the context of the model. Raises `LlamaError`."""
    backend = Backend.get()
    if file.kind == ASSISTANT:
        types = {"type_k": config.cache_type_k, "type_v": config.cache_type_v}
        return AssistantContext(draft, target, n_threads=config.n_threads or available_threads(), **types)
    on_gpu = backend.offloads(config.n_gpu_layers)
    # few tokens in a decode: llama.cpp computes logits of each, also of those that want none
    n_batch = max(config.n_parallel + 1, min(config.n_ubatch, 128))  # the context has one more seq_id
    n_drafted = max(1, min(config.draft_max, file.block - file.first))
    block = n_drafted + file.first
    sizes = {
        "n_ctx": config.n_ctx,
        "n_seq_max": config.n_parallel,
        "n_threads": config.n_threads or available_threads(),
        "flash_attn": choose_flash_attn(config, "unified", on_gpu=on_gpu, has_amx=backend.has_amx),
        "type_k": config.cache_type_k,
        "type_v": config.cache_type_v,
    }
    if file.kind == "eagle3":
        return EagleContext(draft, file, target, n_batch=n_batch, **sizes)
    # each token of the blocks has logits
    n_batch = max(n_batch, block, min(config.n_parallel * block, 512))
    return DFlashContext(draft, file, target, n_drafted=n_drafted, n_batch=n_batch, **sizes)


def open_row_draft(
    config: EngineConfig, file: DraftFile, draft: Model, target: Context, threads: ComputeThreads | None
) -> RowProposer:
    """Makes the context of a loaded draft model, and lets `target`, the context of the model, give the rows that it
    reads. `config`: from `draft_config`. `threads`: the engine's. Raises `ModelError` or `LlamaError`."""
    check_vocabulary(draft, target.model, "a draft model made for it")
    context = make_row_context(config, file, draft, target)
    target.give_hidden_rows(file.layers)
    longest = min(context.n_ctx_seq, draft.n_ctx_train)
    threads = None if Backend.get().offloads(config.n_gpu_layers) else threads
    eog = target.model.vocab.eog
    if isinstance(context, DFlashContext):
        return DFlashProposer(context, target.hidden_rows, longest, eog, threads=threads)
    proposer = AssistantProposer if isinstance(context, AssistantContext) else HeadProposer
    return proposer(context, target.hidden_rows, longest, eog, kind="the draft model", threads=threads)
