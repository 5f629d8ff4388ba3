"""The keys and values of a sequence in host memory, and their conversion between the layouts of the KV cache.

The format that `llama_state_seq_get_data` writes (llama-kv-cache.cpp: `state_write`; numbers are uint32 unless noted):

    header        a magic number, the seq_id
    each cache    the number of its streams; for each stream the number of cells, followed by these if there are any
    cells         for each: position, 1, seq_id; positions of several dimensions: position, 1, x, y, a token, seq_id
                  1 if values are transposed (no flash attention), the number of layers
                  keys of each layer: type, bytes of a row (uint64), a row for each cell
                  values of each layer, by rows:     type, bytes of a row (uint64), a row for each cell
                                        transposed:  type, bytes of a number, numbers of a row, all rows transposed

The unified layout has one stream for all sequences, the per-sequence layout one for each. A model with sliding windows
has two caches. llama.cpp only reads a state with the same number of streams and the same order of values as its own,
but restores the cells of any stream into that of the restored sequence.
"""

from __future__ import annotations

from itertools import groupby, pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from cppbatch.config import FlashAttention
from cppbatch.errors import OutOfRange
from cppbatch.llama.llama_batch import Batch

_WORD = 4  # bytes
HEADER_BYTES = 2 * _WORD
CELL_BYTES, PLANAR_CELL_BYTES = 3 * _WORD, 6 * _WORD
_NUMBER_BYTES = {0: 4, 1: 2, 30: 2}  # by ggml_type, for those that can be transposed: f32, f16, bf16

Bytes = npt.NDArray[np.uint8]


class SequenceState(msgspec.Struct, frozen=True):
    """The keys and values of one sequence, copied to host memory by `Context.save_sequence`."""

    data: Bytes
    n_tokens: int
    """The number of positions: one per token, but an image may have fewer."""
    model_key: tuple[object, ...]
    """The properties that must be equal in the restoring context."""
    n_streams: int
    stream: int
    """The stream of the cells."""
    n_window_bytes: int
    """Bytes of the second cache at the end of `data`."""
    flash_attn: FlashAttention
    n_cell_bytes: int = CELL_BYTES
    """Bytes of a cell's description."""

    @property
    def n_bytes(self) -> int:
        """Size in host memory."""
        return self.data.nbytes

    @property
    def form(self) -> dict[str, object]:
        """The information that `Context.read_state` needs in addition to `data`."""
        return {
            "n_tokens": self.n_tokens,
            "n_streams": self.n_streams,
            "stream": self.stream,
            "n_window_bytes": self.n_window_bytes,
            "flash_attn": self.flash_attn,
            "n_cell_bytes": self.n_cell_bytes,
        }

    def for_context(self, n_streams: int, flash_attn: FlashAttention) -> Bytes:
        """The state as written by a context with this many streams.

        Raises `OutOfRange` for a state in another format, as used by other kinds of memory.
        """
        transposed = None if flash_attn == self.flash_attn else flash_attn == "off"
        if n_streams == self.n_streams and transposed is None:
            return self.data
        parts = [self.data[:HEADER_BYTES]]
        window_at = self.data.size - self.n_window_bytes
        caches = [self.data[HEADER_BYTES:window_at]] + ([self.data[window_at:]] if self.n_window_bytes else [])
        for cache in caches:
            cells = self._cells(cache)
            values = [cells] if transposed is None else self._with_values(cells, transposed=transposed)
            parts += [_words(n_streams), *values, _words(*[0] * (n_streams - 1))]
        return np.concatenate(parts)

    def _cells(self, cache: Bytes) -> Bytes:
        """The number of cells and the cells of the only stream that has any."""
        start = _WORD * (1 + self.stream)
        stop = cache.size - _WORD * (self.n_streams - 1 - self.stream)
        before, cells, behind = cache[:start], cache[start:stop], cache[stop:]
        if not np.array_equal(before, _words(self.n_streams, *[0] * self.stream)) or behind.any():
            raise self._unknown_form()
        most = self.n_tokens if self.n_cell_bytes == CELL_BYTES else cells.size // self.n_cell_bytes
        if not 1 <= self._number(cells, 0) <= most:
            raise self._unknown_form()
        return cells

    def _with_values(self, cells: Bytes, *, transposed: bool) -> list[Bytes]:
        """The parts of these cells, with values by rows or transposed."""
        n_cells = self._number(cells, 0)
        at = _WORD + n_cells * self.n_cell_bytes
        was_transposed, n_layers = self._number(cells, at), self._number(cells, at + _WORD)
        if was_transposed == transposed:
            return [cells]
        parts = [cells[:at], _words(int(transposed)), cells[at + _WORD : at + 2 * _WORD]]
        values_at = at = at + 2 * _WORD
        for _ in range(n_layers):
            values_at += 3 * _WORD + n_cells * self._number(cells, values_at + _WORD)
        parts.append(cells[at:values_at])
        at = values_at
        while at < cells.size:
            kind, a, b = (self._number(cells, at + i * _WORD) for i in range(3))
            size = _NUMBER_BYTES.get(kind, 0)
            n_row = b if was_transposed else a // max(1, size)
            stop = at + 3 * _WORD + n_cells * n_row * size
            if not size or stop > cells.size or (a != size if was_transposed else b):
                raise self._unknown_form()
            numbers = cells[at + 3 * _WORD : stop].reshape(
                *((n_row, n_cells) if was_transposed else (n_cells, n_row)), size
            )
            sizes = (size, n_row) if transposed else (n_row * size, 0)
            parts += [_words(kind, *sizes), numbers.transpose(1, 0, 2).reshape(-1)]
            at = stop
        return parts

    def _number(self, data: Bytes, at: int) -> int:
        if at + _WORD > data.size:
            raise self._unknown_form()
        return int(data[at : at + _WORD].view(np.uint32)[0])

    def _unknown_form(self) -> OutOfRange:
        return OutOfRange(f"the state of {self.n_tokens} tokens is in a format that other layouts cannot read")


def _words(*numbers: int) -> Bytes:
    return np.array(numbers, np.uint32).view(np.uint8)


# Tracks which of a sequence's last tokens (rejected drafts) can be removed if memory is not only cells.
#
# - Recurrent states: llama.cpp keeps a snapshot of the state before each of the last tokens (`n_rs_seq`), next to the
#   states that a ubatch moves. A later ubatch may move such a state again, without its snapshots.
# - Sliding windows: a ubatch only overwrites cells outside the window of its first token in their sequence. A later
#   ubatch overwrites more.
#
# `llama_memory_seq_rm` detects neither: it returns True, and the logits are wrong. So tokens are only removed after a
# decode that was a single ubatch (docs/decisions/0033).


_FEW, _MANY = 4, 64
SNAPSHOTS = {
    **dict.fromkeys(("lfm2", "lfm2moe"), _MANY),  # a short convolution: 2 * n_embd numbers in a layer
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen4exp"), _FEW),
    **dict.fromkeys(("bailingmoe3", "deepseek4", "glm5-next", "kimi-k3"), _FEW),
}
"""Architectures with recurrent states that can be rolled back, and the maximum number of snapshots per sequence: each
takes the memory of a whole state, usually tens of MB. They are those of llama.cpp's `llm_arch_supports_rs_rollback`,
each tested (`./scripts/test archs`)."""


class Rollback:
    """The removable tokens after a context's last decode: up to `n` tokens per sequence."""

    def __init__(self, n: int, *, any_lengths: bool, any_seq_ids: bool) -> None:
        """The flags describe how llama.cpp splits a batch into ubatches. `any_lengths`: a ubatch may have more tokens
        of one sequence than of another. `any_seq_ids`: it may have seq_ids that are not consecutive.
        """
        self.n = n
        self._any_lengths, self._any_seq_ids = any_lengths, any_seq_ids
        self._removable: dict[int, int] = {}
        self._pending: set[int] = set()

    def record_decode(self, batch: Batch, n_ubatch: int) -> None:
        """Records `batch` as the last decode."""
        if not self.n:
            return
        runs = [(seq_id, len(list(run))) for seq_id, run in groupby(batch.seq_ids[: batch.n_tokens].tolist())]
        self._removable = {seq_id: min(n - 1, self.n) for seq_id, n in runs}
        self._pending.difference_update(self._removable)
        is_equal = self._any_lengths or len({n for _, n in runs}) == 1
        is_consecutive = self._any_seq_ids or all(b == a + 1 for (a, _), (b, _) in pairwise(runs))
        if batch.n_tokens > n_ubatch or len(self._removable) < len(runs) or not (is_equal and is_consecutive):
            self._removable.clear()

    def removable(self, seq_id: int) -> int:
        """The number of a sequence's last tokens that can be removed."""
        return self._removable.get(seq_id, 0)

    def record_partial_removal(self, seq_id: int) -> None:
        """Records that a sequence's last tokens were removed. No more can be removed until its next decode."""
        del self._removable[seq_id]
        self._pending.add(seq_id)

    def record_removal(self, seq_id: int) -> None:
        """Records that a whole sequence was removed."""
        self._removable.pop(seq_id, None)
        self._pending.discard(seq_id)

    def record_move(self) -> None:
        """Records that states were copied or restored, so they may be shared or moved."""
        self._removable.clear()

    def is_pending(self, seq_id: int) -> bool:
        """Whether the state of a sequence is still a snapshot, which `llama_memory_seq_cp` would not copy."""
        return seq_id in self._pending
