"""When an engine with `--kv-layout auto` switches between the layouts of the KV cache (docs/decisions/0006)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cppbatch.config import KvLayout
from cppbatch.engine.sequence import Seq

_LOOK_EVERY_S = 0.25  # at the sequences in the unified layout: many may wait
_MIN_WAIT_S = 10.0  # without long sequences, until the engine returns to the per-sequence layout
_MAX_WAIT_S = 600.0
_WAIT_FACTOR = 50.0  # ... and this many times as long as the switch took
_ROOM = 0.75  # of a stream: a sequence with more tokens is long


class LayoutSwitch(NamedTuple):
    """A switch to make between two steps, and why."""

    layout: KvLayout
    reason: str


class LayoutPolicy:
    """Decides between two steps whether to switch.

    - To unified at once when a sequence outgrows its stream: no request is refused or cut short that unified takes.
    - To the per-sequence layout when no sequence has been long for a while.

    That while is in proportion to the duration of a switch, so that switching costs little of the time. If the
    per-sequence layout lasted no longer, the next one is twice as long: long requests that come again and again keep
    the engine unified.
    """

    def __init__(self, stream_cells: int) -> None:
        """`stream_cells`: the most tokens of a sequence in the per-sequence layout."""
        self._stream_cells = stream_cells
        self._looked_at = self._switched_at = self._long_at = -math.inf
        self._wait_s = _MIN_WAIT_S

    def wanted(
        self, now: float, layout: KvLayout, running: Sequence[Seq], waiting: Sequence[Seq], blocked: Seq | None
    ) -> LayoutSwitch | None:
        """The switch to make now. `layout`: the present one. `blocked`: a waiting sequence that has no place in a
        stream, when it is its turn."""
        if layout == "per-sequence":
            too_long = blocked or next((s for s in running if s.n_tokens > self._stream_cells), None)
            if too_long is None:
                return None
            reason = f"{too_long.id} has {too_long.n_tokens} tokens, a stream {self._stream_cells} cells"
            return LayoutSwitch("unified", reason)
        if now - self._looked_at < _LOOK_EVERY_S:
            return None
        self._looked_at = now
        if not self._have_room(running):
            self._long_at = now
        if now - self._long_at < self._wait_s or not self._have_room(waiting):
            return None
        return LayoutSwitch("per-sequence", f"no sequence has been long for {now - self._long_at:.0f} s")

    def switched(self, layout: KvLayout, now: float, seconds: float) -> None:
        """The engine has switched, which took so long."""
        if layout == "unified":
            came_soon = now - self._switched_at < self._wait_s
            doubled = min(_MAX_WAIT_S, 2 * self._wait_s) if came_soon else 0.0
            self._wait_s = max(_MIN_WAIT_S, _WAIT_FACTOR * seconds, doubled)
            self._long_at = now
        self._switched_at = now

    def _have_room(self, sequences: Iterable[Seq]) -> bool:
        return all(sequence.n_tokens <= _ROOM * self._stream_cells for sequence in sequences)
