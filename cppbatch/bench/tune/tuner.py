"""Varies one setting after another and keeps the best value of each. The rules are independent of the engine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from time import monotonic
from typing import Any

import msgspec
import psutil
from msgspec.structs import replace

from cppbatch.bench.tune.measurement import Measurement, MeasurementTask, measure_in_child
from cppbatch.config import EngineConfig, available_threads
from cppbatch.engine.kv.layout import flash_attn_settings
from cppbatch.errors import ConfigError, EstimateFailed, ModelError
from cppbatch.sizing.demand import memory_demands
from cppbatch.sizing.estimate import MemoryEstimate, estimate_memory
from cppbatch.sizing.machine import free_host_memory
from cppbatch.sizing.placement import PLACED, placement_flags, placements, scores
from cppbatch.sizing.placement_search import Speeds
from cppbatch.sizing.profile import TunedSettings
from cppbatch.sizing.sizes import candidates_for

_SECONDS = 1.0  # of decoding per measurement
_MIN_TIMEOUT_S, _MAX_TIMEOUT_S = 10.0, 240.0
_TIME_OVER = "the time limit (--max-minutes) was reached before all measurements were done"
_BUSY = 0.3  # cores used by other programs from which the report has a note
_PROMPT = 1024  # length of the prompt with which -ub is chosen
_UBATCHES = (512, 256, 128, 1024)  # the default comes first; other values must be faster

Measure = Callable[[MeasurementTask, float], Measurement]
Progress = Callable[[str], None]


class TuningResult(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements and the chosen settings."""

    config: EngineConfig
    """The config with the chosen settings."""
    speed: Speed
    prompt_tokens_per_s: float | None
    points: list[dict[str, Any]]
    """In order: the varied setting, its value, the speeds."""
    curve: list[Speed]
    """Speed by parallelism, with the other settings as chosen."""
    most_parallel: int
    """The largest parallelism that fits into memory or was requested."""
    memory_bytes: dict[int, int] = {}
    """By parallelism, for an engine with the settings before tuning; empty if llama.cpp could not estimate it."""
    notes: list[str]

    def settings(self) -> TunedSettings:
        """Returns the settings for a profile."""
        return TunedSettings(**{name: getattr(self.config, name) for name in TunedSettings.__struct_fields__})

    def step_ms(self) -> dict[str, float]:
        """Returns the milliseconds of a step by decode rows."""
        return {str(speed.n_parallel): round(speed.inter_token_ms, 3) for speed in self.curve}

    def figures(self) -> dict[str, float]:
        """Returns the speeds of the chosen settings, rounded."""
        figures = {"tokens_per_s": self.speed.tokens_per_s, "inter_token_ms": self.speed.inter_token_ms}
        if self.prompt_tokens_per_s:
            figures["prompt_tokens_per_s"] = self.prompt_tokens_per_s
        return {name: round(value, 2) for name, value in figures.items()}


class Tuner:
    """Measures with `measure` until the time limit."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        given: Collection[str] = (),
        most_parallel: int,
        batch_sizes: Sequence[int] = (),
        target_ms: float | None = None,
        seconds: float,
        measure: Measure = measure_in_child,
        progress: Progress = lambda line: None,
    ) -> None:
        """`given`: names of settings that must not change. `batch_sizes`: the parallelisms to compare; empty: 1, 2, 4
        ... `seconds`: time limit of the tuning.

        Unless n_ctx is given, it grows with the parallelism, so that each sequence keeps n_ctx / n_parallel cells. It
        is never lowered, because the longest text might then not fit.
        """
        self._config = replace(config, prefix_cache=False)  # every prompt must be computed
        self._given = set(given)
        self._cells = config.n_ctx // config.n_parallel
        self._max_parallel = min(
            most_parallel, config.n_batch, config.n_ctx if "n_ctx" in self._given else most_parallel
        )
        self._batch_sizes = sorted(batch_sizes)
        self._memory: dict[int, int] = {}
        self._n_ctx_train = 0
        self._can_switch = False
        self._target_ms = target_ms
        self._measure, self._progress = measure, progress
        self._start = monotonic()
        self._end = self._start + seconds
        self._points: list[dict[str, Any]] = []
        self._speeds: dict[EngineConfig, Speed] = {}  # the best per config
        self._measured: list[Speed] = []  # of all points
        self._notes: list[str] = []
        self._last_error = ""

    def run(self) -> TuningResult:
        """Measures and chooses. Raises `ModelError` with the reason if no setting works."""
        self._place()
        most = self._most_parallel()
        sizes = self._sizes(most)
        # threads, layouts and flash attention are compared with 16 sequences, if memory allows
        here = self._with_parallel(max((n for n in sizes if n <= min(16, most)), default=sizes[0]))
        if "n_threads" not in self._given:
            best = self._best("threads", here, [{"n_threads": n} for n in _threads(here)])
            # The usual number is the engine's own default; it uses fewer threads while other programs are busy.
            here = here if best.n_threads == available_threads() or self._busy_cores() >= _BUSY else best
        here = self._best("layout", here, self._layouts(here, most))
        curve = self._repeat_disturbed(self._curve(here, most), here)
        self._note_busy()
        chosen = knee(curve, self._target_ms, self._measured)
        if self._target_ms and chosen.inter_token_ms > self._target_ms:
            self._notes.append(f"even a single sequence needs more than {self._target_ms:g} ms per token here")
        config = self._with_parallel(chosen.n_parallel, here)
        prefill: float | None = None
        if "n_ubatch" not in self._given:
            config, prefill = self._ubatch(config)
        return TuningResult(
            config=config, speed=chosen, prompt_tokens_per_s=prefill, points=self._points, curve=curve,
            most_parallel=most, memory_bytes=self._memory, notes=self._notes,
        )  # fmt: skip

    def _place(self) -> None:
        """If the devices cannot hold the model: measures the placements that are expected to be the best, and keeps the
        fastest one, with its sizes."""
        candidates = candidates_for(self._config, self._given)
        try:
            estimate = estimate_memory(candidates[-1:])
            if all(each.will_fit for each in memory_demands(estimate, free_host_memory())):
                return
            found = placements(candidates, lambda one: [one], estimate.devices, self._given)
            # of a model that its devices cannot hold, 4 placements are measured
            tried = [(self._whole(each.config), each.config) for each in islice(found, 4)]
        except EstimateFailed as error:
            self._notes.append(f"placements were not compared: {error}")
            return
        if measured := [(speeds, config) for speeds, config in tried if speeds]:
            ranks = scores([speeds for speeds, _ in measured], self._config.prefer)
            self._config = measured[ranks.index(max(ranks))][1]
            self._given |= {"n_parallel", "n_ctx", *PLACED}

    def _whole(self, config: EngineConfig) -> Speeds | None:
        """The speeds of one sequence, of all together, and of prompts; None: it does not run."""
        full = self._point("placement", placement_flags(config), config, prompt_tokens=_PROMPT)
        alone = full
        if config.n_parallel > 1 and not full.error:
            alone = self._point("placement", "-np 1", replace(config, n_parallel=1))
        if full.error or alone.error:
            return None
        return Speeds(alone.tokens_per_s, full.tokens_per_s, full.prompt_tokens_per_s)

    def _with_parallel(self, n: int, config: EngineConfig | None = None) -> EngineConfig:
        config = config or self._config
        if "n_parallel" in self._given:
            return config
        n_ctx = config.n_ctx if "n_ctx" in self._given else max(self._config.n_ctx, n * self._cells)
        return replace(config, n_parallel=n, n_ctx=n_ctx)

    def _most_parallel(self) -> int:
        """Returns the largest parallelism that fits into memory, by an estimate and then by loading."""
        sizes = self._sizes(self._max_parallel)
        most = self._by_estimate(sizes)
        errors: dict[int, str] = {}

        def loads(n: int) -> bool:
            point = self._point("memory", f"-np {n}", self._with_parallel(n), seconds=0)
            if point.error:
                errors[n] = point.error
            return point.error is None

        found = largest_fitting(loads, sizes[0], most)
        if found is None:
            least = self._with_parallel(sizes[0])
            raise ModelError(f"even -np {least.n_parallel} -c {least.n_ctx} does not run: {errors[sizes[0]]}")
        if found < sizes[-1]:
            self._notes.append(f"memory allows at most -np {found} -c {self._with_parallel(found).n_ctx}")
        return found

    def _by_estimate(self, sizes: list[int]) -> int:
        self._progress("estimating memory")
        try:
            estimate = estimate_memory([self._with_parallel(n) for n in sizes])
        except EstimateFailed as error:
            self._notes.append(f"memory limits were found by trial, without an estimate: {error}")
            return sizes[-1]
        if estimate.footprints[0].error:
            raise ModelError(estimate.footprints[0].error)
        self._n_ctx_train = estimate.footprints[0].n_ctx_train
        self._can_switch = any(each.kv_layout == "auto" for each in estimate.footprints)
        for n, footprint in zip(sizes, estimate.footprints, strict=True):
            self._memory[n] = sum(buffer.n_bytes for buffer in footprint.buffers)
        free = free_host_memory()
        fits = [
            all(d.will_fit for d in memory_demands(MemoryEstimate([each], estimate.devices), free))
            for each in estimate.footprints
        ]
        return max((n for n, ok in zip(sizes, fits, strict=True) if ok), default=sizes[0])

    def _layouts(self, config: EngineConfig, most: int) -> list[dict[str, Any]]:
        """Returns the layouts and flash attention settings to compare, the default first.

        An engine that can switch layouts uses streams in these measurements, because the prompts are distinct.
        Otherwise the per-sequence layout is only a candidate if each sequence can hold the model's training context:
        a faster layout must not reject long texts.
        """
        each = self._with_parallel(most).n_ctx // most
        layouts: list[str] = ["unified", "per-sequence"] if 0 < self._n_ctx_train <= each else ["unified"]
        if self._can_switch:
            layouts = ["auto", "unified"]
        if "kv_layout" in self._given:
            layouts = [config.kv_layout]
        attention = [config.flash_attn] if "flash_attn" in self._given else flash_attn_settings(config)
        return [{"kv_layout": layout, "flash_attn": fa} for layout in layouts for fa in attention]

    def _best(self, what: str, config: EngineConfig, choices: list[dict[str, Any]]) -> EngineConfig:
        """Returns `config` with the choice that has the highest total speed."""
        if len(choices) == 1:
            return replace(config, **choices[0])
        speeds = [self._speed(what, " ".join(map(str, c.values())), replace(config, **c)) for c in choices]
        return replace(config, **choices[fastest([speed.tokens_per_s if speed else None for speed in speeds]) or 0])

    def _speed(self, what: str, setting: str, config: EngineConfig) -> Speed | None:
        """Measures. Returns the best speed of this config so far, because other programs can only slow it down."""
        point = self._point(what, setting, config)
        if not point.error:
            speed = Speed(config.n_parallel, point.tokens_per_s, point.inter_token_ms)
            self._measured.append(speed)
            before = self._speeds.get(config, speed)
            self._speeds[config] = max(before, speed, key=lambda each: each.tokens_per_s)
        return self._speeds.get(config)

    def _curve(self, config: EngineConfig, most: int) -> list[Speed]:
        """Measures the speed by parallelism until it stops increasing, but at least up to the parallelism of `config`.

        The other settings were compared at that one. A measurement that contradicts its neighbour is repeated.
        """
        sizes = [n for n in self._sizes(most) if n <= most]
        curve: list[Speed] = []
        for n in sizes:
            speed = self._at(n, config)
            if speed is None:
                break
            curve.append(speed)
            if len(curve) > 1 and (disturbed := contradicting(*curve[-2:])):
                curve = [self._at(each.n_parallel, config) or each if each is disturbed else each for each in curve]
            if self._is_too_slow(curve[-1]):
                curve[-1] = self._at(n, config) or curve[-1]
            gains = len(curve) < 2 or is_gain(max(curve[:-1], key=lambda each: each.tokens_per_s), curve[-1])
            if not self._batch_sizes and (self._is_too_slow(curve[-1]) or (n >= config.n_parallel and not gains)):
                break
        known = self._speeds.get(self._with_parallel(config.n_parallel, config))
        if known and known.n_parallel not in [each.n_parallel for each in curve]:  # the time limit came first
            curve.append(known)
        if not curve:
            raise ModelError(f"no measurement succeeded: {self._last_error}")
        return curve

    def _repeat_disturbed(self, curve: list[Speed], config: EngineConfig) -> list[Speed]:
        """Repeats measurements if another point was clearly faster than the one that would be chosen.

        That point has the same parallelism with another layout or number of threads, or was measured while other
        programs were idle.
        """
        for _ in range(3):  # it should be as fast as an earlier one
            chosen = knee(curve, self._target_ms, self._measured)
            rivals = within(self._measured, self._target_ms)
            rival = max(rivals, key=lambda speed: speed.tokens_per_s, default=chosen)
            again = self._at(rival.n_parallel, config) if is_gain(chosen, rival) else None
            if again is None:
                break
            others = [speed for speed in curve if speed.n_parallel != again.n_parallel]
            curve = sorted([*others, again], key=lambda speed: speed.n_parallel)
        return curve

    def _sizes(self, most: int) -> list[int]:
        """The parallelisms to compare."""
        if self._batch_sizes:
            return self._batch_sizes
        return [self._config.n_parallel] if "n_parallel" in self._given else doublings(most)

    def _is_too_slow(self, speed: Speed) -> bool:
        return self._target_ms is not None and speed.inter_token_ms > self._target_ms

    def _at(self, n: int, config: EngineConfig) -> Speed | None:
        return self._speed("parallel", f"-np {n}", self._with_parallel(n, config))

    def _busy_cores(self) -> float:
        """Cores that other programs used during the measurements."""
        measured: list[float] = [point["busy_cores"] for point in self._points if not point["error"]]
        return statistics.median(measured or [0.0])

    def _note_busy(self) -> None:
        busy = self._busy_cores()
        if busy >= _BUSY:
            self._notes.append(
                f"other programs used {busy:.1f} of {available_threads()} cores during the measurements: run "
                "`cppbatch tune` again when the machine is idle"
            )

    def _ubatch(self, config: EngineConfig) -> tuple[EngineConfig, float | None]:
        """The -ub with the fastest prefill, and that speed. If it is not the default, both are measured again, because
        other programs may have slowed down either."""
        sizes = [n for n in _UBATCHES if n <= config.n_batch] or [config.n_ubatch]
        speeds = [self._prefill(config, n) for n in sizes]
        if best := fastest(speeds):
            for i in (0, best):
                speeds[i] = max(filter(None, (speeds[i], self._prefill(config, sizes[i]))), default=None)
        best = fastest(speeds)
        return (config, None) if best is None else (replace(config, n_ubatch=sizes[best]), speeds[best])

    def _prefill(self, config: EngineConfig, n_ubatch: int) -> float | None:
        """Prompt tokens/s with this -ub; None if not measured."""
        config = replace(config, n_ubatch=n_ubatch)
        point = self._point("ubatch", f"-ub {n_ubatch}", config, seconds=0, prompt_tokens=_PROMPT)
        return None if point.error else point.prompt_tokens_per_s

    def _point(
        self, what: str, setting: str, config: EngineConfig, *, seconds: float = _SECONDS, prompt_tokens: int = 0
    ) -> Measurement:
        """Measures, or returns an error after the time limit."""
        now = monotonic()
        if now >= self._end:
            if _TIME_OVER not in self._notes:
                self._notes.append(_TIME_OVER)
            self._last_error = "no time left; increase --max-minutes"
            return Measurement(error=self._last_error)
        self._progress(f"{what}: {setting} ({now - self._start:.0f} of at most {self._end - self._start:.0f} s)")
        task = MeasurementTask(config=config, seconds=seconds, prompt_tokens=prompt_tokens)
        point = self._measure(task, min(_MAX_TIMEOUT_S, max(_MIN_TIMEOUT_S, self._end - now)))
        self._last_error = point.error or self._last_error
        self._points.append(
            {"what": what, "setting": setting, "n_parallel": config.n_parallel, **msgspec.structs.asdict(point)}
        )
        return point


def _threads(config: EngineConfig) -> list[int]:
    """Returns the numbers of threads to compare, the default first."""
    usual = available_threads()
    logical: Sequence[int] = psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else ()
    return list(dict.fromkeys([usual, max(1, usual // 2), max(usual, len(logical))]))


def check_limits(target_ms: float | None, max_minutes: float) -> None:
    """Raises `ConfigError` for values that are not positive."""
    if target_ms is not None and not target_ms > 0:
        raise ConfigError(f"--target-latency-ms is {target_ms:g}; it must be more than 0")
    if not max_minutes > 0:
        raise ConfigError(f"--max-minutes is {max_minutes:g}; it must be more than 0")


# --- search ----------------------------------------------------------------------------------------------------------
# The rules for choosing settings from measured speeds, independent of the engine.


MIN_GAIN = 0.10
"""The minimum gain in total tokens/s that justifies a larger parallelism."""
MIN_DIFFERENCE = 0.03
"""The minimum difference in speed that is not noise."""


class Speed(msgspec.Struct, frozen=True):
    """The speed of `n_parallel` sequences at once."""

    n_parallel: int
    tokens_per_s: float
    """The sum over all sequences."""
    inter_token_ms: float
    """Median time between consecutive tokens of a sequence."""


def largest_fitting(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """Returns the largest number from `low` to `high` that fits, None if `low` does not fit.

    If a number fits, all smaller ones must fit too. Tries `high` first, because it usually fits, then bisects.
    """
    if fits(high):
        return high
    if low == high or not fits(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def knee(speeds: Sequence[Speed], target_ms: float | None = None, others: Sequence[Speed] = ()) -> Speed:
    """Returns the smallest parallelism that is about as fast as the fastest one: less than `MIN_GAIN` slower.

    `speeds`: at least one, by increasing parallelism. `target_ms`: the maximum time between two tokens. If no
    parallelism meets it, returns the smallest. `others`: measured with other settings; if they are clearly faster than
    all of `speeds`, returns the fastest.
    """
    allowed = within(speeds, target_ms)
    if not allowed:
        return speeds[0]
    rivals = [*allowed, *within(others, target_ms)]
    good = [speed for speed in allowed if not any(is_gain(speed, rival) for rival in rivals)]
    return good[0] if good else max(allowed, key=lambda speed: speed.tokens_per_s)


def within(speeds: Sequence[Speed], target_ms: float | None) -> list[Speed]:
    """Returns the speeds with at most this time between two tokens."""
    return [speed for speed in speeds if target_ms is None or speed.inter_token_ms <= target_ms]


def is_gain(this: Speed, other: Speed) -> bool:
    """Whether `other` is clearly faster in total."""
    return other.tokens_per_s >= this.tokens_per_s * (1 + MIN_GAIN)


def contradicting(smaller: Speed, larger: Speed) -> Speed | None:
    """Returns the measurement that was slowed down if the two contradict each other, else None.

    A larger batch is not slower in total, and not faster per sequence.
    """
    if larger.tokens_per_s * (1 + MIN_DIFFERENCE) < smaller.tokens_per_s:
        return larger
    return smaller if larger.inter_token_ms * (1 + MIN_GAIN) < smaller.inter_token_ms else None


def fastest(speeds: Sequence[float | None]) -> int | None:
    """Returns the index of the fastest one, or of an earlier one that is about as fast. None: the setting does not
    work."""
    best = max((speed for speed in speeds if speed is not None), default=0.0)
    good = [i for i, speed in enumerate(speeds) if speed is not None and speed * (1 + MIN_DIFFERENCE) >= best]
    return good[0] if good else None


def doublings(most: int) -> list[int]:
    """Returns 1, 2, 4 ... and `most` itself."""
    return [n for n in (1 << i for i in range(most.bit_length())) if n < most] + [most]
