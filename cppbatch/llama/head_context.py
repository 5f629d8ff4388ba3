"""The draft head in a model file (MTP: multi-token prediction): its context, and the batches that it decodes.

A head is one more layer. It reads a token together with the hidden row of the previous token, and returns logits for
the next token, and a hidden row of its own for the next draft token. `Context.give_hidden_rows` makes the model
output its hidden rows. llama.cpp itself uses heads in `common/speculative.cpp`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from cppbatch.config import DRAFT_LOGITS_BYTES, FlashAttention
from cppbatch.errors import OutOfRange
from cppbatch.llama.context import Context
from cppbatch.llama.library import nextn
from cppbatch.llama.llama_batch import Batch, Int32Array
from cppbatch.llama.model import Model

HiddenRows = npt.NDArray[np.float32]
"""float32[n, n_embd]"""


class HeadBatch(Batch):
    """A batch for a `HeadContext`: `hidden`, float32[capacity, n_embd], has the previous hidden row of each token."""

    def __init__(self, capacity: int, n_embd: int) -> None:
        super().__init__(capacity)
        self.hidden: HiddenRows = np.zeros((capacity, n_embd), np.float32)

    def _make_struct(self, start: int = 0) -> Any:
        struct = super()._make_struct(start)
        struct.embd = self.hidden[start:].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        return struct

    def add_hidden_run(
        self, tokens: Int32Array, hidden: HiddenRows, position: int, seq_id: int, *, n_logits: int
    ) -> None:
        """Adds a run of tokens, each with its previous hidden row."""
        self.hidden[self.n_tokens : self.n_tokens + len(tokens)] = hidden
        self.add_run(tokens, position, seq_id, n_logits=n_logits)

    def add_hidden_rows(self, tokens: list[int], hidden: HiddenRows, positions: list[int], seq_ids: list[int]) -> None:
        """Adds rows, each with the previous hidden row of its token."""
        self.hidden[self.n_tokens : self.n_tokens + len(tokens)] = hidden
        self.add_rows(tokens, positions, seq_ids)


class HeadContext(Context):
    """The context of a model's draft head, in the unified layout: cells of one layer. It decodes a `HeadBatch`.

    The cells of a sequence may start at any position: a head's cell depends only on its token and the previous row.
    """

    reads_first = True
    """Whether it reads the first token of a text, with zeros as the previous row."""

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_batch: int,
        n_seq_max: int,
        n_threads: int,
        flash_attn: FlashAttention,
        type_k: str,
        type_v: str,
        target: Context | None = None,
        head: int = 0,
    ) -> None:
        """`model` was loaded with its heads, and this is number `head`, or it drafts for the model of `target`. A
        ubatch has `n_batch` tokens. Raises as `Context`, and `OutOfRange` for a model without this head."""
        self._head = head
        if not (target or (model.has_head and 0 <= head < model.n_draft_heads)):
            raise OutOfRange(f"draft head {head} of {model.path.name} is not loaded")
        super().__init__(
            model,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_batch,
            n_seq_max=n_seq_max,
            n_threads=n_threads,
            flash_attn=flash_attn,
            type_k=type_k,
            type_v=type_v,
            swa_full=True,
            is_head=True,
            target=target,
        )
        self.give_hidden_rows()

    def __enter__(self) -> HeadContext:
        return self

    def give_hidden_rows(self, layers: tuple[int, ...] = ()) -> None:
        """Makes decodes give hidden rows, and sets the head to compute."""
        super().give_hidden_rows(layers)
        if self._head:
            nextn().llama_set_nextn_layer_offset(self.handle, self._head)

    def open_again(self) -> None:
        """Recreates the closed context, empty. Raises as the constructor."""
        self.reopen(n_ctx=self.n_ctx, kv_unified=True, flash_attn=self.flash_attn)

    @property
    def n_row(self) -> int:
        """The length of the row that it reads for a token."""
        return self.model.n_embd

    @property
    def n_logits(self) -> int:
        """The maximum number of rows of logits: at least one of each sequence."""
        return max(self.n_seq_max, min(self.n_ubatch, DRAFT_LOGITS_BYTES // (4 * self._n_vocab)))

    def new_batch(self) -> HeadBatch:
        """An empty batch of `n_batch` tokens."""
        return HeadBatch(self.n_batch, self.model.n_embd)

    def encode(self, rows: HiddenRows) -> HiddenRows:
        """The batch input for these rows of the model, float32[n, n_row]: the rows themselves."""
        return rows
