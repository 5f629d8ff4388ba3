"""Chooses flash attention and cache types before an engine starts, unless the user has given them."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from cppbatch.config import FLOAT_CACHES, CacheType, EngineConfig, KvLayout
from cppbatch.engine.kv.layout import choose_flash_attn, choose_layout, switches_layout
from cppbatch.errors import ModelError
from cppbatch.findings import finding_path, read_finding, write_finding
from cppbatch.models.attention_times import (
    Attention,
    AttentionTask,
    RequestSizes,
    Shape,
    attention_shape,
    attention_times,
)
from cppbatch.models.find import file_identity
from cppbatch.models.inspect import inspect_model
from cppbatch.models.kernels import has_gpu, kernel_times, weights_s
from cppbatch.sizing.attention_choice import (
    AttentionChoice,
    Costs,
    Faster,
    Load,
    WeightTimes,
    choose_attention,
    expected_load,
    suits_unified,
)

ATTENTION = ("flash_attn", "stream_flash_attn", "cache_type_k", "cache_type_v")
"""The settings that `plan_attention` may change."""

_F16: Types = ("f16", "f16")


class AttentionPlan(NamedTuple):
    """Settings with measured flash attention and cache types."""

    config: EngineConfig
    line: str | None = None
    """The choice and its reason; None: llama.cpp's choice and f16 are kept."""
    proposal: str | None = None
    """A faster alternative, and the command that enables it."""
    unmeasured: Attention | None = None
    """The attention of the proposal."""
    load: str | None = None
    """The load for which attention was compared; None: it was not."""


def plan_attention(config: EngineConfig, given: Collection[str], sizes: RequestSizes | None = None) -> AttentionPlan:
    """`config` with the attention that is clearly fastest here for a load.

    `given`: the settings set by the user or a profile. `sizes`: of the requests to come; None: those of the model's
    earlier requests, or sizes that follow from `n_ctx` and `n_parallel`. Nothing changes on a GPU, with
    `deterministic`, a draft model, or layers with other kinds of attention. Takes a second or two if attention has
    never been timed here for these heads, else milliseconds.
    """
    if config.rpc or config.pooling or config.deterministic or config.draft_model:
        return AttentionPlan(config)
    model = Path(config.model_path)
    try:
        shape, facts = attention_shape(model), inspect_model(model)
        # with fewer than 4096 values in all layers' queries, attention takes microseconds of a step
        if shape is None or facts.pooling or shape.n_layer * shape.n_head * shape.head_k < 4096:
            return AttentionPlan(config)
        kernel_times(["Q8_0"])  # cached; detects whether there is a GPU, if unknown
        if config.n_gpu_layers != 0 and has_gpu():
            return AttentionPlan(config)
        layout = choose_layout(config, n_ctx_train=facts.n_ctx_train or 0, has_kv_cells=True)
        times = attention_times(_task(config, shape, layout))
        of_weights = weights_s(model, config.n_parallel)
    except ModelError:  # loading reports what is wrong with the file
        return AttentionPlan(config)
    if times is None:
        return AttentionPlan(config)

    present = choose_flash_attn(config, layout, on_gpu=False, has_amx=times.has_amx)  # llama.cpp's auto is on
    now = Attention("off" if present == "off" else "on", config.cache_type_k, config.cache_type_v)
    costs = Costs(times, shape.n_layer, WeightTimes(*of_weights) if of_weights else None)
    load, allowed = expected_load(config, sizes), _allowed_choices(config, given, now)
    if switches_layout(config, has_kv_cells=True):
        allowed = (each for each in allowed if each.types == now.types or suits_unified(costs, load, each))
    choice = choose_attention(costs, load, now, allowed, known_excess(model))
    return _plan(config, now, choice, load, "steps" if of_weights else "attention")


def _task(config: EngineConfig, shape: Shape, layout: KvLayout) -> AttentionTask:
    if layout == "unified":
        n_timed, n_cells = config.n_parallel, config.n_ctx
    else:
        n_timed, n_cells = min(2, config.n_parallel), config.n_ctx // config.n_parallel
    # Powers of two, so that similar sizes share their times.
    return AttentionTask(shape, layout, n_timed, min(1 << (n_cells - 1).bit_length(), 4096))


def _allowed_choices(config: EngineConfig, given: Collection[str], now: Attention) -> Iterator[Attention]:
    """The allowed choices: not for given settings, and quantised values only with flash attention."""
    is_fixed = config.flash_attn != "auto" or "flash_attn" in given
    types_are_given = (now.k, now.v) != _F16 or not {"cache_type_k", "cache_type_v"}.isdisjoint(given)
    here: Types = now.k, now.v
    for k, v in [here] if types_are_given else [_F16, *TYPES]:
        if v in FLOAT_CACHES and not (is_fixed and now.flash_attn == "on"):
            yield Attention("off", k, v)
        if not (is_fixed and now.flash_attn == "off"):
            yield Attention("on", k, v)


def _plan(config: EngineConfig, now: Attention, choice: AttentionChoice, load: Load, what: str) -> AttentionPlan:
    n = load.n_parallel
    cells = f"{load.n_cells:,.0f} tokens in " + (f"each of {n} sequences" if n > 1 else "a sequence") + load.source
    proposal = None
    if choice.proposal:
        file = shlex.quote(config.model_path)
        proposal = (
            f"{_format_flags(choice.proposal.attention)} would make {what} about {choice.proposal.gain:.2f}x as fast "
            f"with {cells}; `cppbatch models cache-types {file}` measures the effect on the output; if it is small "
            "enough, later starts use it"
        )
    unmeasured = choice.proposal and choice.proposal.attention
    if choice.best is None:
        return AttentionPlan(config, None, proposal, unmeasured, cells)
    best, gain = choice.best
    line = (
        f"{_format_flags(best)}: {what} about {gain:.2f}x as fast as with {_format_flags(now)}, with {cells}; "
        "set it with these flags"
    )
    return AttentionPlan(_with(config, choice.best), line, proposal, unmeasured, cells)


def _with(config: EngineConfig, best: Faster) -> EngineConfig:
    """An engine that switches between the layouts keeps llama.cpp's flash attention in the unified one."""
    flash_attn, k, v = best.attention
    changed = replace(config, cache_type_k=k, cache_type_v=v)
    if config.flash_attn != "auto":
        return changed
    if switches_layout(config, has_kv_cells=True):
        return replace(changed, stream_flash_attn=flash_attn)
    return replace(changed, flash_attn=flash_attn)


def _format_flags(attention: Attention) -> str:
    """Formats the choice as flags."""
    return f"-fa {attention.flash_attn} -ctk {attention.k} -ctv {attention.v}"


Types = tuple[CacheType, CacheType]
"""The types of keys and values."""
TYPES: tuple[Types, ...] = (
    ("f16", "bf16"), ("bf16", "f16"), ("bf16", "bf16"), ("f16", "q8_0"), ("q8_0", "f16"), ("q8_0", "bf16"),
    ("bf16", "q8_0"), ("q8_0", "q8_0"),
)  # fmt: skip
"""Types that may be chosen automatically instead of f16."""


class CacheQuality(msgspec.Struct, frozen=True):
    """The measurements for a model's file."""

    excess: dict[str, float]
    """{types of keys and values ("q8_0 bf16"): KL divergence from the f16 cache, in nats, less that of the f16 cache
    without flash attention, which adds in another order}."""


def known_excess(model: Path) -> Mapping[str, float]:
    """The measured KL divergences for this file, beyond those of a different order of additions; empty if there are
    none."""
    known = read_finding(_path(model), CacheQuality)
    return known.excess if known else {}


def keep_excess(model: Path, excess: Mapping[str, float]) -> None:
    """Stores measurements, in addition to earlier ones."""
    write_finding(_path(model), CacheQuality({**known_excess(model), **excess}))


def _path(model: Path) -> Path:
    return finding_path("cache-types", hashlib.sha256(repr(file_identity(model)).encode()).hexdigest()[:16])
