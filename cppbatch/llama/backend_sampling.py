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
    rebuild its graph in the next decode, which takes some milliseconds.
    """

    def __init__(self, context: _Context, n_candidates: int) -> None:
        self.n_candidates = n_candidates
        self._context = context
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
        """Token ids, ascending, and logits of these rows of the last decode: each [len(rows), n_candidates].

        `n_outputs`: the number of rows of that decode. Raises `LlamaError` when the device did not compute candidates.
        """
        shape = len(rows), self.n_candidates
        ids, logits = np.empty(shape, np.int32), np.empty(shape, np.float32)
        handle = self._context.handle
        for i, row in enumerate(rows):
            output = row - n_outputs  # a negative index counts outputs from the end, wherever they are in the batch
            if C.llama_get_sampled_candidates_count_ith(handle, output) != self.n_candidates:
                raise LlamaError("llama.cpp has found no candidates on the device")
            ctypes.memmove(ids[i].ctypes.data, C.llama_get_sampled_candidates_ith(handle, output), ids[i].nbytes)
            ctypes.memmove(logits[i].ctypes.data, C.llama_get_sampled_logits_ith(handle, output), logits[i].nbytes)
        order = np.argsort(ids, axis=1)
        return np.take_along_axis(ids, order, 1).astype(np.int64), np.take_along_axis(logits, order, 1)

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
