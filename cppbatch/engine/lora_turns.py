"""Turns of LoRA adapters: the adapter set of the next step, since llama.cpp applies one set to a whole batch."""

from __future__ import annotations

from collections.abc import Iterable

from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.sequence import Seq

TURN_STEPS = 4  # steps: a switch makes llama.cpp replan its graph, but other sets should not wait long


class LoraRoundRobin:
    """Adapter sets of running sequences take turns of four steps.

    A new set joins the round after the sets of earlier rank: at the end, unless its requests have a higher priority. So
    a set waits for one turn of each running set. Later sets can only overtake it by priority, and ageing limits for how
    long. A single set always has the turn.
    """

    def __init__(self) -> None:
        self._round: list[AdapterSet] = []  # the set with the turn, the next one ...
        self._now: AdapterSet = ()
        self._steps = 0  # of the current turn

    def order(self, running: Iterable[Seq]) -> list[AdapterSet]:
        """The sets of these sequences, in the order in which they may compute.

        `running`: in order of rank. The first set has the turn; the next one computes if the first has no work in this
        step, and so on.
        """
        best: dict[AdapterSet, tuple[float, int]] = {}
        for sequence in running:
            best.setdefault(sequence.adapters, sequence.rank)
        self._round = [its for its in self._round if its in best]
        start = int(self._steps > 0)  # a turn in progress is not cut short
        for its, rank in best.items():
            if its not in self._round:
                behind = (i for i, other in enumerate(self._round) if i >= start and best[other] > rank)
                self._round.insert(next(behind, len(self._round)), its)
        return self._round.copy()

    def take(self, adapters: AdapterSet) -> bool:
        """Selects the set for the next step. Returns whether that is a switch from another set."""
        is_switch = adapters != self._now
        if is_switch or adapters != self._round[0]:
            self._round.remove(adapters)
            self._round.insert(0, adapters)
            self._now, self._steps = adapters, 0
        self._steps += 1
        if self._steps >= TURN_STEPS:
            self._round.append(self._round.pop(0))
            self._steps = 0
        return is_switch
