"""Opens the draft heads in a model's file: whether they are used, their contexts."""

from __future__ import annotations

import logging
from pathlib import Path

from cppbatch.config import EngineConfig, available_threads, named
from cppbatch.engine.compute_threads import ComputeThreads
from cppbatch.engine.kv_layout import choose_flash_attn
from cppbatch.engine.speculation.head_proposer import ChainProposer, HeadProposer
from cppbatch.errors import ModelError
from cppbatch.llama import Backend, Context, HeadContext, Model, why_no_heads
from cppbatch.models.draft_heads import draft_heads

log = logging.getLogger("cppbatch.engine")

_MOST_BATCH = 512  # tokens: a prompt is read in pieces that delay no step for long


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
        raise ModelError(f"{named('spec')} is 'mtp', but {reason}; leave it out")
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
    n_batch = max(config.n_parallel * model.n_draft_heads, min(config.n_ubatch, _MOST_BATCH))
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
