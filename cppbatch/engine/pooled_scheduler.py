"""Policy for models that make one vector of a sequence: each is computed whole, in one step, and leaves at once."""

from __future__ import annotations

from cppbatch.engine.scheduler import Scheduler, StepPlan

_LOOKED_AT = 4  # times as many as may run, of those that wait


class PooledScheduler(Scheduler):
    """Fills each step with whole prompts, in order of rank.

    One that does not fit into what is left of a step is passed over. It is in the next one, whose first is whoever
    waits in front, so nobody starves. There is nothing to preempt, swap or share: between two steps nobody has cells.
    """

    def plan(self) -> StepPlan:
        """The next step; see `Scheduler.plan`."""
        plan = StepPlan()
        for sequence in self.waiting[: _LOOKED_AT * self._n_parallel]:
            if len(plan.admitted) == self._n_parallel:
                break
            if plan.n_tokens + sequence.n_tokens <= self._step_tokens:
                self._kv.admit(sequence)
                plan.admitted.append(sequence)
                plan.chunks.append((sequence, sequence.n_tokens))
                plan.n_tokens += sequence.n_tokens
        chosen = set(plan.admitted)
        self.waiting = [sequence for sequence in self.waiting if sequence not in chosen]
        self.running = list(plan.admitted)
        return plan
