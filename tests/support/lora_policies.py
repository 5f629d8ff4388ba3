"""Schedulers and adapters of the tests about LoRA round robin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cppbatch import GenerationRequest
from cppbatch.engine.kv.pool import KVPool
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.scheduler import Scheduler
from cppbatch.engine.sequence import Seq
from cppbatch.engine.step_budget import StepBudgets
from cppbatch.engine.step_plan import StepPlan
from cppbatch.engine.step_shape import StepShape
from tests.support.fakes import FakeContext

NONE: AdapterSet = ()
X, Y, Z = (((i, 1.0),) for i in range(3))


def sequence(adapters: AdapterSet, n_prompt: int = 1, max_new: int = 100, now: float = 0.0, **options: Any) -> Seq:
    request = GenerationRequest(id="", prompt=[], **options)
    prompt = np.zeros(n_prompt, np.int32)
    return Seq(request, prompt, max_new=max_new, seed=0, now=now, adapters=adapters)


class Policy:
    """A scheduler over a pool, with no engine: `step` plans, and computes by only counting."""

    def __init__(self, *, n_ctx: int = 256, n_parallel: int = 4, unified: bool = True) -> None:
        self.memory = FakeContext(n_ctx=n_ctx, n_batch=16, n_seq_max=n_parallel, kv_unified=unified, sharing="none")
        self.kv = KVPool(self.memory, "none", swap_bytes=1 << 30, cache_bytes=0)
        shape = StepShape(self.kv, step_tokens=16)
        self.scheduler = Scheduler(self.kv, budgets=StepBudgets(16), shape=shape, n_parallel=n_parallel)

    def add(self, adapters: AdapterSet, n_prompt: int = 1, max_new: int = 100, **options: Any) -> Seq:
        new = sequence(adapters, n_prompt, max_new, **options)
        self.scheduler.add(new)
        return new

    def step(self, cost: Callable[[StepPlan], float] = lambda plan: 0.01) -> StepPlan:
        plan = self.scheduler.plan()
        self.kv.apply()
        self.kv.check()
        outputs = plan.outputs()
        assert {its.adapters for its, _ in plan.scheduled} <= {plan.adapters}, "a step mixes adapters"
        for its, n in plan.scheduled:
            self.memory.add_text(its.seq_id, n)
            self.kv.computed(its, n)
        if plan.scheduled:
            self.scheduler.computed(plan, cost(plan))
        for its in outputs:
            its.append(0)
            if its.n_generated == its.max_new:
                self.scheduler.remove(its)
                self.kv.release(its, keep=False)
                its.finished()
        return plan

    def turns(self, n_steps: int) -> list[AdapterSet]:
        """The set of each step."""
        return [self.step().adapters for _ in range(n_steps)]
