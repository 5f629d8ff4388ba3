"""The `llama_batch` of a decode as numpy arrays, with tokens or vectors, and its check."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.errors import OutOfRange
from cppbatch.llama.library import C

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

_LISTED_ENTRIES = 16
"""Entries up to which a list is faster than an array: a decode evicts numpy's code from the caches."""


class BatchLimits(NamedTuple):
    """What a context computes."""

    n_tokens: int
    n_seq_ids: int
    n_vocab: int
    n_positions: int
    n_vector: int
    """Numbers of a vector."""
    n_dimensions: int
    """Positions of a vector."""


class PendingTokens(Protocol):
    """A sequence with tokens to compute (`cppbatch.engine.sequence.Seq`). Tokens from `n_computed` on are pending."""

    tokens: Int32Array
    n_computed: int
    seq_id: int

    @property
    def position(self) -> int:
        """The position of the next pending token."""
        ...

    def n_logits(self, n: int) -> int:
        """The number of tokens with logits among the next `n` pending ones; they are the last ones."""
        ...


class Batch:
    """Up to `capacity` tokens for one `llama_decode`; cleared and refilled in every step.

    llama.cpp reads the numpy arrays in place: `tokens`, `positions`, `seq_ids` int32[capacity], `wants_logits`
    int8[capacity], of which the first `n_tokens` entries are valid. Every token has exactly one seq_id.
    """

    n_dimensions = 1
    """Positions per entry."""

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
        # llama_batch contains a pointer to the seq_ids of each token. The pointers never change.
        self._n_seq_id = np.ones(capacity, np.int32)
        self._seq_id_pointers = np.uintp(self.seq_ids.ctypes.data) + np.arange(capacity, dtype=np.uintp) * 4
        self._struct: Any = None

    def _make_struct(self, start: int = 0) -> Any:
        """A `llama_batch` of the entries from `start` on."""

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

        `n_rows`: the number of entries that are decode rows: one token with logits.
        """
        self.clear()
        if n_rows == len(entries):
            self._add_rows_of([sequence for sequence, _ in entries])
            return
        rows: list[PendingTokens] = []
        for s, n in entries:
            if n == 1 and s.n_logits(1):
                rows.append(s)
                continue
            self._add_rows_of(rows)
            rows = []
            run = s.tokens[s.n_computed : s.n_computed + n]
            self.add_run(run, s.position, s.seq_id, n_logits=s.n_logits(n))
        self._add_rows_of(rows)

    def _add_rows_of(self, sequences: list[PendingTokens]) -> None:
        if sequences:
            self.add_rows(
                [s.tokens[s.n_computed] for s in sequences],
                [s.position for s in sequences],
                [s.seq_id for s in sequences],
            )

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

    def check(self, limits: BatchLimits) -> None:
        """Raises `OutOfRange` for what llama.cpp would abort on."""
        n = self.n_tokens
        if not 1 <= n <= limits.n_tokens:
            raise OutOfRange(f"the batch has {n} tokens; it must have 1 to {limits.n_tokens}")
        for array, limit, name in (
            (self.seq_ids[:n], limits.n_seq_ids, "seq_id"),
            *self._check_inputs(limits),
            (self.positions[: n * self.n_dimensions], limits.n_positions, "position"),
        ):
            numbers = array.tolist() if n <= _LISTED_ENTRIES else (int(array.min()), int(array.max()))
            low, high = min(numbers), max(numbers)
            if low < 0 or high >= limit:
                raise OutOfRange(f"a batch has {name} {low if low < 0 else high}; the limit is {limit - 1}")

    def _check_inputs(self, limits: BatchLimits) -> list[tuple[Int32Array, int, str]]:
        """Checks the form of what is computed. Returns numbers with their limit and name."""
        return [(self.tokens[: self.n_tokens], limits.n_vocab, "token id")]


class PendingVectors(Protocol):
    """A sequence with vectors to compute (`cppbatch.engine.sequence.Seq`)."""

    seq_id: int

    def media_vectors(self, n: int) -> FloatArray:
        """The next `n` pending vectors, float32[n, n_embd]."""
        ...

    def media_positions(self, n: int) -> Int32Array:
        """Their positions, int32[n_dimensions, n]."""
        ...


class EmbeddingBatch(Batch):
    """Up to `capacity` vectors for one `llama_decode`, without logits.

    llama.cpp reads `vectors`, float32[capacity, n_embd], instead of token ids; see `Batch` for the other arrays.
    `positions` contains the positions of all vectors in the first dimension, then those in the second, and so on.
    """

    def __init__(self, capacity: int, n_embd: int, n_dimensions: int = 1) -> None:
        """`n_dimensions`: dimensions of a position (`Model.n_dimensions`)."""
        super().__init__(capacity)
        self.n_dimensions = n_dimensions
        self.positions = np.zeros(n_dimensions * capacity, np.int32)
        self.vectors: FloatArray = np.empty((capacity, n_embd), np.float32)

    def _make_struct(self, start: int = 0) -> Any:
        struct = super()._make_struct(start)
        struct.token = None
        struct.embd = self.vectors[start:].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        return struct

    def refill_vectors(self, entries: Sequence[tuple[PendingVectors, int]]) -> None:
        """Clears the batch and writes the next `n` pending vectors of each sequence into it."""
        self.clear()
        self._extend(sum(n for _, n in entries))
        positions, stop = self.positions_by_dimension, 0
        for sequence, n in entries:
            start, stop = stop, stop + n
            self.vectors[start:stop] = sequence.media_vectors(n)
            positions[:, start:stop] = sequence.media_positions(n)
            self.seq_ids[start:stop] = sequence.seq_id
            self.wants_logits[start:stop] = 0

    @property
    def positions_by_dimension(self) -> Int32Array:
        """A view of the valid positions, int32[n_dimensions, n_tokens]."""
        return self.positions[: self.n_dimensions * self.n_tokens].reshape(self.n_dimensions, self.n_tokens)

    def _check_inputs(self, limits: BatchLimits) -> list[tuple[Int32Array, int, str]]:
        n_vector = self.vectors.shape[1]
        if (n_vector, self.n_dimensions) != (limits.n_vector, limits.n_dimensions):
            form = f"{limits.n_vector} numbers with {limits.n_dimensions} positions"
            raise OutOfRange(
                f"vectors of {n_vector} numbers with {self.n_dimensions} positions; the model requires {form}"
            )
        return []
