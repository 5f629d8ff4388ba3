"""Counters and times of an engine: `Metrics` collects, `EngineStats` is the result."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sized
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import msgspec

from cppbatch.engine.ideal import BareCosts, StepWork, TimeSplit
from cppbatch.engine.media.input import MediaInput
from cppbatch.engine.observe.trace import Trace
from cppbatch.engine.observe.windows import ROWS, SECONDS, SPAN, Bins, Histogram, Window, merge_histograms, percentile
from cppbatch.statistic import counter, gauge, histogram, statistics_of, value

if TYPE_CHECKING:
    from cppbatch.engine.kv.pool import KVPool
    from cppbatch.engine.scheduler import Scheduler

_OUTPUT_PHASES = ("text", "emit")
PHASES = ("schedule", "fill", "decode", "sample", "advance", *_OUTPUT_PHASES)
"""The phases of a step: planning; filling the batch; `llama_decode`, until the device is done; rows to tokens;
accounting and finished sequences; tokens to text; sending events. The last two may overlap with the next step
(`StepLoop`)."""


class RecentSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of the last minute. Percentiles and `of_ideal` are None without steps, and for several engines
    together."""

    seconds: float
    """The time that these steps cover: a minute, or less."""
    steps: int
    tokens_per_second: float
    """Generated tokens."""
    batch_size_p50: float | None = None
    """Decode rows per step, over steps with decode rows."""
    batch_size_p95: float | None = None
    step_ms_p50: float | None = None
    step_ms_p95: float | None = None
    wait_ms_p50: float | None = None
    """From arrival to admission, over the requests admitted in this time."""
    wait_ms_p95: float | None = None
    wait_ms_p99: float | None = None
    of_ideal: float | None = None
    """`ideal_seconds` divided by the busy time, 0 to 1: how close the engine is to the device's limits."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and the current state."""

    steps: Annotated[int, counter("Computed steps")]
    decode_steps: Annotated[int, counter("Steps with at least one decoding sequence")]
    decode_rows: Annotated[int, value("metrics.decode_rows")]
    """Decoding sequences, summed over those steps."""
    mean_decode_batch: Annotated[float, value("metrics.mean_decode_batch")]
    prompt_tokens: Annotated[int, counter("Prompt tokens computed")]
    generated_tokens: Annotated[int, counter("Tokens generated")]
    forced_tokens: Annotated[int, counter("Generated tokens forced by a grammar, without a decode for each")]
    draft_steps: Annotated[int, counter("Steps that verified drafts (speculative decoding)")]
    drafted_tokens: Annotated[int, counter("Verified draft tokens")]
    accepted_tokens: Annotated[int, counter("Accepted draft tokens")]
    """Included in the generated tokens."""
    finished: Annotated[dict[str, int], value("metrics.finished")]
    """Finished requests by finish reason."""
    running: Annotated[int, gauge("Running requests", "scheduler.running")]
    waiting: Annotated[int, gauge("Waiting requests in the engine's queue", "scheduler.waiting")]
    kv_layout: Annotated[str, gauge("1 for the current KV cache layout", "kv.layout", label="layout")]
    """`unified` or `per-sequence`; for several engines, all of their layouts."""
    layout_switches: Annotated[int, counter("Switches between the unified and the per-sequence KV layout")]
    context_shifts: Annotated[int, counter("Number of context shifts")]
    media_encoded: Annotated[int, counter("Encoded images and audio clips", "media.n_encoded")] = 0
    media_found: Annotated[int, counter("Images and audio clips found in the encoder cache", "media.n_found")] = 0
    media_seconds: Annotated[
        float, counter("Time spent encoding images and audio, in parallel to the steps", "media.seconds")
    ] = 0.0
    kv_cells: Annotated[
        int,
        gauge(
            "KV cells by state. used: held by running sequences; cached: held by cached prefixes",
            "kv.n_ctx",
            label="state",
            shown="kv_cells_by_state",
        ),
    ]
    kv_cells_used: Annotated[int, value("kv.n_used")]
    """Shared cells count once."""
    kv_cells_cached: Annotated[int, value("kv.n_cached")]
    """Freed when cells are needed."""
    prefixes_in_cells: Annotated[int, value("kv.cache.in_cells")]
    """Cached prefixes in cells, each with a seq_id."""
    prefixes_in_host: Annotated[int, value("kv.cache.in_host")]
    """Cached prefixes evicted from cells to host memory."""
    checkpoints: Annotated[int, value("kv.cache.checkpoints")]
    """Checkpoints of windows and recurrent states in host memory (docs/decisions/0044)."""
    prefix_queries: Annotated[int, counter("Prefix cache lookups", "kv.cache.queries")]
    prefix_hits: Annotated[int, counter("Prefix cache hits", "kv.cache.hits")]
    prefix_hit_tokens: Annotated[int, counter("Prompt tokens taken from the prefix cache", "kv.cache.hit_tokens")]
    prefix_cache_bytes: Annotated[
        int, gauge("Host memory used by cached prefixes and checkpoints", "kv.cache.used_host_bytes")
    ]
    prefixes_on_disk: Annotated[
        int,
        gauge("Cached prefixes on disk usable by the worker (--prefix-cache-disk)", "kv.cache.tier.counts.entries"),
    ]
    """Engines may share them."""
    prefix_disk_hits: Annotated[int, counter("Prefix cache hits on disk", "kv.cache.tier.counts.hits")]
    prefix_disk_hit_tokens: Annotated[
        int, counter("Prompt tokens taken from prefixes on disk", "kv.cache.tier.counts.hit_tokens")
    ]
    prefix_disk_read_bytes: Annotated[
        int, counter("Bytes of cached prefixes read from disk", "kv.cache.tier.counts.read_bytes")
    ]
    prefix_disk_written_bytes: Annotated[
        int, counter("Bytes of cached prefixes written to disk", "kv.cache.tier.counts.written_bytes")
    ]
    prefix_disk_damaged: Annotated[
        int, counter("Damaged cached prefix files that were deleted", "kv.cache.tier.counts.damaged")
    ]
    swaps: Annotated[int, counter("Sequences swapped out to host memory", "kv.moves.n_swaps")]
    recomputes: Annotated[int, counter("Preempted sequences that were recomputed", "kv.moves.n_recomputes")]
    """Not saved, or could not be restored."""
    swapped_bytes: Annotated[int, gauge("Host memory used by swapped-out sequences", "kv.moves.swapped_bytes")]
    seq_ids: Annotated[int, value("kv.n_seq_ids")]
    seq_ids_free: Annotated[int, gauge("Free sequence ids", "kv.n_free_ids")]
    """Not held by a running sequence or a cached prefix."""
    step_seconds: Annotated[dict[str, float], value("metrics.seconds")]
    """Time of all steps, split into `PHASES`."""
    ideal_seconds: Annotated[
        float, counter("Lowest possible time for the computed work, learned from the steps", "metrics.split.ideal")
    ]
    lost_seconds: Annotated[
        dict[str, float],
        counter(
            "Time lost compared with ideal_seconds, by cause (docs/benchmarks.md)", "metrics.split.lost", label="reason"
        ),
    ]
    """By `LOST`. Together with `ideal_seconds`: the time up to the last step."""
    batch_sizes: Annotated[
        Histogram, histogram("Decoding sequences per step, for steps with at least one", name="batch_size")
    ]
    step_times: Annotated[Histogram, histogram("Duration of a step", name="step_seconds")]
    """Over steps with work."""
    decode_times: Annotated[Histogram, histogram("Duration of llama_decode in a step", name="decode_seconds")]
    sample_times: Annotated[Histogram, histogram("Duration of sampling in a step", name="sample_seconds")]
    """Over steps with decode rows."""
    recent_steps: Annotated[RecentSteps, value("metrics.recent_steps")]

    @property
    def kv_cells_by_state(self) -> dict[str, int]:
        """The cells by state, for `GET /metrics`."""
        used, cached = self.kv_cells_used, self.kv_cells_cached
        return {"used": used, "cached": cached, "free": self.kv_cells - used - cached}


class Metrics:
    """Counts steps, tokens and time, in a few microseconds per step."""

    def __init__(self, costs: Callable[[], BareCosts], trace: Trace | None = None) -> None:
        """`costs`: returns the minimum costs of steps."""
        self._costs = costs
        self._trace = trace
        self.steps = self.decode_steps = self.decode_rows = 0
        self.prompt_tokens = self.generated_tokens = self.forced_tokens = 0
        self.draft_steps = self.drafted_tokens = self.accepted_tokens = 0
        self.layout_switches = self.context_shifts = 0
        self.finished: Counter[str] = Counter()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.batch_sizes = Bins(ROWS)
        self.step_times, self.decode_times, self.sample_times = Bins(SECONDS), Bins(SECONDS), Bins(SECONDS)
        self._recent: Window[tuple[float, float, float]] = Window()
        self._waits: Window[float] = Window()
        self._split = TimeSplit()
        self._unsplit: dict[StepWork, list[float]] = {}  # the latest steps, by work: their number, and seconds
        self._recent_split: deque[tuple[float, float, float]] = deque()  # (time, ideal, busy) of `split`, every second
        self._laps = dict.fromkeys(PHASES, 0.0)  # of this step
        self._began = self._mark = 0.0
        self._idle_until = self._ended = perf_counter()  # end of the idle time; end of the last step
        self._rows = self._tokens_before = self._drafted_before = self._accepted_before = 0

    def begin_step(self) -> None:
        """Starts timing a step."""
        self._began = self._mark = perf_counter()

    def lap(self, phase: str, **about: Any) -> None:
        """Adds the time since the last call to a phase. `about`: details for the trace."""
        now = perf_counter()
        self._laps[phase] = now - self._mark
        self.seconds[phase] += now - self._mark
        if self._trace:
            self._trace.phase(phase, self._mark, now, about)
        self._mark = now

    def seconds_per_request(self) -> float:
        """Seconds of steps for each finished request, 1 to 60: an estimate of when the next request ends."""
        seconds = sum(self.seconds[phase] for phase in PHASES if phase not in _OUTPUT_PHASES)  # those overlap
        return min(60.0, max(1.0, seconds / max(1, self.finished.total())))

    def ends_idleness(self, arrived_at: float) -> None:
        """Called when a request arrives at an idle engine."""
        self._idle_until = arrived_at

    def count_wait(self, seconds: float) -> None:
        """Counts an admitted request with its waiting time."""
        self._waits.add(1000 * seconds)

    def count_step(self, *, decode_rows: int, prompt_tokens: int) -> None:
        """Counts a computed step."""
        self.steps += 1
        self.prompt_tokens += prompt_tokens
        self._rows = decode_rows
        if decode_rows:
            self.decode_steps += 1
            self.decode_rows += decode_rows

    def end_step(self, work: StepWork) -> None:
        """Adds the last phase of a computed step, and the step as a whole."""
        laps, pause_s = self._laps, self._began - self._ended
        waiting_s = min(pause_s, self._idle_until - self._ended) if self._idle_until > self._ended else 0.0
        if self._trace:
            self.lap("advance", **_about(work, waiting_s))
        else:
            self.lap("advance")
        now = self._ended = self._mark
        decode_s, sample_s, took = laps["decode"], laps["sample"], now - self._began
        engine_s = laps["schedule"] + laps["fill"] + laps["advance"]
        self._split.add_pause(pause_s - waiting_s, waiting_s)
        total = self._unsplit.setdefault(work, [0, 0.0, 0.0, 0.0])
        total[0] += 1
        total[1] += decode_s
        total[2] += sample_s
        total[3] += engine_s
        if not self._recent_split or now - self._recent_split[-1][0] >= 1:
            self._remember_split()
        tokens, self._tokens_before = self.generated_tokens - self._tokens_before, self.generated_tokens
        self.step_times.add(took)
        self.decode_times.add(decode_s)
        if self._rows:
            self.batch_sizes.add(self._rows)
            self.sample_times.add(sample_s)
        self._recent.add((self._rows, took, tokens))
        if self._trace and self.drafted_tokens:
            drafted, accepted = self.drafted_tokens - self._drafted_before, self.accepted_tokens - self._accepted_before
            self._drafted_before, self._accepted_before = self.drafted_tokens, self.accepted_tokens
            self._trace.count(self._mark, drafted=drafted, accepted=accepted)

    @property
    def split(self) -> TimeSplit:
        """The time of all steps."""
        if self._unsplit:
            costs = self._costs()
            for work, (n, decode_s, sample_s, engine_s) in self._unsplit.items():
                self._split.add_steps(work, costs, decode_s, sample_s, engine_s, n=int(n))
            self._unsplit = {}
        return self._split

    def _remember_split(self) -> None:
        split, recent = self.split, self._recent_split
        recent.append((self._mark, split.ideal, split.busy))
        while len(recent) > 1 and recent[1][0] <= self._mark - SPAN:
            recent.popleft()

    def of_ideal(self) -> float | None:
        """The ideal fraction of the time with work in about the last minute; None: no work."""
        if not (recent := self._recent_split) or recent[-1][0] < perf_counter() - SPAN:
            return None
        _, ideal, busy = recent[0] if len(recent) > 1 else (0.0, 0.0, 0.0)
        split = self.split
        return (split.ideal - ideal) / (split.busy - busy) if split.busy > busy else None

    def count_output(self, began: float, made: float, sent: float) -> None:
        """Adds the time of a step's outputs: text from `began` to `made`, sending events from `made` to `sent`.

        Any one thread may call this.
        """
        for phase, start, end in (("text", began, made), ("emit", made, sent)):
            self.seconds[phase] += end - start
            if self._trace and end > start:
                self._trace.phase(phase, start, end)

    @property
    def mean_decode_batch(self) -> float:
        """Decoding sequences of the last step with any."""
        return _mean(self.decode_rows, self.decode_steps)

    @property
    def recent_steps(self) -> RecentSteps:
        """The steps of the last minute."""
        steps, seconds = self._recent.rows(), self._recent.seconds
        sizes = [rows for rows, _, _ in steps if rows]
        times, waits = [took * 1000 for _, took, _ in steps], self._waits.rows()
        return RecentSteps(
            seconds=seconds,
            steps=len(steps),
            tokens_per_second=sum(tokens for _, _, tokens in steps) / seconds if steps else 0.0,
            batch_size_p50=percentile(sizes, 0.5),
            batch_size_p95=percentile(sizes, 0.95),
            step_ms_p50=percentile(times, 0.5),
            step_ms_p95=percentile(times, 0.95),
            wait_ms_p50=percentile(waits, 0.5),
            wait_ms_p95=percentile(waits, 0.95),
            wait_ms_p99=percentile(waits, 0.99),
            of_ideal=self.of_ideal(),
        )


class EngineParts(NamedTuple):
    """The parts of an engine that provide its statistics."""

    metrics: Metrics
    kv: KVPool
    scheduler: Scheduler
    media: MediaInput | None

    def read(self, fields: Iterable[str]) -> dict[str, Any]:
        """The current values of these fields of `EngineStats`; 0 if a part on the path is None."""
        return {field: self._read(_STATISTICS[field].source or f"metrics.{field}", _TYPES[field]) for field in fields}

    def _read(self, source: str, kind: type) -> Any:
        value: Any = self
        for name in source.split("."):
            value = getattr(value, name)
            if value is None:
                return kind()
        if kind is Histogram:
            return value.histogram()
        if kind is int and isinstance(value, Sized):
            return len(value)
        return dict(value) if isinstance(value, dict) else value

    def stats(self) -> EngineStats:
        """All of them."""
        return EngineStats(**self.read(_STATISTICS))


_STATISTICS, _TYPES = statistics_of(EngineStats), get_type_hints(EngineStats)


def _about(work: StepWork, waiting_s: float) -> dict[str, Any]:
    """A step in a trace: `StepWork`, and the preceding idle time in microseconds."""
    return {**work._asdict(), "groups": list(work.groups), "waited": round(1e6 * waiting_s)}


def add_up(stats: list[EngineStats]) -> EngineStats:
    """The stats of several engines (at least one) as one.

    Counters are added, and means are computed from the sums. Percentiles cannot be combined and are None.
    """
    if len(stats) == 1:
        return stats[0]
    total = {name: _sum([getattr(each, name) for each in stats]) for name in EngineStats.__struct_fields__}
    total["mean_decode_batch"] = _mean(total["decode_rows"], total["decode_steps"])
    total["prefixes_on_disk"] = max(each.prefixes_on_disk for each in stats)  # usually the same ones
    return EngineStats(**total)


def _mean(total: int, n: int) -> float:
    return total / n if n else 0.0


def _sum(values: list[Any]) -> Any:
    if isinstance(values[0], Histogram):
        return merge_histograms(values)
    if isinstance(values[0], str):
        return ", ".join(sorted(set(values)))
    if isinstance(values[0], dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: sum(value.get(name, 0) for value in values) for name in names}
    if isinstance(values[0], RecentSteps):
        return RecentSteps(
            seconds=max(value.seconds for value in values),
            steps=sum(value.steps for value in values),
            tokens_per_second=sum(value.tokens_per_second for value in values),
        )
    return sum(values)
