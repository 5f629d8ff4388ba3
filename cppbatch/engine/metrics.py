"""Counters and times of an engine: `Metrics` counts, `EngineStats` is the result."""

from __future__ import annotations

from collections import Counter, deque
from time import perf_counter
from typing import Any

import msgspec

from cppbatch.engine.histogram import ROWS, SECONDS, Bins, Histogram, merged
from cppbatch.engine.ideal import BareCosts, StepWork, TimeSplit
from cppbatch.engine.kv_pool import KVPool
from cppbatch.engine.media_input import MediaInput
from cppbatch.engine.prefix_cache import DiskCounts
from cppbatch.engine.request import FinishReason
from cppbatch.engine.rolling_window import SPAN, Window, percentile
from cppbatch.engine.trace import Trace

_OUTPUT_PHASES = ("text", "emit")
PHASES = ("schedule", "fill", "decode", "sample", "advance", *_OUTPUT_PHASES)
"""The phases of a step: planning; filling the batch; `llama_decode`, until the device is done; rows to tokens;
accounting and finished sequences; tokens to text; sending events. The last two may overlap with the next step
(`StepLoop`)."""
_MAX_STEPS = 16_384  # kept for `RecentSteps`; with more than 273 steps a second they are less than a minute


class RecentSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of the last minute. Percentiles and `of_ideal` are None without steps, and for several engines
    together."""

    seconds: float
    """The time that these steps cover: a minute, or less."""
    steps: int
    tokens_per_second: float
    """Generated tokens."""
    batch_size_p50: float | None = None
    """Decode rows of a step, over the steps that had any."""
    batch_size_p95: float | None = None
    step_ms_p50: float | None = None
    step_ms_p95: float | None = None
    wait_ms_p50: float | None = None
    """From a request's arrival until it is admitted, over the requests admitted in this time."""
    wait_ms_p95: float | None = None
    wait_ms_p99: float | None = None
    of_ideal: float | None = None
    """`ideal_seconds` divided by the busy time, 0 to 1: how close to the best that this device can do."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and the state now."""

    steps: int
    decode_steps: int
    """Steps in which at least one sequence was decoding."""
    decode_rows: int
    """Decoding sequences, summed over those steps."""
    mean_decode_batch: float
    """decode_rows / decode_steps."""
    prompt_tokens: int
    """Prompt tokens computed."""
    generated_tokens: int
    forced_tokens: int
    """Those of them that a grammar forced, without a decode for each."""
    draft_steps: int
    """Steps that verified drafts."""
    drafted_tokens: int
    """Draft tokens that were verified."""
    accepted_tokens: int
    """Those of them that were accepted; they are among the generated tokens."""
    finished: dict[str, int]
    """Finished requests by finish reason."""
    running: int
    waiting: int
    kv_layout: str
    """The present layout, unified or per-sequence; of several engines, all that they have."""
    layout_switches: int
    """Number of layout switches (`--kv-layout auto`)."""
    context_shifts: int
    """Number of context shifts (--context-shift)."""
    media_encoded: int = 0
    """Encoded images and audio clips."""
    media_found: int = 0
    """Images and audio clips whose encoding was cached."""
    media_seconds: float = 0.0
    """Time in the image and audio encoder, in parallel to the steps."""
    kv_cells: int
    kv_cells_used: int
    """Cells of running sequences; shared ones count once."""
    kv_cells_cached: int
    """Cells of cached prefixes, which are freed when cells are needed."""
    prefixes_in_cells: int
    """Cached prefixes in cells; each holds a seq_id."""
    prefixes_in_host: int
    """Cached prefixes that had to leave their cells for host memory."""
    checkpoints: int
    """Checkpoints of windows and recurrent states in host memory (docs/decisions/0044)."""
    prefix_queries: int
    """Requests that looked for a prefix in the prefix cache."""
    prefix_hits: int
    prefix_hit_tokens: int
    """Prompt tokens taken from the prefix cache instead of being computed."""
    prefix_cache_bytes: int
    """Host memory of cached prefixes and checkpoints."""
    prefixes_on_disk: int
    """Cached prefixes on disk that this engine can take; engines may share them."""
    prefix_disk_hits: int
    """Requests for which a prefix was read from disk."""
    prefix_disk_hit_tokens: int
    """Prompt tokens that these could take from there."""
    prefix_disk_read_bytes: int
    prefix_disk_written_bytes: int
    prefix_disk_damaged: int
    """Damaged files of prefixes, which were deleted; the prompts were computed."""
    swaps: int
    """Preempted sequences that were saved to host memory."""
    recomputes: int
    """Sequences that must be computed again: preempted and not saved, or not restored."""
    swapped_bytes: int
    """Host memory of the sequences that are swapped out now."""
    seq_ids: int
    seq_ids_free: int
    """seq_ids that neither a running sequence nor a cached prefix holds."""
    step_seconds: dict[str, float]
    """Time of all steps, split into `PHASES`."""
    ideal_seconds: float
    """What the computed work costs at best, as learned from the steps (`cppbatch.engine.ideal`)."""
    lost_seconds: dict[str, float]
    """Where the rest of the time went, by `LOST`. Together with `ideal_seconds`: the time up to the last step."""
    batch_sizes: Histogram
    """Decode rows of each step that had any."""
    step_times: Histogram
    """Seconds of each step that computed something."""
    decode_times: Histogram
    """Seconds of `llama_decode` in each of these steps."""
    sample_times: Histogram
    """Seconds of sampling in each step that had decode rows."""
    recent_steps: RecentSteps


class Metrics:
    """Counts steps, tokens and time. Cheap: about 6 microseconds a step."""

    def __init__(self, trace: Trace | None = None) -> None:
        self._trace = trace
        self.steps = self.decode_steps = self.decode_rows = 0
        self.prompt_tokens = self.generated_tokens = self.forced_tokens = 0
        self.draft_steps = self.drafted_tokens = self.accepted_tokens = 0
        self.layout_switches = self.context_shifts = 0
        self.finished: Counter[FinishReason] = Counter()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.batch_sizes = Bins(ROWS)
        self.step_times, self.decode_times, self.sample_times = Bins(SECONDS), Bins(SECONDS), Bins(SECONDS)
        self._recent: Window[tuple[float, float, float]] = Window(_MAX_STEPS)
        self._waits: Window[float] = Window(_MAX_STEPS)
        self.split = TimeSplit()
        self._recent_split: deque[tuple[float, float, float]] = deque()  # (time, ideal, busy) of `split`, once a second
        self._laps = dict.fromkeys(PHASES, 0.0)  # of this step
        self._began = self._mark = 0.0
        self._idle_until = self._ended = perf_counter()  # the last request of an idle engine; the last computed step
        self._rows = self._tokens_before = self._drafted_before = self._accepted_before = 0

    def begin_step(self) -> None:
        """Starts the time of a step."""
        self._began = self._mark = perf_counter()

    def lap(self, phase: str, **about: Any) -> None:
        """Adds the time since the last call to a phase. `about`: shown in a trace."""
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
        """A request has come to an engine without work."""
        self._idle_until = arrived_at

    def count_wait(self, seconds: float) -> None:
        """Counts an admitted request that waited for this time."""
        self._waits.add(1000 * seconds)

    def count_step(self, *, decode_rows: int, prompt_tokens: int) -> None:
        """Counts a computed step."""
        self.steps += 1
        self.prompt_tokens += prompt_tokens
        self._rows = decode_rows
        if decode_rows:
            self.decode_steps += 1
            self.decode_rows += decode_rows

    def end_step(self, work: StepWork, costs: BareCosts) -> None:
        """Adds the last phase of a computed step, and the step as a whole. `costs`: what steps cost at best."""
        laps, pause_s = self._laps, self._began - self._ended
        waiting_s = min(pause_s, max(0.0, self._idle_until - self._ended))
        if self._trace:
            self.lap("advance", **_about(work, waiting_s))
        else:
            self.lap("advance")
        self._ended = self._mark
        engine_s = laps["schedule"] + laps["fill"] + laps["advance"]
        self.split.add_pause(pause_s - waiting_s, waiting_s)
        self.split.add_step(work, costs, laps["decode"], laps["sample"], engine_s)
        if not self._recent_split or self._mark - self._recent_split[-1][0] >= 1:
            self._remember_split()
        took, tokens = self._mark - self._began, self.generated_tokens - self._tokens_before
        self._tokens_before = self.generated_tokens
        self.step_times.add(took)
        self.decode_times.add(self._laps["decode"])
        if self._rows:
            self.batch_sizes.add(self._rows)
            self.sample_times.add(self._laps["sample"])
        self._recent.add((self._rows, took, tokens))
        if self._trace and self.drafted_tokens:
            drafted, accepted = self.drafted_tokens - self._drafted_before, self.accepted_tokens - self._accepted_before
            self._drafted_before, self._accepted_before = self.drafted_tokens, self.accepted_tokens
            self._trace.count(self._mark, drafted=drafted, accepted=accepted)

    def _remember_split(self) -> None:
        split, recent = self.split, self._recent_split
        recent.append((self._mark, split.ideal, split.busy))
        while len(recent) > 1 and recent[1][0] <= self._mark - SPAN:
            recent.popleft()

    def of_ideal(self) -> float | None:
        """The ideal part of the time with work of about the last minute; None: there was none."""
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

    def stats(self, kv: KVPool, *, running: int, waiting: int, media: MediaInput | None = None) -> EngineStats:
        """The counters, with the present state of the pool and the queues."""
        disk = kv.cache.disk.counts if kv.cache.disk else DiskCounts()
        return EngineStats(
            steps=self.steps,
            decode_steps=self.decode_steps,
            decode_rows=self.decode_rows,
            mean_decode_batch=self.decode_rows / self.decode_steps if self.decode_steps else 0.0,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            forced_tokens=self.forced_tokens,
            draft_steps=self.draft_steps,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            finished={reason.value: n for reason, n in self.finished.items()},
            running=running,
            waiting=waiting,
            kv_layout=kv.layout,
            layout_switches=self.layout_switches,
            context_shifts=self.context_shifts,
            media_encoded=media.n_encoded if media else 0,
            media_found=media.n_found if media else 0,
            media_seconds=media.seconds if media else 0.0,
            kv_cells=kv.n_ctx,
            kv_cells_used=kv.n_used,
            kv_cells_cached=kv.n_cached,
            prefixes_in_cells=len(kv.cache.in_cells),
            prefixes_in_host=len(kv.cache.in_host),
            checkpoints=len(kv.cache.checkpoints),
            prefix_queries=kv.cache.queries,
            prefix_hits=kv.cache.hits,
            prefix_hit_tokens=kv.cache.hit_tokens,
            prefix_cache_bytes=kv.cache.used_host_bytes,
            prefixes_on_disk=disk.entries,
            prefix_disk_hits=disk.hits,
            prefix_disk_hit_tokens=disk.hit_tokens,
            prefix_disk_read_bytes=disk.read_bytes,
            prefix_disk_written_bytes=disk.written_bytes,
            prefix_disk_damaged=disk.damaged,
            swaps=kv.n_swaps,
            recomputes=kv.n_recomputes,
            swapped_bytes=kv.swapped_bytes,
            seq_ids=kv.n_seq_ids,
            seq_ids_free=kv.n_free_ids,
            step_seconds=dict(self.seconds),
            ideal_seconds=self.split.ideal,
            lost_seconds=dict(self.split.lost),
            batch_sizes=self.batch_sizes.histogram(),
            step_times=self.step_times.histogram(),
            decode_times=self.decode_times.histogram(),
            sample_times=self.sample_times.histogram(),
            recent_steps=self._recent_steps(),
        )

    def _recent_steps(self) -> RecentSteps:
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


def _about(work: StepWork, waiting_s: float) -> dict[str, Any]:
    """A step in a trace: `StepWork`, and the microseconds before it without work."""
    return {**work._asdict(), "groups": list(work.groups), "waited": round(1e6 * waiting_s)}


def add_up(stats: list[EngineStats]) -> EngineStats:
    """The stats of several engines (at least one) as one.

    Counters are added, and means are computed from the sums. Percentiles cannot be added and are None.
    """
    if len(stats) == 1:
        return stats[0]
    total = {name: _sum([getattr(each, name) for each in stats]) for name in EngineStats.__struct_fields__}
    total["mean_decode_batch"] = total["decode_rows"] / total["decode_steps"] if total["decode_steps"] else 0.0
    total["prefixes_on_disk"] = max(each.prefixes_on_disk for each in stats)  # mostly the same ones
    return EngineStats(**total)


def _sum(values: list[Any]) -> Any:
    if isinstance(values[0], Histogram):
        return merged(values)
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
