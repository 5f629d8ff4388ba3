"""Where to place checkpoints in a prompt, for models whose memory can only be truncated at checkpoints.

Example, a new conversation of 3,000 tokens: checkpoints before the header of the answer, before the last user message,
and before some earlier messages, with spacing that grows with age. So the next turn continues after the last message
even if the answer comes back in another form; likewise another answer to the same message, and another conversation
with the same system prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cppbatch.engine.sequence import SavedState

_CLOSE_MARKERS_TOKENS = 8  # tokens: of markers closer together than this, the last one counts
_MIN_STEP_TOKENS = 16  # tokens
_HEADER_TOKENS = 64  # maximum tokens that a template adds after the last message
_BEFORE_END = (4, 32, 256)  # tokens, in a prompt without messages
_DISTANCE_PER_STEP = 4  # n tokens before the end: a checkpoint every n / 4 tokens
_UNMARKED_STEP_TOKENS = 512  # tokens between checkpoints in the absence of markers


_PARTS = "ends"  # in the form of a state followed by the parts of checkpoints


class StateWithParts(msgspec.Struct, frozen=True):
    """A saved state with the parts of its checkpoints, as a single state: for slot files and prefixes on disk."""

    state: SavedState
    parts: Sequence[tuple[int, SavedState]]
    """The parts with their numbers of tokens."""

    @property
    def n_bytes(self) -> int:
        """Size in a file."""
        return self.state.n_bytes + sum(part.n_bytes for _, part in self.parts)

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The state, then each part."""
        return np.concatenate([self.state.data, *(part.data for _, part in self.parts)])

    @property
    def form(self) -> dict[str, Any]:
        """The form of the state, plus the number of tokens, bytes and form of each part."""
        return {**self.state.form, _PARTS: [[n, part.data.nbytes, part.form] for n, part in self.parts]}

    @classmethod
    def read(
        cls,
        data: npt.NDArray[np.uint8],
        form: Mapping[str, Any],
        read_state: Callable[[npt.NDArray[np.uint8], Mapping[str, Any]], SavedState],
    ) -> StateWithParts:
        """The inverse of `data` and `form`. `read_state`: of the context, whose errors are raised."""
        kept = form.get(_PARTS, [])
        at = data.size - sum(n_bytes for _, n_bytes, _ in kept)
        # A view would keep the parts in memory too, which have their own arrays.
        state = read_state(
            data[:at].copy() if kept else data, {name: value for name, value in form.items() if name != _PARTS}
        )
        parts = []
        for n, n_bytes, part_form in kept:
            parts.append((int(n), read_state(data[at : at + n_bytes].copy(), part_form)))
            at += n_bytes
        return cls(state, parts)


def checkpoint_lengths(form: Mapping[str, Any]) -> tuple[int, ...]:
    """Numbers of tokens to which a state of this form can be truncated, descending."""
    return tuple(sorted((int(n) for n, _, _ in form.get(_PARTS, [])), reverse=True))


class CheckpointPlaces:
    """Chooses the places by the markers in the prompt, where messages start."""

    def __init__(self, markers: npt.NDArray[np.bool_], *, most: int = 32, min_step: int = 0) -> None:
        """`markers`: bool[n_vocab], tokens that are only written by chat templates. `most`: maximum checkpoints per
        prompt. `min_step`: minimum tokens between two of them; 0: a small default."""
        self._markers = markers
        self._most = most
        self.min_step = min_step or _MIN_STEP_TOKENS

    def of_prompt(self, prompt: npt.NDArray[np.int32], start: int, min_step: int) -> list[int]:
        """Numbers of tokens after which to place checkpoints, ascending, above `start` and below the length.

        `prompt`: int32[n]; negative ids: placeholders of media. `min_step`: minimum tokens between two of them.
        """
        n = len(prompt)
        messages = self._messages(prompt)
        wanted = [n - before for before in _BEFORE_END] if not messages or messages[-1] < n - _HEADER_TOKENS else []
        chosen = list(_spread(sorted({*wanted, *messages}, reverse=True), n, start, min_step))
        if messages and chosen and messages[0] > start and chosen[-1] - messages[0] >= min_step:
            chosen.append(messages[0])  # after the common start of all conversations
        return sorted({*chosen, *self._between(chosen, n, start, max(_UNMARKED_STEP_TOKENS, min_step))})[-self._most :]

    def _messages(self, prompt: npt.NDArray[np.int32]) -> list[int]:
        """Places where markers start, ascending; of those close together, the last one."""
        is_marker = self._markers[np.maximum(prompt, 0)] & (prompt >= 0)
        begins = np.flatnonzero(is_marker[1:] & ~is_marker[:-1]) + 1
        if not len(begins):
            return []
        is_last = np.append(np.diff(begins) >= _CLOSE_MARKERS_TOKENS, True)
        return [int(place) for place in begins[is_last]]

    @staticmethod
    def _between(chosen: list[int], n: int, start: int, every: int) -> Iterator[int]:
        """Multiples of `every` with at least that distance from each chosen place."""
        for place in range(start - start % every + every, n, every):
            if all(abs(place - other) >= every for other in chosen):
                yield place


def _spread(places: list[int], n: int, start: int, min_step: int) -> Iterator[int]:
    """The first of `places` (descending), and others at growing distances."""
    last: int | None = None
    for place in places:
        if start < place < n and (last is None or last - place >= max(min_step, (n - place) // _DISTANCE_PER_STEP)):
            last = place
            yield place
