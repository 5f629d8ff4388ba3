"""Flash attention and cache types of an engine that is about to start, where the user has not given them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from cppbatch.config import EngineConfig, KvLayout
from cppbatch.engine.attention_choice import (
    MAX_EXCESS_KL,
    AttentionChoice,
    Costs,
    Faster,
    WeightTimes,
    choose_attention,
    suits_unified,
    usual_load,
)
from cppbatch.engine.kv_layout import choose_flash_attn, choose_layout, switches_layout
from cppbatch.errors import ModelError
from cppbatch.models.attention_times import Attention, AttentionTask, Shape, attention_shape, attention_times
from cppbatch.models.cache_quality import TYPES, Types, known_excess
from cppbatch.models.inspect import inspect_model
from cppbatch.models.kernels import has_gpu, kernel_times
from cppbatch.models.repacking import weights_s

ATTENTION = ("flash_attn", "stream_flash_attn", "cache_type_k", "cache_type_v")
"""The settings that `plan_attention` may change."""

_MIN_VALUES = 4096  # of all layers' queries: with fewer, attention takes microseconds of a step
_MAX_MEMORY = 4096  # cells of a stream, for the times of attention
_SMALL_BYTES = 2 << 30  # of a file whose quality is measured in passing
_F16: Types = ("f16", "f16")


class AttentionPlan(NamedTuple):
    """Settings with measured flash attention and cache types."""

    config: EngineConfig
    line: str | None = None
    """What was chosen and why; None: llama.cpp's choice and f16 stay."""
    proposal: str | None = None
    """What else would be faster, and the command that allows it."""
    unmeasured: Attention | None = None
    """The attention of the proposal."""


def plan_attention(config: EngineConfig, given: Collection[str]) -> AttentionPlan:
    """`config` with the attention that is clearly fastest here for the load of its sizes.

    `given`: the settings that the user, or a profile, has decided. Nothing changes on a GPU, with `deterministic`, a
    draft model, or layers of other kinds of attention. Takes a second or two if attention was never timed here for
    these heads, else milliseconds.
    """
    if config.rpc or config.pooling or config.deterministic or config.draft_model:
        return AttentionPlan(config)
    model = Path(config.model_path)
    try:
        shape, facts = attention_shape(model), inspect_model(model)
        if shape is None or facts.pooling or shape.n_layer * shape.n_head * shape.head_k < _MIN_VALUES:
            return AttentionPlan(config)
        kernel_times(["Q8_0"])  # cached; finds out whether there is a GPU, if that is not known yet
        if config.n_gpu_layers != 0 and has_gpu():
            return AttentionPlan(config)
        layout = choose_layout(config, n_ctx_train=facts.n_ctx_train or 0, has_kv_cells=True)
        times = attention_times(_task(config, shape, layout))
        of_weights = weights_s(model, config.n_parallel)
    except ModelError:  # loading says what is wrong with the file
        return AttentionPlan(config)
    if times is None:
        return AttentionPlan(config)

    present = choose_flash_attn(config, layout, on_gpu=False, has_amx=times.has_amx)  # llama.cpp's auto is on
    now = Attention("off" if present == "off" else "on", config.cache_type_k, config.cache_type_v)
    costs = Costs(times, shape.n_layer, WeightTimes(*of_weights) if of_weights else None)
    load, allowed = usual_load(config), _allowed(config, given, now)
    if switches_layout(config, has_kv_cells=True):
        allowed = (each for each in allowed if each.types == now.types or suits_unified(costs, load, each))
    choice = choose_attention(costs, load, now, allowed, known_excess(model))
    return _plan(config, now, choice, "steps" if of_weights else "attention")


def _task(config: EngineConfig, shape: Shape, layout: KvLayout) -> AttentionTask:
    if layout == "unified":
        n_timed, n_cells = config.n_parallel, config.n_ctx
    else:
        n_timed, n_cells = min(2, config.n_parallel), config.n_ctx // config.n_parallel
    # Powers of two, so that similar sizes share their times.
    return AttentionTask(shape, layout, n_timed, min(1 << (n_cells - 1).bit_length(), _MAX_MEMORY))


def measure_proposal(
    config: EngineConfig, given: Collection[str], progress: Callable[[str], object] = lambda line: None
) -> str | None:
    """Measures the cache types of the proposal for a small model, so that later starts may use them.

    Returns a sentence with the result; None: nothing is proposed, or the model is large. Raises the exceptions of
    loading a model.
    """
    from cppbatch.bench.quality.cache_types import compare_cache_types  # it loads llama.cpp

    unmeasured = plan_attention(config, given).unmeasured
    if unmeasured is None or Path(config.model_path).stat().st_size > _SMALL_BYTES:
        return None
    row = compare_cache_types(Path(config.model_path), [(unmeasured.k, unmeasured.v)], progress).rows[-1]
    is_close = row["excess"] < MAX_EXCESS_KL
    verdict = "later starts use it" if is_close else f"not below {MAX_EXCESS_KL}, so it is used only if given"
    return (
        f"-ctk {unmeasured.k} -ctv {unmeasured.v} is faster, and its KL divergence from f16 is {row['excess']:.5f} "
        f"higher than that of a different order of additions: {verdict}"
    )


def _allowed(config: EngineConfig, given: Collection[str], now: Attention) -> Iterator[Attention]:
    """What may be chosen: nothing that is given, and quantised values with flash attention only."""
    is_fixed = config.flash_attn != "auto" or "flash_attn" in given
    types_are_given = (now.k, now.v) != _F16 or not {"cache_type_k", "cache_type_v"}.isdisjoint(given)
    here: Types = now.k, now.v
    for k, v in [here] if types_are_given else [_F16, *TYPES]:
        if v not in ("q8_0", "q4_0") and not (is_fixed and now.flash_attn == "on"):
            yield Attention("off", k, v)
        if not (is_fixed and now.flash_attn == "off"):
            yield Attention("on", k, v)


def _plan(config: EngineConfig, now: Attention, choice: AttentionChoice, what: str) -> AttentionPlan:
    n = config.n_parallel
    cells = f"{usual_load(config).n_cells:,.0f} tokens in " + (f"each of {n} sequences" if n > 1 else "a sequence")
    proposal = None
    if choice.proposal:
        file = shlex.quote(config.model_path)
        proposal = (
            f"{_named(choice.proposal.attention)} would make {what} about {choice.proposal.gain:.2f}x as fast with "
            f"{cells}; `cppbatch models cache-types {file}` measures the effect on the output; if it is small enough, "
            "later starts use it"
        )
    unmeasured = choice.proposal and choice.proposal.attention
    if choice.best is None:
        return AttentionPlan(config, None, proposal, unmeasured)
    best, gain = choice.best
    line = (
        f"{_named(best)}: {what} about {gain:.2f}x as fast as with {_named(now)}, with {cells}; set it with these flags"
    )
    return AttentionPlan(_with(config, choice.best), line, proposal, unmeasured)


def _with(config: EngineConfig, best: Faster) -> EngineConfig:
    """An engine that switches between the layouts keeps llama.cpp's flash attention in the unified one."""
    flash_attn, k, v = best.attention
    changed = replace(config, cache_type_k=k, cache_type_v=v)
    if config.flash_attn != "auto":
        return changed
    if switches_layout(config, has_kv_cells=True):
        return replace(changed, stream_flash_attn=flash_attn)
    return replace(changed, flash_attn=flash_attn)


def _named(attention: Attention) -> str:
    """As flags."""
    return f"-fa {attention.flash_attn} -ctk {attention.k} -ctv {attention.v}"
