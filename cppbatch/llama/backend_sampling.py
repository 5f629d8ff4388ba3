"""The likeliest tokens of each row, found on the device, so that the whole rows of logits need not leave it."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cppbatch.errors import LlamaError
from cppbatch.llama.library import C
from cppbatch.llama.llama_batch import Batch

if TYPE_CHECKING:
    from cppbatch.llama.context import Context

MOST_CANDIDATES = 128
"""Enough for top-k 40 with penalties on 64 recent tokens."""

_MOST_RETIRED = 256


class BackendSampling:
    """llama.cpp's backend sampling, with nothing but top-k in it: no state, no random numbers, the same for everybody.

    What is drawn from the candidates is the engine's affair, so a text does not depend on where they were found.
    Every seq_id has it at first; `use` takes it from one whose whole logits are wanted. Changing that makes llama.cpp
    plan its computation anew, which takes some milliseconds.
    """

    def __init__(self, context: Context, n: int) -> None:
        self.n = n
        self._context = context
        self._chains: list[Any] = [None] * context.n_seq_max
        self._retired: deque[Any] = deque()

    def use(self, seq_id: int, *, wanted: bool) -> None:
        """Whether this seq_id's rows are candidates, or logits, from the next decode on. Raises `LlamaError`."""
        if self.uses(seq_id) == wanted:
            return
        if self._chains[seq_id] is not None:  # llama.cpp's last graph may still know it, and its address
            self._retired.append(self._chains[seq_id])
        self._chains[seq_id] = _top_k_chain(self.n) if wanted else None  # a chain can be attached only once
        if not C.llama_set_sampler(self._context.handle, seq_id, self._chains[seq_id]) and wanted:
            raise LlamaError("llama.cpp cannot sample on this device")
        while len(self._retired) > _MOST_RETIRED:
            C.llama_sampler_free(self._retired.popleft())

    def uses(self, seq_id: int) -> bool:
        """Whether its rows are candidates."""
        return self._chains[seq_id] is not None

    def of(self, rows: list[int], n_outputs: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Token ids, rising, and logits of these rows of the last decode, which had `n_outputs`: each [len(rows), n].

        Raises `LlamaError` when the device has not found them.
        """
        ids, logits = np.empty((len(rows), self.n), np.int32), np.empty((len(rows), self.n), np.float32)
        handle = self._context.handle
        for i, row in enumerate(rows):
            at = row - n_outputs  # counted from the end, whatever places in the batch they had
            if C.llama_get_sampled_candidates_count_ith(handle, at) != self.n:
                raise LlamaError("llama.cpp has found no candidates on the device")
            ctypes.memmove(ids[i].ctypes.data, C.llama_get_sampled_candidates_ith(handle, at), ids[i].nbytes)
            ctypes.memmove(logits[i].ctypes.data, C.llama_get_sampled_logits_ith(handle, at), logits[i].nbytes)
        order = np.argsort(ids, axis=1)
        return np.take_along_axis(ids, order, 1).astype(np.int64), np.take_along_axis(logits, order, 1)

    def close(self) -> None:
        """Frees the samplers; the context must be gone, or no seq_id have one."""
        for chain in [*self._retired, *self._chains]:
            if chain is not None:
                C.llama_sampler_free(chain)
        self._retired.clear()
        self._chains.clear()


def _top_k_chain(k: int) -> Any:
    params = C.llama_sampler_chain_default_params()
    params.no_perf = True
    chain = C.llama_sampler_chain_init(params)
    C.llama_sampler_chain_add(chain, C.llama_sampler_init_top_k(k))
    return chain


def find_candidates_on_device(context: Context) -> bool:
    """Lets the device find candidates, if it can, which is tried out with one token; its rows are logits otherwise."""
    batch = Batch(1)
    batch.add_run(np.zeros(1, np.int32), 0, 0, n_logits=1)
    try:
        candidates = context.use_device_candidates(min(MOST_CANDIDATES, context.model.vocab.n_tokens))
        context.decode(batch)
        candidates.of([0], 1)
    except LlamaError:
        context.drop_device_candidates()
        return False
    finally:
        context.remove(0)
    return True
