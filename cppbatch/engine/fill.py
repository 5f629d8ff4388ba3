"""From a plan to the batch that goes to `llama_decode`."""

from __future__ import annotations

from cppbatch.engine.scheduler import StepPlan
from cppbatch.llama import Batch


def refill(batch: Batch, plan: StepPlan) -> None:
    """Clears the batch and writes the plan's chunks into it, in their order."""
    batch.clear()
    if plan.n_decode == len(plan.chunks):
        sequences = [sequence for sequence, _ in plan.chunks]
        batch.add_rows(
            [s.tokens[s.n_computed] for s in sequences],
            [s.n_computed for s in sequences],
            [s.seq_id for s in sequences],
        )
        return
    for s, n in plan.chunks:
        run = s.tokens[s.n_computed : s.n_computed + n]
        batch.add_run(run, s.n_computed, s.seq_id, n_logits=s.n_logits(n))
