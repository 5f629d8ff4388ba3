"""The contexts of draft models that read hidden rows of the model they draft for: EAGLE-3, DFlash, Gemma 4's assistant.

Such a model may lack embeddings and an output matrix and use those of its target; the target's context must then be
open. `Context.give_hidden_rows` makes the target output the rows. llama.cpp itself uses them in
`common/speculative.cpp`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cppbatch.config import FlashAttention
from cppbatch.errors import DecodeFailed, OutOfRange
from cppbatch.llama.context import Context
from cppbatch.llama.head_context import HeadContext
from cppbatch.llama.library import C, nextn
from cppbatch.llama.llama_batch import Batch, EmbeddingBatch, FloatArray
from cppbatch.llama.model import Model
from cppbatch.models.draft_files import DraftFile


class EagleContext(HeadContext):
    """The context of an EAGLE-3 draft model: one layer, which reads a token and the encoded row of the previous token.

    In training, the position of such a pair is that of the row; here it is that of the token, one higher. RoPE depends
    only on the differences of positions, so the result is the same.
    """

    reads_first = False

    def __init__(self, model: Model, file: DraftFile, target: Context, **sizes: Any) -> None:
        """`file`: of `model`, checked for the model of `target`. `sizes`: as for `HeadContext`."""
        super().__init__(model, target=target, **sizes)
        self._file = file

    @property
    def n_row(self) -> int:
        """Numbers that it reads of a token: rows of all its layers."""
        return self._file.n_row

    def encode(self, rows: FloatArray) -> FloatArray:
        """The output of the encoder, float32[n, n_embd], for rows of the target, float32[n, n_row]; no cells change.

        Raises `OutOfRange` for rows of another length, and `DecodeFailed`.
        """
        if rows.ndim != 2 or rows.shape[1] != self.n_row:
            raise OutOfRange(f"got rows of shape {rows.shape}; each row must have {self.n_row} numbers")
        rows = np.ascontiguousarray(rows, np.float32)
        size = min(self.n_logits, self.n_ubatch)
        pieces = [rows[i : i + size] for i in range(0, len(rows), size)]
        return np.concatenate([self._encode(piece) for piece in pieces])

    def _encode(self, rows: FloatArray) -> FloatArray:
        self._n_outputs = self._n_decoded = 0
        wants = np.ones(len(rows), np.int8)
        batch = C.llama_batch(
            n_tokens=len(rows), token=None, embd=rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            pos=None, n_seq_id=None, seq_id=None,  # meaningless here; llama.cpp fills them in
            logits=wants.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )  # fmt: skip
        if code := C.llama_encode(self.handle, batch):
            raise DecodeFailed(code, "the encoder of the draft model failed")
        C.llama_synchronize(self.handle)
        address = nextn().llama_get_embeddings_nextn(self.handle)
        if not address:
            raise DecodeFailed(0, "the encoder of the draft model returned no rows")
        encoded: FloatArray = np.ctypeslib.as_array(address, (len(rows), self.model.n_embd)).copy()
        return encoded


class AssistantContext(HeadContext):
    """The context of Gemma 4's assistant. It has no cells: its queries read those of the last layers of its target,
    with the target's seq_ids and layout. All tokens of a draft have the position after the target's last cell."""

    def __init__(self, model: Model, target: Context, *, n_threads: int, type_k: str, type_v: str) -> None:
        """`target`: the context of its target, which must stay open as long as this one. Raises as `HeadContext`."""
        self._of_cells = target
        super().__init__(
            model, n_ctx=target.n_ctx, n_batch=target.n_seq_max, n_seq_max=target.n_seq_max, n_threads=n_threads,
            flash_attn="auto", type_k=type_k, type_v=type_v, target=target,
        )  # fmt: skip

    def reopen(self, *, n_ctx: int, kv_unified: bool, flash_attn: FlashAttention = "auto") -> None:
        """Takes the current sizes and flash attention setting of its target, which lays out the cells."""
        target = self._of_cells
        super().reopen(n_ctx=target.n_ctx, kv_unified=target.kv_unified, flash_attn=target.flash_attn)


class RowBatch(EmbeddingBatch):
    """Rows of a target, float32[capacity, n_row], for the cells of a `DFlashContext`."""

    def add_runs(self, runs: Sequence[tuple[FloatArray, int, int]]) -> None:
        """Writes runs of (rows, position of the first one, seq_id) into the empty batch."""
        self._extend(sum(len(rows) for rows, _, _ in runs))
        positions, stop = self.positions_by_dimension, 0
        positions[3:] = 0
        for rows, position, seq_id in runs:
            start, stop = stop, stop + len(rows)
            self.vectors[start:stop] = rows
            positions[:3, start:stop] = np.arange(position, position + len(rows))  # of text: the same in all dimensions
            self.seq_ids[start:stop] = seq_id
            self.wants_logits[start:stop] = 0


class DFlashContext(HeadContext):
    """The context of a DFlash draft model, also of DFlash2 and DSpark. It decodes a `RowBatch`: the cell of a token
    depends only on the row of this token, so the cells of a sequence may start at any position."""

    reads_first = True

    def __init__(self, model: Model, file: DraftFile, target: Context, *, n_drafted: int, **sizes: Any) -> None:
        """`file`: of `model`, checked for the model of `target`. `n_drafted`: tokens per draft. `sizes`: as for
        `HeadContext`; `n_batch` is at least a block. Raises `OutOfRange` for drafts longer than a block."""
        self._file = file
        self.block = n_drafted + file.first
        """Tokens of a block: the newest token, then mask tokens."""
        if not 1 <= n_drafted <= file.block - file.first or self.block > sizes["n_batch"]:
            raise OutOfRange(f"drafts of {n_drafted} tokens were requested, but blocks have {file.block}")
        super().__init__(model, target=target, **sizes)
        self._block_batch = Batch(self.n_batch)

    def give_hidden_rows(self, layers: tuple[int, ...] = ()) -> None:
        """Makes all tokens give the lattice of DFlash2, and sets the attention mask of a block."""
        super().give_hidden_rows(layers)
        nextn().llama_set_embeddings_nextn(self.handle, bool(self._file.top_k), False)
        C.llama_set_causal_attn(self.handle, self._file.is_causal)

    @property
    def n_row(self) -> int:
        """Numbers that it reads of a token: rows of all its layers."""
        return self._file.n_row

    @property
    def _n_vector(self) -> int:
        return self.n_row

    @property
    def n_logits(self) -> int:
        """The maximum number of rows of logits: of all tokens of the blocks, unless there is a lattice."""
        return self.n_seq_max if self._file.top_k else min(self.n_batch, self.n_seq_max * self.block)

    def new_rows(self) -> RowBatch:
        """An empty batch of `n_batch` rows."""
        return RowBatch(self.n_batch, self.n_row, self.model.n_dimensions)

    def draft(
        self, tokens: Sequence[int], positions: Sequence[int], seq_ids: Sequence[int]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """Drafts for the newest token of each sequence, in one decode: tokens, int32[n, n_drafted], and the probability
        of each, float64[n, n_drafted]. The cells of the block are removed again.

        All blocks have the same length, as DFlash2 and DSpark require. Raises as `decode`.
        """
        batch, n, block = self._block_batch, len(tokens), self.block
        batch.clear()
        masks = np.full(block, self._file.mask, np.int32)
        for token, position, seq_id in zip(tokens, positions, seq_ids, strict=True):
            masks[0] = token
            batch.add_run(masks, position, seq_id, n_logits=0 if self._file.top_k else block)
        self.decode(batch)
        if self._file.top_k:
            rows = self.hidden_rows(n * block).reshape(n, block, -1)[:, self._file.first :]
            found = _walk(rows, self._file.top_k)
        else:
            rows = self.logits(n * block).reshape(n, block, -1)[:, self._file.first :]
            found = rows.argmax(axis=2).astype(np.int32), 1 / np.exp(rows - rows.max(axis=2, keepdims=True)).sum(axis=2)
        for position, seq_id in zip(positions, seq_ids, strict=True):
            self.remove(seq_id, position)
        return found[0], found[1].astype(np.float64)


def _walk(lattice: FloatArray, top_k: int) -> tuple[npt.NDArray[np.int32], FloatArray]:
    """The best path through a lattice, float32[n, n_drafted, n_embd]: for each token, `top_k` candidates, then `top_k`
    scores for each candidate of the previous token."""
    n, n_drafted, _ = lattice.shape
    each, last = np.arange(n), np.zeros(n, np.int64)
    tokens, probabilities = np.empty((n, n_drafted), np.int32), np.empty((n, n_drafted), np.float32)
    for i in range(n_drafted):
        scores = lattice[:, i, top_k : top_k + top_k * top_k].reshape(n, top_k, top_k)[each, last]
        last = scores.argmax(axis=1)
        tokens[:, i] = lattice[each, i, last]
        probabilities[:, i] = 1 / np.exp(scores - scores[each, last][:, None]).sum(axis=1)
    return tokens, probabilities
