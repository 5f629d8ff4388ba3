"""The keys and values of one sequence in host memory, and how they are carried between the layouts of the KV cache.

What `llama_state_seq_get_data` writes (llama-kv-cache.cpp: `state_write`; numbers are uint32 unless noted):

    header        a magic number, the seq_id
    each cache    the number of its streams; for each stream the number of cells, followed by these if there are any
    cells         for each: position, 1, seq_id; positions of several dimensions: position, 1, x, y, a token, seq_id
                  1 if values are transposed (no flash attention), the number of layers
                  keys of each layer: type, bytes of a row (uint64), a row for each cell
                  values of each layer, by rows:     type, bytes of a row (uint64), a row for each cell
                                        transposed:  type, bytes of a number, numbers of a row, all rows transposed

A stream is one for all sequences in the unified layout, and one for each in the per-sequence layout. A model with
sliding windows has two caches. llama.cpp reads only what has its own number of streams and its own order of values, but
puts the cells of any stream into that of the sequence which it restores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cppbatch.config import FlashAttention
from cppbatch.errors import OutOfRange

_WORD = 4  # bytes
HEADER_BYTES = 2 * _WORD
CELL_BYTES, PLANAR_CELL_BYTES = 3 * _WORD, 6 * _WORD
_NUMBER_BYTES = {0: 4, 1: 2, 30: 2}  # of each ggml_type that can be transposed: f32, f16, bf16

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class SequenceState:
    """The keys and values of one sequence, copied to host memory by `Context.save_sequence`."""

    data: Bytes
    n_tokens: int
    """Positions that it takes: tokens, unless a picture takes fewer."""
    model_key: tuple[object, ...]
    """What must be equal in the context that restores it."""
    n_streams: int
    stream: int
    """The stream that had the cells."""
    n_window_bytes: int
    """Bytes at the end of `data` that are of the second cache."""
    flash_attn: FlashAttention
    n_cell_bytes: int = CELL_BYTES
    """Of what describes a cell."""

    @property
    def n_bytes(self) -> int:
        """Size in host memory."""
        return self.data.nbytes

    @property
    def form(self) -> dict[str, object]:
        """What `Context.read_state` must know besides `data`."""
        return {
            "n_tokens": self.n_tokens,
            "n_streams": self.n_streams,
            "stream": self.stream,
            "n_window_bytes": self.n_window_bytes,
            "flash_attn": self.flash_attn,
            "n_cell_bytes": self.n_cell_bytes,
        }

    def for_context(self, n_streams: int, flash_attn: FlashAttention) -> Bytes:
        """The state as a context with so many streams would have written it.

        Raises `OutOfRange` for a state of another form than described above, as other kinds of memory have.
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
        """Parts of cells whose values are by rows, or transposed."""
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
