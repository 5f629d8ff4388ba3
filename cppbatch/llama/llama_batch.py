"""The `llama_batch` of a decode as numpy arrays, with tokens or vectors, and its division into parts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.errors import OutOfRange
from cppbatch.llama.library import C

Int32Array = npt.NDArray[np.int32]


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


# --- batch parts -----------------------------------------------------------------------------------------------------
# Splits a batch where llama.cpp's results would be wrong for the whole batch in one `llama_decode`.
#
# Each rule has a test with a tiny model (tests/integration/test_batch_parts.py), and can be removed once llama.cpp
# fixes the bug:
#
# - Sliding windows: llama.cpp finds cells for all ubatches of a batch before it computes the first one. Cells that a
#   later ubatch drops from a window are then already missing (`llama_kv_cache::prepare` restores overwritten cells, but
#   not those that `apply_ubatch` purges), although tokens of an earlier ubatch attend to them. So each ubatch is a
#   separate decode.
# - PLaMo 2: with several sequences in a ubatch, its graph writes their states to wrong places, or aborts (the offset
#   `kv_head * n_seqs` in `build_plamo2_mamba_layer`). So each sequence is a separate decode.
# - CogVLM: its graph computes logits of all tokens (no `build_inp_out_ids`), and llama.cpp copies the first ones. So
#   the batch requests logits of all tokens.


HIDDEN_WINDOWS = frozenset({"deepseek4"})
"""Architectures with a window for which `llama_model_n_swa` returns 0, because tokens in it cannot be removed."""
SEQUENCES_ALONE = frozenset({"plamo2"})
"""Architectures that require one sequence per ubatch."""
ALL_ROWS = frozenset({"cogvlm"})
"""Architectures that always compute logits of all tokens."""

Part = tuple[int, int]
"""The entries of a batch from the first number to the second one."""


def single_ubatches(batch: Batch, n_ubatch: int, *, equal_runs: bool, alone: bool = False) -> list[Part]:
    """Parts that llama.cpp computes as one ubatch each.

    `equal_runs`: a ubatch has the same number of tokens of each sequence. `alone`: a ubatch has a single sequence.
    """
    n = batch.n_tokens
    if not equal_runs:
        return [(i, min(i + n_ubatch, n)) for i in range(0, n, n_ubatch)]
    bounds = np.flatnonzero(np.diff(batch.seq_ids[:n], prepend=-1, append=-1)).tolist()
    parts: list[Part] = []
    length = 0  # of the runs of the last part
    for start, stop in pairwise(bounds):
        if parts and not alone and stop - start == length and stop - parts[-1][0] <= n_ubatch:
            parts[-1] = parts[-1][0], stop
        else:
            parts += [(i, min(i + n_ubatch, stop)) for i in range(start, stop, n_ubatch)]
            length = stop - parts[-1][0]
    return parts


def parts_of_rows(batch: Batch, part: Part, n_rows: int) -> list[Part]:
    """A part of a batch as parts with at most `n_rows` rows of logits each."""
    start, stop = part
    rows = np.flatnonzero(batch.wants_logits[start:stop])
    bounds = [start, *(start + int(last) + 1 for last in rows[n_rows - 1 :: n_rows]), stop]
    return [(a, b) for a, b in pairwise(bounds) if a < b]


# --- embedding batch -------------------------------------------------------------------------------------------------
# The `llama_batch` of a decode of images and audio: vectors instead of tokens.


FloatArray = npt.NDArray[np.float32]


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
