"""Opens a draft model that reads hidden rows of the model it drafts for (EAGLE-3, DFlash, Gemma 4's assistant): its
checks, its context.
"""

from __future__ import annotations

import logging
from pathlib import Path

from cppbatch.config import EngineConfig, Speculation, available_threads, named
from cppbatch.engine.compute_threads import ComputeThreads
from cppbatch.engine.kv_layout import choose_flash_attn
from cppbatch.engine.speculation.dflash_proposer import DFlashProposer
from cppbatch.engine.speculation.draft_runtime import check_vocabulary
from cppbatch.engine.speculation.head_proposer import AssistantProposer, HeadProposer
from cppbatch.engine.speculation.row_proposer import RowProposer
from cppbatch.errors import ModelError
from cppbatch.llama import (
    AssistantContext,
    Backend,
    Context,
    DFlashContext,
    EagleContext,
    Model,
    why_no_heads,
    why_no_layer_rows,
)
from cppbatch.models.draft_files import ASSISTANT, NAMES, DraftFile, RowKind, read_draft_file, row_kind

log = logging.getLogger("cppbatch.engine")

SPECS: dict[Speculation, RowKind] = {"eagle3": "eagle3", "dflash": "dflash", "mtp": ASSISTANT}
"""The kind of draft model that a setting of `spec` demands."""
_MOST_READ = 128  # tokens in a decode: llama.cpp computes logits of each, also of those that want none
_MOST_BLOCKS = 512  # tokens of all blocks in a decode, each with logits


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
            f"{named('spec')} is '{spec}', but {path.name} is {found}; set it to '{fitting}', or use another file "
            f"({named('draft_model')})"
        )
    if kind is None:
        return None, False
    if reason := why_no_heads() if kind == ASSISTANT else why_no_layer_rows():
        if spec in SPECS:
            raise ModelError(f"{named('spec')} is '{spec}', but {reason}; leave it out")
        log.info("%s is not used: %s", path.name, reason)
        return None, True
    file = read_draft_file(path, Path(config.model_path))
    backend = Backend.get()
    on_gpu = backend.offloads(config.n_gpu_layers, config.rpc)
    if file.shares and on_gpu and (config.rpc or not backend.offloads(config.draft_gpu_layers)):
        raise ModelError(
            f"{path.name} shares embeddings or the output matrix with the model, which are on different devices; leave "
            f"{named('rpc')} out, and set {named('draft_gpu_layers')} to -1"
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
    n_batch = max(config.n_parallel, min(config.n_ubatch, _MOST_READ))
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
    n_batch = max(n_batch, block, min(config.n_parallel * block, _MOST_BLOCKS))
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
