"""Chooses flash attention and cache types before an engine starts, unless the user has given them."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
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
    AttentionTimes,
    RequestSizes,
    Shape,
    attention_shape,
    attention_times,
    known_sizes,
)
from cppbatch.models.find import file_identity
from cppbatch.models.inspect import inspect_model
from cppbatch.models.kernels import has_gpu, kernel_times, weights_s

ATTENTION = ("flash_attn", "stream_flash_attn", "cache_type_k", "cache_type_v")
"""The settings that `plan_attention` may change."""

_MIN_VALUES = 4096  # of all layers' queries: with fewer, attention takes microseconds of a step
_MAX_MEMORY = 4096  # cells of a stream, for the times of attention
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
        if shape is None or facts.pooling or shape.n_layer * shape.n_head * shape.head_k < _MIN_VALUES:
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
    load, allowed = _load(config, sizes), _allowed_choices(config, given, now)
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
    return AttentionTask(shape, layout, n_timed, min(1 << (n_cells - 1).bit_length(), _MAX_MEMORY))


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


# --- attention choice ------------------------------------------------------------------------------------------------
# Finds the fastest flash attention setting and cache types for a load from measured times (docs/decisions/0048).


CLEAR_GAIN = 1.1
"""A change is worth it if predicted steps are at least this many times as fast: predictions were up to 8% off. Without
times for the weights, only attention is compared."""
MAX_EXCESS_KL = 0.001
"""Maximum KL divergence from the f16 cache in nats, beyond that of a different order of additions, for a type to be
chosen automatically."""

_MOST_CELLS = 1024  # of a sequence, unless it is known: a prompt and its answer, mostly


class Load(NamedTuple):
    """The work of an engine per generated token."""

    n_parallel: int
    n_cells: float
    """Cells of a sequence that decodes, on average."""
    prompt_tokens: float = 1.0
    """Computed per generated token."""
    source: str = ""
    """Where it is known from, after the number of tokens: " (as in earlier requests)"."""


class WeightTimes(NamedTuple):
    """Seconds of one thread for the matrix products of all weights."""

    decode_s: float
    """Per row, in a batch with a row of every sequence."""
    prefill_s: float
    """Per prompt token."""


class Costs(NamedTuple):
    """The times of a model on a CPU."""

    attention: AttentionTimes
    n_layer: int
    weights: WeightTimes | None
    """None: not timed."""


class Faster(NamedTuple):
    """A way of computing attention that is clearly faster than the current one."""

    attention: Attention
    gain: float
    """The speedup of steps, or of attention if the weights are not timed."""


class AttentionChoice(NamedTuple):
    """The conclusion from a table of times for a load."""

    best: Faster | None
    """The fastest one with known quality; None: the current one is kept."""
    proposal: Faster | None
    """A clearly faster one whose quality has not been measured for this model."""


def usual_load(config: EngineConfig) -> Load:
    """The assumed load if only the sizes are known: sequences are half full, at most half of 1,024 cells."""
    return Load(config.n_parallel, min(config.n_ctx // config.n_parallel, _MOST_CELLS) / 2)


def _load(config: EngineConfig, sizes: RequestSizes | None) -> Load:
    """`sizes`: of the input file, if there is one."""
    if sizes:
        return load_of(sizes, config, "as in the input file")
    if earlier := known_sizes(Path(config.model_path)):
        return load_of(earlier, config, "as in earlier requests")
    return usual_load(config)


def load_of(sizes: RequestSizes, config: EngineConfig, source: str) -> Load:
    """The load of requests of these sizes. `source`: where they are from, for messages."""
    n_cells = min(sizes.context, config.n_ctx)
    return Load(config.n_parallel, n_cells, sizes.computed_tokens / sizes.output_tokens, f" ({source})")


def choose_attention(
    costs: Costs, load: Load, now: Attention, allowed: Iterable[Attention], excess: Mapping[str, float]
) -> AttentionChoice:
    """The fastest of `allowed` for the load. `excess`: {"k v": nats}, of the types that were measured.

    Types measured to be worse than `MAX_EXCESS_KL` are neither chosen nor proposed.
    """
    times = costs.attention
    if now.name not in times.decode or now.name not in times.prefill:
        return AttentionChoice(None, None)
    seconds = {
        each: _seconds(costs, load, each)
        for each in (now, *allowed)
        if each.name in times.decode and each.name in times.prefill
    }
    is_known = {each: each.types == now.types or _excess_of(each, excess) is not None for each in seconds}
    is_good = {each: each.types == now.types or (_excess_of(each, excess) or 0.0) < MAX_EXCESS_KL for each in seconds}
    best = _faster(seconds, now, [each for each in seconds if is_known[each] and is_good[each]], CLEAR_GAIN)
    unknown = [each for each in seconds if not is_known[each]]
    return AttentionChoice(best, _faster(seconds, now, unknown, CLEAR_GAIN * (best.gain if best else 1.0)))


def suits_unified(costs: Costs, load: Load, attention: Attention) -> bool:
    """Whether these types of keys and values compute the load with flash attention about as fast as f16: an engine that
    switches to the unified layout has flash attention there, with the same types."""
    candidate, f16 = Attention("on", attention.k, attention.v), Attention("on", "f16", "f16")
    times = costs.attention
    if any(each.name not in table for each in (candidate, f16) for table in (times.decode, times.prefill)):
        return False
    return _seconds(costs, load, candidate) <= CLEAR_GAIN * _seconds(costs, load, f16)


def _faster(
    seconds: Mapping[Attention, float], now: Attention, candidates: list[Attention], least: float
) -> Faster | None:
    """The fastest candidate, if it is at least `least` times as fast as `now`."""
    best = min(candidates, key=lambda each: seconds[each], default=now)
    gain = seconds[now] / seconds[best]
    return Faster(best, gain) if best != now and gain >= least else None


def _excess_of(attention: Attention, excess: Mapping[str, float]) -> float | None:
    return 0.0 if attention.types == "f16 f16" else excess.get(attention.types)


def _seconds(costs: Costs, load: Load, attention: Attention) -> float:
    """The time of one thread for a generated token and its part of the prompts, whose tokens see half as many cells."""
    decode = costs.n_layer * costs.attention.decode_s(attention, load.n_cells)
    prefill = costs.n_layer * costs.attention.prefill_s(attention, load.n_cells / 2)
    if costs.weights:
        decode, prefill = decode + costs.weights.decode_s, prefill + costs.weights.prefill_s
    return decode + load.prompt_tokens * prefill


# --- cache quality ---------------------------------------------------------------------------------------------------
# Measured effects of KV cache types on a model's output.


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
