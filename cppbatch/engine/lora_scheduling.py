"""Which LoRA adapter set computes in the next step: llama.cpp applies one set to a whole batch."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy

from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.sequence import Seq
from cppbatch.engine.step_budget import StepBudget
from cppbatch.engine.step_cost import Groups, StepCost

_TURN = 4  # steps: a switch makes llama.cpp plan its graph again, but other sets should not wait long
_MAX_BUDGETS = 64  # adapter sets whose step times are remembered


class LoraRoundRobin:
    """Adapter sets of running sequences take turns of four steps.

    A new set joins the round behind the sets that rank before it, which is its end unless its requests have a higher
    priority. So a set waits for one turn of each set that runs. Later sets can overtake it only by priority, and ageing
    bounds for how long. A set that runs alone always has the turn.
    """

    def __init__(self, budget: StepBudget) -> None:
        self._round: list[AdapterSet] = []  # the set that has the turn, the next one ...
        self._now: AdapterSet = ()
        self._steps = 0  # of the present turn
        self._last_budget = budget
        self._budgets: dict[AdapterSet, StepBudget] = {}

    def order(self, running: Iterable[Seq]) -> list[AdapterSet]:
        """The sets of these sequences, in the order in which they may compute.

        `running`: in order of rank. The first set has the turn; the next one computes if the first has nothing to
        compute in this step, and so on.
        """
        best: dict[AdapterSet, tuple[float, int]] = {}
        for sequence in running:
            best.setdefault(sequence.adapters, sequence.rank)
        self._round = [its for its in self._round if its in best]
        start = int(self._steps > 0)  # a turn that has begun is not cut short
        for its, rank in best.items():
            if its not in self._round:
                behind = (i for i, other in enumerate(self._round) if i >= start and best[other] > rank)
                self._round.insert(next(behind, len(self._round)), its)
        return self._round.copy()

    def take(self, adapters: AdapterSet) -> bool:
        """The next step computes this set. Returns whether that is a switch from another set."""
        is_switch = adapters != self._now
        if is_switch or adapters != self._round[0]:
            self._round.remove(adapters)
            self._round.insert(0, adapters)
            self._now, self._steps = adapters, 0
        self._steps += 1
        if self._steps >= _TURN:
            self._round.append(self._round.pop(0))
            self._steps = 0
        return is_switch

    def budget(self, adapters: AdapterSet) -> StepBudget:
        """The step times of a set; a new set starts with those of the set that computed last."""
        budget = self._budgets.get(adapters)
        if budget is None or not budget.cost.knows_rows:
            budget = self._budgets[adapters] = deepcopy(self._last_budget)
            if len(self._budgets) > _MAX_BUDGETS:
                del self._budgets[next(iter(self._budgets))]
        return budget

    @property
    def last_cost(self) -> StepCost:
        """The step times of the set that computed last."""
        return self._last_budget.cost

    def computed(
        self, adapters: AdapterSet, groups: Groups, n_prefill: int, seconds: float, decode_s: float | None = None
    ) -> None:
        """Learns from the duration of a step (`StepBudget.observe`), which must not be the first one after a switch."""
        self._last_budget = self.budget(adapters)
        self._last_budget.observe(groups, n_prefill, seconds, decode_s)
