"""The content of `GET /live`: its types, recent times, rates between two states of the workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from time import perf_counter
from typing import Literal

import msgspec

from cppbatch.cluster.engines.client import Health, ScalingState, WorkerLive
from cppbatch.engine.observe.live_state import LiveEngine
from cppbatch.engine.observe.windows import percentile
from cppbatch.jobs.batches.records import BatchStatus


class RecentTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Recent times in seconds, measured when text is sent to clients."""

    n: int
    """Number of times. 0: the others are None."""
    p50: float | None
    p95: float | None


class LiveInterval(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of a worker between its last two states."""

    seconds: float
    steps: int
    tokens_per_second: float
    """Generated tokens."""
    prompt_tokens_per_second: float
    """Computed prompt tokens."""
    batch_size: float
    """Mean decode rows per step, over steps with decode rows."""
    drafted_tokens: int
    accepted_tokens: int
    phases: dict[str, float]
    """Seconds per phase of the steps: schedule, fill, decode, sample, advance, text, emit. The last two may overlap
    with the next step."""


class LiveWorker(WorkerLive, frozen=True, kw_only=True):
    """A worker or replica, with its recent activity."""

    interval: LiveInterval | None
    """None until there are two states of the same process, and while it is idle."""


class LiveBatch(msgspec.Struct, frozen=True, kw_only=True):
    """An open batch job."""

    id: str
    status: BatchStatus
    total: int
    """Lines; 0 until the whole input has been read."""
    completed: int
    failed: int
    created_at: int
    """Unix time."""


class LiveSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One event of `GET /live`."""

    object: Literal["live"] = "live"
    time: float
    """Unix time."""
    model: str
    health: Health
    draining: bool
    """The server is shutting down."""
    scaling: ScalingState | None
    """Numbers of running, starting and draining workers; None if the number is fixed."""
    batches: list[LiveBatch]
    """The open batch jobs that this key may see."""
    tokens_per_second: float
    """Generated tokens per second, over all workers."""
    prompt_tokens_per_second: float
    first_token_seconds: RecentTimes
    """TTFT, over the last 10 seconds."""
    inter_token_seconds: RecentTimes
    """Inter-token time, over the last second."""
    workers: list[LiveWorker]


# --- live times ------------------------------------------------------------------------------------------------------
# TTFT and inter-token times of the last seconds, for `GET /live`.


_FIRST_TOKEN_S, _INTER_TOKEN_S = 10.0, 1.0


class LiveTimes:
    """Collects times while `GET /live` is read."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._first_token: deque[tuple[float, float]] = deque(maxlen=2048)
        self._inter_token: deque[tuple[float, float]] = deque(maxlen=2048)

    def add_first_token(self, now: float, seconds: float) -> None:
        """Adds a time to first token."""
        self._first_token.append((now, seconds))

    def add_gap(self, now: float, seconds: float, n: int) -> None:
        """Adds `n` times from one token to the next."""
        self._inter_token.extend(repeat((now, seconds), n))

    def first_token(self) -> RecentTimes:
        """The times of the last 10 seconds."""
        return _recent(self._first_token, self._clock() - _FIRST_TOKEN_S)

    def inter_token(self) -> RecentTimes:
        """The times of the last second."""
        return _recent(self._inter_token, self._clock() - _INTER_TOKEN_S)


def _recent(times: deque[tuple[float, float]], since: float) -> RecentTimes:
    while times and times[0][0] < since:
        times.popleft()
    values = [seconds for _, seconds in times]
    p50, p95 = percentile(values, 0.5), percentile(values, 0.95)
    return RecentTimes(n=len(values), p50=p50, p95=p95)


# --- live intervals --------------------------------------------------------------------------------------------------
# Worker activity between two live states: rates, batch size, phases, drafts.


class LiveIntervals:
    """Stores the last state of each worker, and its activity before that."""

    def __init__(self) -> None:
        self._last: dict[str, LiveWorker] = {}

    def add(self, workers: Sequence[WorkerLive]) -> list[LiveWorker]:
        """The workers with their last intervals. A worker without a new state and without requests was idle."""
        shown = [LiveWorker(**msgspec.structs.asdict(each), interval=self._interval(each)) for each in workers]
        self._last = {each.name: each for each in shown}
        return shown

    def _interval(self, worker: WorkerLive) -> LiveInterval | None:
        before, engine = self._last.get(worker.name), worker.engine
        if engine is None or before is None or before.engine is None or before.pid != worker.pid:
            return None
        if engine.clock == before.engine.clock:
            return before.interval if worker.in_flight else None
        return _between(before.engine, engine)


def _between(before: LiveEngine, after: LiveEngine) -> LiveInterval:
    old, new = before.counters, after.counters
    seconds, decode_steps = after.clock - before.clock, new.decode_steps - old.decode_steps
    return LiveInterval(
        seconds=round(seconds, 4),
        steps=new.steps - old.steps,
        tokens_per_second=round((new.generated_tokens - old.generated_tokens) / seconds, 1),
        prompt_tokens_per_second=round((new.prompt_tokens - old.prompt_tokens) / seconds, 1),
        batch_size=round((new.decode_rows - old.decode_rows) / decode_steps, 2) if decode_steps else 0.0,
        drafted_tokens=new.drafted_tokens - old.drafted_tokens,
        accepted_tokens=new.accepted_tokens - old.accepted_tokens,
        phases={phase: round(s - old.step_seconds[phase], 5) for phase, s in new.step_seconds.items()},
    )
