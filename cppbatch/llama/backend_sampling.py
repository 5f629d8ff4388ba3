"""llama.cpp's backend sampling: the device computes the largest logits of each row, so whole rows need not leave it."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.errors import LlamaError
from cppbatch.llama.library import C
from cppbatch.llama.owned import Owned

MAX_CANDIDATES = 128
"""Candidates per row: enough for top-k 40 with penalties on 64 recent tokens."""


class _Context(Protocol):
    n_seq_max: int

    @property
    def handle(self) -> Any: ...


class BackendSampling:
    """Top-k on the device, as a sampler chain that is attached to seq_ids of a context (`llama_set_sampler`).

    Only top-k runs on the device: it has no state and no random numbers, and is the same for all requests. The engine
    samples from the candidates, so the text does not depend on where they were computed. Attaching or detaching a chain
    makes llama.cpp reserve its compute buffers again in the next decode. So every seq_id has a chain from the start,
    and only loses it for requests that need whole rows.

    A decode computes at most one row of each sequence, so drafts are off. llama.cpp 0.5 can compute more
    (`n_outputs_max_per_seq`), but it then overwrites the ids of rows if another seq_id has no row: its graph allocator
    reuses the plan of a graph with the same number of nodes but other output tensors.
    """

    def __init__(self, context: _Context, n_candidates: int, *, n_vocab: int) -> None:
        self.n_candidates = n_candidates
        self._context = context
        self._n_vocab = n_vocab
        self._chains: list[Any] = [None] * context.n_seq_max
        self._detached: deque[Any] = deque()
        self.kept: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] = []
        """The candidates of each part of the last batch, if it was decoded in parts."""
        self.owned = Owned((self._chains, self._detached), _free_chains)
        """The context keeps it: the chains are freed after it."""

    def set_enabled(self, seq_id: int, enabled: bool) -> None:
        """From the next decode on, this seq_id's rows are candidates (enabled) or logits. Raises `LlamaError`."""
        if self.is_enabled(seq_id) == enabled:
            return
        if self._chains[seq_id] is not None:  # freed later: llama.cpp's last graph may still refer to its address
            self._detached.append(self._chains[seq_id])
        self._chains[seq_id] = _top_k_chain(self.n_candidates) if enabled else None  # a chain can be attached only once
        if not C.llama_set_sampler(self._context.handle, seq_id, self._chains[seq_id]) and enabled:
            raise LlamaError("llama.cpp cannot sample on this device")
        while len(self._detached) > 256:
            C.llama_sampler_free(self._detached.popleft())

    def is_enabled(self, seq_id: int) -> bool:
        """Whether this seq_id's rows are candidates."""
        return self._chains[seq_id] is not None

    def candidates(self, rows: list[int], n_outputs: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Token ids, unordered, and logits of these rows of the last decode: each [len(rows), n_candidates].

        They may be views of llama.cpp's buffers, valid until the next decode. `n_outputs`: the number of rows of that
        decode. Raises `LlamaError` if the device did not compute candidates.
        """
        if self.kept:
            return np.concatenate([ids for ids, _ in self.kept])[rows], np.concatenate([x for _, x in self.kept])[rows]
        return self._read(rows, n_outputs)

    def keep(self, seq_ids: list[int]) -> None:
        """Keeps the candidates of the last decode, whose rows belong to these seq_ids, as those of the next rows of the
        batch."""
        rows = [i for i, seq_id in enumerate(seq_ids) if self.is_enabled(seq_id)]
        shape = len(seq_ids), self.n_candidates
        ids, logits = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        if rows:
            ids[rows], logits[rows] = self._read(rows, len(seq_ids))
        self.kept.append((ids, logits))

    def _read(self, rows: list[int], n_outputs: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        handle, first = self._context.handle, rows[0] - n_outputs
        # A negative index counts outputs from the end, wherever they are in the batch. All rows have the same chain.
        if C.llama_get_sampled_candidates_count_ith(handle, first) != self.n_candidates:
            raise LlamaError("llama.cpp returned no candidates from the device")
        ids = self._rows(C.llama_get_sampled_candidates_ith(handle, first), rows, np.int32)
        return ids, self._rows(C.llama_get_sampled_logits_ith(handle, first), rows, np.float32)

    def _rows(self, first: Any, rows: list[int], dtype: type[Any]) -> npt.NDArray[Any]:
        """Returns rows of llama.cpp's output buffer with n_vocab values per row; a view if they are neighbours.

        `first`: a pointer to the first value of `rows[0]`.
        """
        stride, lowest, highest = self._n_vocab, min(rows), max(rows)
        address = (ctypes.cast(first, ctypes.c_void_p).value or 0) - (rows[0] - lowest) * stride * 4
        n_values = (highest - lowest) * stride + self.n_candidates
        shape = highest - lowest + 1, self.n_candidates
        buffer = memoryview((ctypes.c_byte * (4 * n_values)).from_address(address))
        table: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer, strides=(4 * stride, 4))
        return table if rows == list(range(lowest, highest + 1)) else table[np.subtract(rows, lowest)]

    def close(self) -> None:
        """Frees the chains. The context must be freed, or all seq_ids disabled, first."""
        self.owned.close()


@contextmanager
def device_sampling(params: dict[str, Any], n_sequences: int, n_vocab: int) -> Iterator[None]:
    """Contexts made meanwhile with these fields of `llama_context_params` have top-k on the device from the start, for
    contexts that cannot decode. They must be closed before the end."""
    n = min(MAX_CANDIDATES, n_vocab)
    chains = [_top_k_chain(n) for _ in range(n_sequences)]
    pointers = [(i, ctypes.cast(chain, ctypes.c_void_p)) for i, chain in enumerate(chains)]
    configs = (C.llama_sampler_seq_config * n_sequences)(*pointers)
    params |= {"samplers": configs, "n_samplers": n_sequences}
    try:
        yield
    finally:
        del params["samplers"], params["n_samplers"]
        for chain in chains:
            C.llama_sampler_free(chain)


def _free_chains(chains: tuple[list[Any], deque[Any]]) -> None:
    for each in chains:
        for chain in each:
            if chain is not None:
                C.llama_sampler_free(chain)
        each.clear()


def _top_k_chain(k: int) -> Any:
    params = C.llama_sampler_chain_default_params()
    params.no_perf = True
    chain = C.llama_sampler_chain_init(params)
    C.llama_sampler_chain_add(chain, C.llama_sampler_init_top_k(k))
    return chain
