"""When an engine with `--kv-layout auto` switches KV layouts (docs/decisions/0006)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from cppbatch.config import KvLayout
from cppbatch.engine.kv.radix_tree import Tokens, n_common
from cppbatch.engine.sequence import Seq

_LOOK_EVERY_S = 0.25
_SAMPLE_WEIGHT = 0.05  # of a sample in the mean: a load has two thirds of the weight after 20 samples, 5 busy seconds
_SHARES_MUCH = 0.4  # repeated cells per foreign cell: above this mean, unified is faster
_SHARES_LITTLE = 0.25  # ... and below this one, it is not
_MIN_WAIT_S = 10.0  # between two voluntary switches
_MAX_WAIT_S = 600.0
_WAIT_FACTOR = 50.0  # ... and this many times as long as the switch took
_LONG_PART = 0.75  # fraction of a stream: a sequence with more tokens is long


class LayoutSwitch(NamedTuple):
    """A switch to make between two steps, and its reason."""

    layout: KvLayout
    reason: str


class LayoutPolicy:
    """Decides between two steps whether to switch.

    - To unified, immediately, if a sequence outgrows its stream: requests that fit into unified are never refused or
      cut short.
    - To unified, if the running sequences share a prefix so long that reading each copy of it costs more than iterating
      over the cells of others (`layout_cost_ratio`).
    - To per-sequence, if they share little, and no sequence has been long for a while.

    The last two wait after a switch, in proportion to its duration, so that switching takes little of the time. If the
    per-sequence layout lasted no longer than that wait, the next wait is doubled: recurring long requests keep the
    engine unified.
    """

    def __init__(self, stream_cells: int, n_cached: int | None) -> None:
        """The arguments are those of `Layouts`."""
        self._stream_cells = stream_cells
        self._n_cached = n_cached
        self._shared = 0.0
        """Repeated cells per foreign cell: a mean of the last samples."""
        self._looked_at = self._switched_at = self._long_at = -math.inf
        self._wait_s = _MIN_WAIT_S

    def choose_switch(
        self, now: float, layout: KvLayout, running: Sequence[Seq], waiting: Sequence[Seq], blocked: Seq | None
    ) -> LayoutSwitch | None:
        """The switch to make now. `layout`: the current one. `blocked`: the next waiting sequence, if it does not fit
        into a stream."""
        if layout == "per-sequence":
            too_long = blocked or next((s for s in running if s.n_tokens > self._stream_cells), None)
            if too_long:
                reason = f"{too_long.id} has {too_long.n_tokens} tokens, but a stream has {self._stream_cells} cells"
                return LayoutSwitch("unified", reason)
        if now - self._looked_at < _LOOK_EVERY_S:
            return None
        self._looked_at = now
        if running and self._n_cached is not None:
            self._shared += _SAMPLE_WEIGHT * (min(1.0, layout_cost_ratio(running, self._n_cached)) - self._shared)
        if not self._have_room(running):
            self._long_at = now
        if now - self._switched_at < self._wait_s:
            return None
        if layout == "per-sequence":
            is_shared = self._shared >= _SHARES_MUCH
            return LayoutSwitch("unified", "a long prefix is shared") if is_shared else None
        is_long = now - self._long_at < self._wait_s or not self._have_room(waiting)
        if is_long or self._shared > _SHARES_LITTLE:
            return None
        return LayoutSwitch("per-sequence", "no long sequences for a while, and little is shared")

    def switched(self, layout: KvLayout, now: float, seconds: float) -> None:
        """Called after a switch, with its duration."""
        if layout == "unified":
            came_soon = now - self._switched_at < self._wait_s
            doubled = min(_MAX_WAIT_S, 2 * self._wait_s) if came_soon else 0.0
            self._wait_s = max(_MIN_WAIT_S, _WAIT_FACTOR * seconds, doubled)
        self._switched_at = now

    def _have_room(self, sequences: Iterable[Seq]) -> bool:
        return all(sequence.n_tokens <= _LONG_PART * self._stream_cells for sequence in sequences)


def layout_cost_ratio(sequences: Sequence[Seq], n_cached: int) -> float:
    """Compares the costs of these sequences, each with a decode row, in the per-sequence and unified layouts.

    Per-sequence, rows read repeated cells: those of prefixes that unified holds once. Unified, each row iterates over
    foreign cells: those of other sequences, and `n_cached` cells of cached prefixes. Returns their ratio.
    """
    n_tokens = sum(sequence.n_tokens for sequence in sequences)
    n_repeated = shared_tokens(sequences)
    n_foreign = len(sequences) * (n_tokens - n_repeated + n_cached) - n_tokens
    return n_repeated / max(1, n_foreign)


def shared_tokens(sequences: Sequence[Seq]) -> int:
    """The tokens that these sequences hold more than once, and would save by sharing equal prefixes."""
    by_salt: dict[Hashable, list[Tokens]] = {}
    for sequence in sequences:
        if sequence.request.cache_prompt:
            by_salt.setdefault(sequence.salt, []).append(sequence.tokens[: sequence.n_tokens])
    # In this order, sequences with a common prefix are adjacent.
    in_order = [sorted(group, key=lambda tokens: tokens.tobytes()) for group in by_salt.values()]
    return sum(n_common(a, b) for group in in_order for a, b in itertools.pairwise(group))
