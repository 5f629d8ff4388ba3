"""Finds the fastest flash attention setting and cache types for a load from measured times (docs/decisions/0048)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from cppbatch.config import EngineConfig
from cppbatch.models.attention_times import (
    Attention,
    AttentionTimes,
    RequestSizes,
    known_sizes,
)

CLEAR_GAIN = 1.1
"""A change is worth it if predicted steps are at least this many times as fast: predictions were up to 8% off. Without
times for the weights, only attention is compared."""
MAX_EXCESS_KL = 0.001
"""Maximum KL divergence from the f16 cache in nats, beyond that of a different order of additions, for a type to be
chosen automatically."""


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
    # 1024 cells mostly hold a prompt and its answer
    return Load(config.n_parallel, min(config.n_ctx // config.n_parallel, 1024) / 2)


def expected_load(config: EngineConfig, sizes: RequestSizes | None) -> Load:
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
