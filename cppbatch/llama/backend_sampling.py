"""llama.cpp's backend sampling: the device computes the largest logits of each row, so whole rows need not leave it."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.errors import LlamaError
from cppbatch.llama.library import C

MAX_CANDIDATES = 128
"""Candidates for each row: enough for top-k 40 with penalties on 64 recent tokens."""

_MAX_DETACHED = 256


class _Context(Protocol):
    n_seq_max: int

    @property
    def handle(self) -> Any: ...


class BackendSampling:
    """Top-k on the device, as a sampler chain that is attached to seq_ids of a context (`llama_set_sampler`).

    Only top-k: it has no state and no random numbers, and is the same for all requests. The engine samples from the
    candidates, so a text does not depend on where they were computed. Attaching or detaching a chain makes llama.cpp
    reserve its compute buffers again in the next decode: every seq_id has a chain from the start, and loses it only for
    requests that need whole rows.

    A decode computes one row of each sequence at most, so there are no drafts. llama.cpp 0.5 can compute more
    (`n_outputs_max_per_seq`), but the ids of rows are then overwritten where another seq_id has no row: its graph
    allocator uses the plan of a graph with as many nodes, in which other tensors were outputs.
    """

    def __init__(self, context: _Context, n_candidates: int, *, n_vocab: int) -> None:
        self.n_candidates = n_candidates
        self._context = context
        self._n_vocab = n_vocab
        self._chains: list[Any] = [None] * context.n_seq_max
        self._detached: deque[Any] = deque()

    def set_enabled(self, seq_id: int, enabled: bool) -> None:
        """From the next decode on, this seq_id's rows are candidates (enabled) or logits. Raises `LlamaError`."""
        if self.is_enabled(seq_id) == enabled:
            return
        if self._chains[seq_id] is not None:  # not freed yet: llama.cpp's last graph may still refer to its address
            self._detached.append(self._chains[seq_id])
        self._chains[seq_id] = _top_k_chain(self.n_candidates) if enabled else None  # a chain can be attached only once
        if not C.llama_set_sampler(self._context.handle, seq_id, self._chains[seq_id]) and enabled:
            raise LlamaError("llama.cpp cannot sample on this device")
        while len(self._detached) > _MAX_DETACHED:
            C.llama_sampler_free(self._detached.popleft())

    def is_enabled(self, seq_id: int) -> bool:
        """Whether this seq_id's rows are candidates."""
        return self._chains[seq_id] is not None

    def candidates(self, rows: list[int], n_outputs: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Token ids, in no order, and logits of these rows of the last decode: each [len(rows), n_candidates].

        `n_outputs`: the number of rows of that decode. Raises `LlamaError` when the device did not compute candidates.
        """
        handle, first = self._context.handle, rows[0] - n_outputs
        # A negative index counts outputs from the end, wherever they are in the batch.
        for row in rows:
            if C.llama_get_sampled_candidates_count_ith(handle, row - n_outputs) != self.n_candidates:
                raise LlamaError("llama.cpp found no candidates on the device")
        ids = self._rows(C.llama_get_sampled_candidates_ith(handle, first), rows, np.int32)
        logits = self._rows(C.llama_get_sampled_logits_ith(handle, first), rows, np.float32)
        return ids.astype(np.int64), logits

    def _rows(self, first: Any, rows: list[int], dtype: type[Any]) -> npt.NDArray[Any]:
        """A copy of these rows of one of llama.cpp's output buffers, which have n_vocab values a row.

        `first`: a pointer to the first value of `rows[0]`.
        """
        stride, lowest = self._n_vocab, min(rows)
        address = (ctypes.cast(first, ctypes.c_void_p).value or 0) - (rows[0] - lowest) * stride * 4
        n_values = (max(rows) - lowest) * stride + self.n_candidates
        shape = max(rows) - lowest + 1, self.n_candidates
        buffer = memoryview((ctypes.c_byte * (4 * n_values)).from_address(address))
        table: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer, strides=(4 * stride, 4))
        return table[np.subtract(rows, lowest)]

    def close(self) -> None:
        """Frees the chains. Before that, the context must be freed or all seq_ids disabled."""
        for chain in [*self._detached, *self._chains]:
            if chain is not None:
                C.llama_sampler_free(chain)
        self._detached.clear()
        self._chains.clear()


def _top_k_chain(k: int) -> Any:
    params = C.llama_sampler_chain_default_params()
    params.no_perf = True
    chain = C.llama_sampler_chain_init(params)
    C.llama_sampler_chain_add(chain, C.llama_sampler_init_top_k(k))
    return chain
