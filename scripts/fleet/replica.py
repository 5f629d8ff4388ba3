"""One replica in virtual time: a real `Scheduler` over a real `KVPool`, and no llama.cpp."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from cppbatch.engine.kv.pool import KVPool
from cppbatch.engine.scheduler import Scheduler
from cppbatch.engine.sequence import Seq
from cppbatch.engine.step_budget import StepBudgets
from cppbatch.engine.step_plan import StepPlan
from cppbatch.engine.step_shape import step_shape
from fleet.conversations import SimulatedRequest
from fleet.step_times import StepTimes

_RESTORE = 0.6  # the time to restore a state, as a part of that to save it (engine/kv/save_cost.py)


class SimulatedState:
    """A sequence in host memory."""

    __slots__ = ("n", "n_bytes")
    data: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def __init__(self, n: int, n_bytes: int) -> None:
        self.n = n
        self.n_bytes = n_bytes


class SimulatedMemory:
    """The cells of each seq_id, and the time to move them: the part of `KVPool`'s `Memory` that streams use, which can
    be truncated anywhere and share no cells."""

    kv_unified = False
    has_streams = True
    attention_tile = 64  # as of FP16 KV cells with flash attention
    can_shift = False
    shares_cells = has_states = False
    n_window = 0

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self.n_seq_max = self.n_seq_ids = times.n_parallel
        self.n_ctx_seq = times.stream_cells
        self.n_ctx = times.stream_cells * times.n_parallel
        self.n_cells = [0] * self.n_seq_ids
        self.spent_s = 0.0
        """The time of all moves so far."""

    def remove(self, seq_id: int, start: int = 0, stop: int = -1) -> bool:
        self.n_cells[seq_id] = min(self.n_cells[seq_id], start)
        return True

    def cut(self, seq_id: int, n: int) -> None:
        self.remove(seq_id, n)

    def remove_padding(self, seq_id: int, position: int) -> None:
        pass

    def copy(self, source: int, target: int, start: int = 0, stop: int = -1) -> None:
        self.n_cells[target] = self.n_cells[source] if stop < 0 else stop
        self.spent_s += self.n_cells[target] * self._times.copy_us / 1e6

    def save_sequence(self, seq_id: int) -> SimulatedState:
        n = self.n_cells[seq_id]
        self.spent_s += n * self._times.save_us / 1e6
        return SimulatedState(n, n * self._times.cell_bytes)

    def restore_sequence(self, seq_id: int, state: SimulatedState) -> None:
        self.n_cells[seq_id] = state.n
        self.spent_s += state.n * _RESTORE * self._times.save_us / 1e6

    def last_position(self, seq_id: int) -> int:
        return self.n_cells[seq_id] - 1

    def first_cut(self, seq_id: int) -> int:
        return 0


class SimulatedReplica:
    """An engine without a model: each request gets the tokens that it comes with.

    `begin` plans a step and returns its duration; the caller calls `end` when that has passed. Requests may be added at
    any time, and take part from the next step on.
    """

    def __init__(self, times: StepTimes, *, cache_bytes: int) -> None:
        self.times = times
        self.memory = SimulatedMemory(times)
        budgets = StepBudgets(times.n_batch, max_alone=times.n_ubatch, unified=self.memory.kv_unified)
        self.kv = KVPool(
            cast(Any, self.memory),
            "copy",
            swap_bytes=cache_bytes,
            cache_bytes=cache_bytes,
            on_gpu=times.on_gpu,
            token_s=budgets.prompt_token_s,
            clock=lambda: self.memory.spent_s,
        )
        shape = step_shape(
            self.kv, on_gpu=times.on_gpu, may_pad=True, step_tokens=times.n_batch, ubatch_tokens=times.n_ubatch
        )
        self.scheduler = Scheduler(self.kv, budgets=budgets, shape=shape, n_parallel=times.n_parallel)
        self.n_requests = 0
        """Unfinished."""
        self.busy_s = 0.0
        self.n_steps = 0
        self._requests: dict[Seq, SimulatedRequest] = {}
        self._plan: StepPlan | None = None
        self._charged_s = 0.0

    @property
    def is_computing(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._plan is not None

    def add(self, request: SimulatedRequest, now: float) -> None:
        """Queues a request."""
        sequence = Seq(request.request, request.prompt, max_new=len(request.output), seed=0, now=now)
        self._requests[sequence] = request
        self.n_requests += 1
        self.scheduler.add(sequence)

    def begin(self, now: float) -> float | None:
        """Plans a step, and returns the seconds that it takes; None if there is nothing to compute."""
        if not self.scheduler.has_work:
            return None
        plan = self._plan = self.scheduler.plan()
        for sequence in plan.admitted:
            sequence.admitted_at = sequence.admitted_at or now
        self.kv.apply()
        seconds = 0.0
        if plan.scheduled:  # else the step only moves cells
            seconds = self.times.seconds(plan)
            self.scheduler.computed(plan, seconds)
        seconds += self.memory.spent_s - self._charged_s
        self._charged_s = self.memory.spent_s
        self.busy_s += seconds
        self.n_steps += 1
        return seconds

    def end(self, now: float) -> list[SimulatedRequest]:
        """The step is computed: every output row gets its token. Returns the requests that have ended."""
        plan, self._plan = self._plan, None
        assert plan is not None
        self.kv.remove_padding(plan.padding)
        outputs = plan.outputs()
        n_cells = self.memory.n_cells
        for sequence, n in plan.scheduled:
            self.kv.computed(sequence, n)
            n_cells[sequence.seq_id] = sequence.n_computed
        ended = []
        for sequence in outputs:
            request = self._requests[sequence]
            if not request.n_generated:
                request.first_token_at, request.n_cached = now, sequence.n_cached
                request.admitted_at = sequence.admitted_at
            sequence.append(request.output[request.n_generated])
            request.n_generated += 1
            if request.n_generated == sequence.max_new:
                ended.append(self._finish(sequence, now))
        return ended

    def _finish(self, sequence: Seq, now: float) -> SimulatedRequest:
        self.scheduler.remove(sequence)
        self.kv.release(sequence, keep=True)
        sequence.finished()
        request = self._requests.pop(sequence)
        request.finished_at = now
        self.n_requests -= 1
        return request
