"""The `llama_batch` of a decode, as numpy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.errors import OutOfRange
from cppbatch.llama.library import C

Int32Array = npt.NDArray[np.int32]


class PendingTokens(Protocol):
    """A sequence with tokens to compute (`cppbatch.engine.sequence.Seq`): those from `n_computed` on are pending."""

    tokens: Int32Array
    n_computed: int
    seq_id: int

    @property
    def position(self) -> int:
        """Of the next pending token."""
        ...

    def n_logits(self, n: int) -> int:
        """How many of the next `n` pending tokens want logits; they are the last ones."""
        ...


class Batch:
    """Up to `capacity` tokens for one `llama_decode`; cleared and filled again in every step.

    llama.cpp reads the numpy arrays in place: `tokens`, `positions`, `seq_ids` int32[capacity], `wants_logits`
    int8[capacity], of which the first `n_tokens` entries are valid. Every token has exactly one seq_id.
    """

    n_dimensions = 1
    """Positions of each entry."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise OutOfRange(f"a batch of {capacity} tokens is too small")
        self.capacity = capacity
        self.tokens: Int32Array = np.zeros(capacity, np.int32)
        self.positions: Int32Array = np.zeros(capacity, np.int32)
        self.seq_ids: Int32Array = np.zeros(capacity, np.int32)
        self.wants_logits: npt.NDArray[np.int8] = np.zeros(capacity, np.int8)
        self.n_tokens = 0
        self.n_outputs = 0
        # llama_batch contains a pointer to the seq_ids of each token. All point into one array and never change.
        self._n_seq_id = np.ones(capacity, np.int32)
        self._seq_id_pointers = np.uintp(self.seq_ids.ctypes.data) + np.arange(capacity, dtype=np.uintp) * 4
        self._struct: Any = None

    def _make_struct(self, start: int = 0) -> Any:
        """`llama_batch` of the entries from `start` on."""

        def pointer(array: npt.NDArray[Any], kind: Any) -> Any:
            return array[start:].ctypes.data_as(ctypes.POINTER(kind))

        return C.llama_batch(
            n_tokens=0,
            token=pointer(self.tokens, ctypes.c_int32),
            embd=None,
            pos=pointer(self.positions, ctypes.c_int32),
            n_seq_id=pointer(self._n_seq_id, ctypes.c_int32),
            seq_id=pointer(self._seq_id_pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=pointer(self.wants_logits, ctypes.c_int8),
        )

    def refill(self, entries: Sequence[tuple[PendingTokens, int]], *, n_rows: int) -> None:
        """Clears the batch and writes the next `n` pending tokens of each sequence into it, in the order of `entries`.

        `n_rows`: how many of the entries are decode rows: one token that wants logits.
        """
        self.clear()
        if n_rows == len(entries):
            sequences = [sequence for sequence, _ in entries]
            self.add_rows(
                [s.tokens[s.n_computed] for s in sequences],
                [s.position for s in sequences],
                [s.seq_id for s in sequences],
            )
            return
        for s, n in entries:
            run = s.tokens[s.n_computed : s.n_computed + n]
            self.add_run(run, s.position, s.seq_id, n_logits=s.n_logits(n))

    def clear(self) -> None:
        """Empties the batch."""
        self.n_tokens = self.n_outputs = 0

    def add_rows(self, tokens: list[int], positions: list[int], seq_ids: list[int]) -> None:
        """Appends one token, with logits, for each of several sequences: the decode rows of a step."""
        start, stop = self._extend(len(tokens))
        self.tokens[start:stop] = tokens
        self.positions[start:stop] = positions
        self.seq_ids[start:stop] = seq_ids
        self.wants_logits[start:stop] = 1
        self.n_outputs += stop - start

    def add_run(self, tokens: Int32Array, position: int, seq_id: int, *, n_logits: int) -> None:
        """Appends consecutive tokens of one sequence, int32[n], at `position`, with logits for the last `n_logits`."""
        if len(tokens) == 0:
            raise OutOfRange(f"no tokens given for sequence {seq_id}")
        start, stop = self._extend(len(tokens))
        self.tokens[start:stop] = tokens
        self.positions[start:stop] = np.arange(position, position + stop - start, dtype=np.int32)
        self.seq_ids[start:stop] = seq_id
        self.wants_logits[start:stop] = 0
        if n_logits:
            self.wants_logits[stop - n_logits : stop] = 1
            self.n_outputs += n_logits

    def _extend(self, n: int) -> tuple[int, int]:
        start, stop = self.n_tokens, self.n_tokens + n
        if stop > self.capacity:
            raise OutOfRange(f"{stop} tokens exceed the batch capacity of {self.capacity}")
        self.n_tokens = stop
        return start, stop

    @property
    def struct(self) -> Any:
        """The `llama_batch` struct, which points into the arrays."""
        if self._struct is None:
            self._struct = self._make_struct()
        self._struct.n_tokens = self.n_tokens
        return self._struct

    def part(self, start: int, stop: int) -> Any:
        """The struct of the entries from `start` to `stop`."""
        struct = self._make_struct(start)
        struct.n_tokens = stop - start
        return struct
