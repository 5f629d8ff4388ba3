"""When an engine with `--kv-layout auto` switches between the layouts of the KV cache."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from cppbatch.config import KvLayout
from cppbatch.engine.radix_tree import Tokens, n_common
from cppbatch.engine.scheduler import StepPlan
from cppbatch.engine.sequence import Seq

_LOOK_EVERY_S = 0.25
_MEMORY_S = 10.0  # busy seconds after which a load counts for a third
_ENOUGH_S = 3.0  # busy seconds of a load before it counts
_CLEARLY = 1.2  # times the cost of the other layout
_WORTH = 0.05  # part of the time that the other layout must save
_PASSES_OF_A_PROMPT = 4  # one for itself, the others because meanwhile its stream lies between those of decode rows
_MIN_WAIT_S = 10.0  # between two switches that nothing forces
_MAX_WAIT_S = 600.0
_WAIT_FACTOR = 50.0  # ... and this many times as long as the last switch took
_ROOM = 0.75  # of a stream: what sequences may have when the engine returns to the per-sequence layout


class LayoutCosts(NamedTuple):
    """What each layout costs that the other one does not, in seconds (docs/decisions/0006)."""

    cell_s: float
    """Unified: a token passes over a cell that is not its own sequence's."""
    repeated_cell_s: float
    """Per-sequence: a step reads a cell that unified would share."""
    pass_s: float
    """Per-sequence: the weights are read once more, for a prompt, or for rows whose streams are not neighbours."""
    n_cached: int
    """Unified: cells of cached prefixes, which all tokens pass over."""


def layout_costs(*, size_bytes: int, n_heads: int, n_cached: int) -> LayoutCosts:
    """Measured with the default model on two cores, scaled by what each depends on (docs/decisions/0006).

    `size_bytes`: of the weights. `n_heads`: attention heads of all layers. `n_cached`: as in `LayoutCosts`.
    """
    cell_s = 0.2e-6 * n_heads / 270
    return LayoutCosts(cell_s, 2 * cell_s, pass_s=0.005 * size_bytes / 92e6, n_cached=n_cached)


class LayoutSwitch(NamedTuple):
    """A switch to make between two steps, and why."""

    layout: KvLayout
    reason: str


class LayoutPolicy:
    """Decides between two steps whether to switch.

    - To unified at once when a sequence outgrows its stream: no request is refused or cut short that unified takes.
    - To unified when that costs clearly less for the load of the last seconds: long shared prefixes, and many short
      prompts with short answers.
    - To the per-sequence layout when that costs clearly less, and no sequence has been long for a while.

    The last two wait after a switch, in proportion to its duration, so that switching costs little of the time. If the
    per-sequence layout lasted no longer than that wait, the next wait is twice as long: long requests that come again
    and again keep the engine unified.
    """

    def __init__(self, stream_cells: int, costs: LayoutCosts, *, shares_cells: bool) -> None:
        """As in `Layouts`."""
        self._stream_cells = stream_cells
        self._costs = costs
        self._shares_cells = shares_cells
        # Of the load, with its past weighted less and less: seconds, and what each layout cost or would have cost.
        self._busy_s = self._unified_s = self._streams_s = 0.0
        # Since the last look:
        self._n_steps = self._n_tokens = self._n_prompts = 0
        self._step_s = 0.0
        self._looked_at = self._switched_at = self._long_at = -math.inf
        self._wait_s = _MIN_WAIT_S

    def wanted(
        self, now: float, layout: KvLayout, running: Sequence[Seq], waiting: Sequence[Seq], blocked: Seq | None
    ) -> LayoutSwitch | None:
        """The switch to make now. `layout`: the present one. `blocked`: a waiting sequence that has no place in a
        stream, when it is its turn."""
        if layout == "per-sequence":
            too_long = blocked or next((s for s in running if s.n_tokens > self._stream_cells), None)
            if too_long:
                self._long_at = now
                return LayoutSwitch(
                    "unified", f"{too_long.id} has {too_long.n_tokens} tokens, a stream {self._stream_cells} cells"
                )
        if now - self._looked_at < _LOOK_EVERY_S:
            return None
        self._looked_at = now
        self._look(running)
        if not all(self._has_room(sequence) for sequence in running):
            self._long_at = now
        if self._busy_s < _ENOUGH_S or now - self._switched_at < self._wait_s:
            return None
        saved = (self._streams_s - self._unified_s) / self._busy_s
        if layout == "per-sequence" and saved >= _WORTH and self._streams_s > _CLEARLY * self._unified_s:
            return LayoutSwitch("unified", f"for the present load it saves about {saved:.0%} of the time")
        is_long = now - self._long_at < self._wait_s or not all(self._has_room(sequence) for sequence in waiting)
        costs_more = saved <= -_WORTH and self._unified_s > _CLEARLY * self._streams_s
        if layout == "unified" and costs_more and not is_long:
            return LayoutSwitch("per-sequence", f"for the present load it saves about {-saved:.0%} of the time")
        return None

    def computed(self, plan: StepPlan, seconds: float) -> None:
        """A step was computed, which took so long."""
        self._n_steps += 1
        self._n_tokens += plan.n_tokens
        if len(plan.chunks) > 1:
            self._n_prompts += sum(sequence.n_generated == 0 for sequence in plan.admitted)
        self._step_s += seconds

    def switched(self, layout: KvLayout, now: float, seconds: float) -> None:
        """The engine has switched, which took so long."""
        if layout == "unified":
            came_soon = now - self._switched_at < self._wait_s
            doubled = min(_MAX_WAIT_S, 2 * self._wait_s) if came_soon else 0.0
            self._wait_s = max(_MIN_WAIT_S, _WAIT_FACTOR * seconds, doubled)
        self._switched_at = now

    def _has_room(self, sequence: Seq) -> bool:
        return sequence.n_tokens <= _ROOM * self._stream_cells

    def _look(self, running: Sequence[Seq]) -> None:
        """Adds the steps since the last look, as if all had been computed with the sequences that run now."""
        if running and self._n_steps:
            costs, n_tokens = self._costs, sum(sequence.n_tokens for sequence in running)
            n_repeated = shared_tokens(running) if self._shares_cells else 0
            n_foreign = n_tokens - n_repeated + costs.n_cached - n_tokens / len(running)
            kept = math.exp(-self._step_s / _MEMORY_S)
            self._busy_s = kept * self._busy_s + self._step_s
            self._unified_s = kept * self._unified_s + costs.cell_s * n_foreign * self._n_tokens
            self._streams_s = kept * self._streams_s + (
                costs.repeated_cell_s * n_repeated * self._n_steps
                + costs.pass_s * (_PASSES_OF_A_PROMPT * self._n_prompts + _n_splits(running) * self._n_steps)
            )
        self._n_steps = self._n_tokens = self._n_prompts = 0
        self._step_s = 0.0


def _n_splits(sequences: Sequence[Seq]) -> float:
    """How often sequences of other adapter sets lie between the streams of a step's rows, on average."""
    n_all = len(sequences)
    sizes = Counter(sequence.adapters for sequence in sequences).values()
    return sum(n * (n_all - n) / n_all for n in sizes) / len(sizes)


def shared_tokens(sequences: Sequence[Seq]) -> int:
    """The tokens that these sequences hold more than once: what they would save if they held equal prefixes once."""
    by_salt: dict[Hashable, list[Tokens]] = {}
    for sequence in sequences:
        if sequence.request.cache_prompt:
            by_salt.setdefault(sequence.salt, []).append(sequence.tokens[: sequence.n_tokens])
    # In this order, sequences with a common prefix are neighbours.
    in_order = [sorted(group, key=lambda tokens: tokens.tobytes()) for group in by_salt.values()]
    return sum(n_common(a, b) for group in in_order for a, b in itertools.pairwise(group))
