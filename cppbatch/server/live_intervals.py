"""What workers did between two of their live states: rates, batch size, phases, drafts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cppbatch.cluster.engine_client import WorkerLive
from cppbatch.engine.live_state import LiveEngine
from cppbatch.server.live import LiveInterval, LiveWorker


class LiveIntervals:
    """Remembers the last state of each worker, and what it did before that."""

    def __init__(self) -> None:
        self._last: dict[str, LiveWorker] = {}

    def add(self, workers: Sequence[WorkerLive]) -> list[LiveWorker]:
        """The workers with their last intervals. A worker that has no new state and no request did nothing."""
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
