"""Whose step it is while requests with different LoRA adapters run: llama.cpp applies one set to a whole batch."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy

from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.sequence import Seq
from cppbatch.engine.step_budget import StepBudget

_TURN = 4  # steps: a switch makes llama.cpp plan its graph anew, and who waits should not wait long
_MOST_BUDGETS = 64  # sets whose step times are remembered


class LoraRoundRobin:
    """Goes round the sets of those that run, each for a few steps at a time.

    A new one joins the round behind those that rank before it: at its end, but for priority. So a set waits for as many
    turns as other sets run; of those that come later, only for such as rank before it, which they cease to do as its
    rank ages. When one set runs alone, it is always its turn.
    """

    def __init__(self, budget: StepBudget) -> None:
        self._round: list[AdapterSet] = []  # whose turn it is, who has the next one ...
        self._now: AdapterSet = ()
        self._steps = 0  # of its turn
        self._last_budget = budget
        self._budgets: dict[AdapterSet, StepBudget] = {}

    def order(self, running: Iterable[Seq]) -> list[AdapterSet]:
        """The sets of these sequences, which are in order of rank: whose turn it is first, in case it can compute
        nothing in this step the next one, and so on."""
        best: dict[AdapterSet, tuple[float, int]] = {}
        for sequence in running:
            best.setdefault(sequence.adapters, sequence.rank)
        self._round = [its for its in self._round if its in best]
        start = int(self._steps > 0)  # nobody cuts a turn short
        for its, rank in best.items():
            if its not in self._round:
                behind = (i for i, other in enumerate(self._round) if i >= start and best[other] > rank)
                self._round.insert(next(behind, len(self._round)), its)
        return self._round.copy()

    def take(self, adapters: AdapterSet) -> bool:
        """The next step is this set's. Whether that is a switch."""
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
        """What is known of the times of a set's steps; of a new one's, what is of the last step's."""
        budget = self._budgets.get(adapters)
        if budget is None or not budget.knows_decoding:
            budget = self._budgets[adapters] = deepcopy(self._last_budget)
            if len(self._budgets) > _MOST_BUDGETS:
                del self._budgets[next(iter(self._budgets))]
        return budget

    def computed(self, adapters: AdapterSet, n_decode: int, n_prefill: int, seconds: float) -> None:
        """Takes note of how long a step of a set took that was not the first after a switch."""
        self._last_budget = self.budget(adapters)
        self._last_budget.observe(n_decode, n_prefill, seconds)
