"""Goes round the settings, one at a time, and keeps the best of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import Any

import msgspec
import psutil
from msgspec.structs import replace

from cppbatch.bench.memory.memory_demand import free_host_memory, memory_demands
from cppbatch.bench.memory.memory_estimate import MemoryEstimate, estimate_memory
from cppbatch.bench.profile import TunedSettings
from cppbatch.bench.tune.measurement import Measurement, MeasurementTask, measure_in_child
from cppbatch.bench.tune.search import Speed, doublings, fastest, is_worth_it, knee, largest_fitting
from cppbatch.config import EngineConfig, available_threads
from cppbatch.errors import ConfigError, EstimateFailed, ModelError

_SECONDS = 1.0
_SHORTEST_POINT_S, _LONGEST_POINT_S = 10.0, 240.0
_TIME_OVER = "the time was over (--max-minutes) before all was measured"
_PARALLEL = 16  # at which threads, layouts and flash attention are compared, if so many fit
_PROMPT = 1024  # tokens, by which -ub is chosen
_UBATCHES = (512, 256, 128, 1024)  # the default first: others must be faster

Measure = Callable[[MeasurementTask, float], Measurement]
Say = Callable[[str], None]


class TuningResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and what comes of it."""

    config: EngineConfig
    """With the settings that were found."""
    speed: Speed
    prompt_tokens_per_s: float | None
    points: list[dict[str, Any]]
    """In the order of measuring: what varied, the setting, the speeds."""
    curve: list[Speed]
    """By parallelism, with all other settings chosen."""
    most_parallel: int
    """That memory has room for, or as many as were asked for."""
    notes: list[str]

    def settings(self) -> TunedSettings:
        """For a profile."""
        return TunedSettings(**{name: getattr(self.config, name) for name in TunedSettings.__struct_fields__})

    def figures(self) -> dict[str, float]:
        """What these settings reach, rounded for a reader."""
        figures = {"tokens_per_s": self.speed.tokens_per_s, "inter_token_ms": self.speed.inter_token_ms}
        if self.prompt_tokens_per_s:
            figures["prompt_tokens_per_s"] = self.prompt_tokens_per_s
        return {name: round(value, 2) for name, value in figures.items()}


class Tuner:
    """Measures with `measure`, until the time is over."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        given: Collection[str] = (),
        most_parallel: int,
        target_ms: float | None = None,
        seconds: float,
        measure: Measure = measure_in_child,
        say: Say = lambda line: None,
    ) -> None:
        """`given`: settings that are decided.

        Unless n_ctx is, it grows with the parallelism, so that each sequence has n_ctx / n_parallel cells as before; it
        is never lowered, since that could be too little for the longest text.
        """
        self._config = replace(config, prefix_cache=False)  # prompts are not to be found there
        self._given = set(given)
        self._cells = config.n_ctx // config.n_parallel
        self._asked = min(most_parallel, config.n_batch, config.n_ctx if "n_ctx" in self._given else most_parallel)
        self._n_ctx_train = 0
        self._target_ms = target_ms
        self._measure, self._say = measure, say
        self._start = monotonic()
        self._end = self._start + seconds
        self._points: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._last_error = ""

    def run(self) -> TuningResult:
        """Raises `ModelError` when nothing works, with the reason."""
        most = self._most_parallel()
        here = self._with_parallel(min(_PARALLEL, most))
        if not {"n_threads"} & self._given:
            here = self._best("threads", here, [{"n_threads": n} for n in _threads(here)])
        here = self._best("layout", here, self._layouts(here, most))
        curve = self._curve(here, most)
        chosen = knee(curve, self._target_ms)
        if self._target_ms and chosen.inter_token_ms > self._target_ms:
            self._notes.append(f"not even one sequence keeps to {self._target_ms:g} ms a token here")
        config = self._with_parallel(chosen.n_parallel, here)
        reading: float | None = None
        if "n_ubatch" not in self._given:
            config, reading = self._ubatch(config)
        return TuningResult(
            config=config,
            speed=chosen,
            prompt_tokens_per_s=reading,
            points=self._points,
            curve=curve,
            most_parallel=most,
            notes=self._notes,
        )

    def _with_parallel(self, n: int, config: EngineConfig | None = None) -> EngineConfig:
        config = config or self._config
        if "n_parallel" in self._given:
            return config
        n_ctx = config.n_ctx if "n_ctx" in self._given else max(self._config.n_ctx, n * self._cells)
        return replace(config, n_parallel=n, n_ctx=n_ctx)

    def _most_parallel(self) -> int:
        """The most sequences that memory has room for: by estimate, and then by trying."""
        sizes = [self._config.n_parallel] if "n_parallel" in self._given else doublings(self._asked)
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
            raise ModelError(f"not even -np {least.n_parallel} -c {least.n_ctx} runs: {errors[sizes[0]]}")
        if found < sizes[-1]:
            self._notes.append(f"memory has room for -np {found} -c {self._with_parallel(found).n_ctx} at most")
        return found

    def _by_estimate(self, sizes: list[int]) -> int:
        self._say("asking llama.cpp what it would allocate")
        try:
            answer = estimate_memory([self._with_parallel(n) for n in sizes])
        except EstimateFailed as error:
            self._notes.append(f"memory was tried out without an estimate: {error}")
            return sizes[-1]
        if answer.footprints[0].error:
            raise ModelError(answer.footprints[0].error)
        self._n_ctx_train = answer.footprints[0].n_ctx_train
        free = free_host_memory()
        fits = [
            all(d.will_fit for d in memory_demands(MemoryEstimate([each], answer.devices), free))
            for each in answer.footprints
        ]
        return max((n for n, ok in zip(sizes, fits, strict=True) if ok), default=sizes[0])

    def _layouts(self, config: EngineConfig, most: int) -> list[dict[str, Any]]:
        """Those that are open, the usual one first.

        Streams of their own only where each holds the longest text that the model knows: speed is not worth refusing
        long ones.
        """
        each = self._with_parallel(most).n_ctx // most
        layouts: list[str] = ["unified", "per-sequence"] if 0 < self._n_ctx_train <= each else ["unified"]
        if "kv_layout" in self._given:
            layouts = [config.kv_layout]
        quantised = config.cache_type_v in ("q8_0", "q4_0")  # they need flash attention
        attention = [config.flash_attn] if "flash_attn" in self._given else ["on"] if quantised else ["on", "off"]
        return [{"kv_layout": layout, "flash_attn": fa} for layout in layouts for fa in attention]

    def _best(self, what: str, config: EngineConfig, choices: list[dict[str, Any]]) -> EngineConfig:
        """`config` with the choice with which all sequences together are fastest."""
        if len(choices) == 1:
            return replace(config, **choices[0])
        speeds = [self._speed(what, replace(config, **choice), choice) for choice in choices]
        return replace(config, **choices[fastest(speeds) or 0])

    def _speed(self, what: str, config: EngineConfig, choice: dict[str, Any]) -> float | None:
        point = self._point(what, " ".join(map(str, choice.values())), config)
        return None if point.error else point.tokens_per_s

    def _curve(self, config: EngineConfig, most: int) -> list[Speed]:
        """Up to the first parallelism that is not worth it, so that the curve shows where it bends.

        That one is measured twice, and the better one counts: something else may have run on the machine.
        """
        sizes = [config.n_parallel] if "n_parallel" in self._given else doublings(most)
        curve: list[Speed] = []
        for n in sizes:
            speed = self._speed_of(n, config)
            if speed and self._ends(curve, speed):
                again = self._speed_of(n, config)
                speed = max(speed, again or speed, key=lambda each: each.tokens_per_s)
            if speed is None:
                break
            curve.append(speed)
            if self._ends(curve[:-1], speed):
                break
        if not curve:
            raise ModelError(f"nothing could be measured: {self._last_error}")
        return curve

    def _ends(self, curve: list[Speed], speed: Speed) -> bool:
        too_slow = self._target_ms is not None and speed.inter_token_ms > self._target_ms
        return too_slow or (bool(curve) and not is_worth_it(curve[-1], speed))

    def _speed_of(self, n: int, config: EngineConfig) -> Speed | None:
        point = self._point("parallel", f"-np {n}", self._with_parallel(n, config))
        return None if point.error else Speed(n, point.tokens_per_s, point.inter_token_ms)

    def _ubatch(self, config: EngineConfig) -> tuple[EngineConfig, float | None]:
        sizes = [n for n in _UBATCHES if n <= config.n_batch] or [config.n_ubatch]
        speeds: list[float | None] = []
        for n in sizes:
            point = self._point("ubatch", f"-ub {n}", replace(config, n_ubatch=n), seconds=0, prompt_tokens=_PROMPT)
            speeds.append(None if point.error else point.prompt_tokens_per_s)
        best = fastest(speeds)
        return (config, None) if best is None else (replace(config, n_ubatch=sizes[best]), speeds[best])

    def _point(
        self, what: str, setting: str, config: EngineConfig, *, seconds: float = _SECONDS, prompt_tokens: int = 0
    ) -> Measurement:
        """Measured, or with an error once the time is over."""
        now = monotonic()
        if now >= self._end:
            if _TIME_OVER not in self._notes:
                self._notes.append(_TIME_OVER)
            self._last_error = "there was no time left; raise --max-minutes"
            return Measurement(error=self._last_error)
        self._say(f"{what}: {setting} ({now - self._start:.0f} of at most {self._end - self._start:.0f} s)")
        task = MeasurementTask(config=config, seconds=seconds, prompt_tokens=prompt_tokens)
        point = self._measure(task, min(_LONGEST_POINT_S, max(_SHORTEST_POINT_S, self._end - now)))
        self._last_error = point.error or self._last_error
        self._points.append({"what": what, "setting": setting, **msgspec.structs.asdict(point)})
        return point


def _threads(config: EngineConfig) -> list[int]:
    """The usual number first."""
    usual = available_threads()
    logical: Sequence[int] = psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else ()
    return list(dict.fromkeys([usual, max(1, usual // 2), max(usual, len(logical))]))


def check_limits(target_ms: float | None, max_minutes: float) -> None:
    """Raises `ConfigError` for what cannot be."""
    if target_ms is not None and not target_ms > 0:
        raise ConfigError(f"--target-latency-ms is {target_ms:g}; it must be more than 0")
    if not max_minutes > 0:
        raise ConfigError(f"--max-minutes is {max_minutes:g}; it must be more than 0")
