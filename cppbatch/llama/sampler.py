"""llama.cpp's sampler chains over one row of logits."""

from __future__ import annotations

import ctypes
import math
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from cppbatch.errors import LlamaError, OutOfRange
from cppbatch.llama.library import C

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class SamplerChain:
    """Samplers applied in the order they were added; the last one must choose (`dist` or `greedy`).

    Owns random state and the window of recent tokens, so each sequence has its own. A context manager.
    """

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        params = C.llama_sampler_chain_default_params()
        params.no_perf = True
        self._handle: Any = C.llama_sampler_chain_init(params)

    def penalties(self, last_n: int, repeat: float, frequency: float, presence: float) -> SamplerChain:
        """Lowers the logits of the last `last_n` accepted tokens (0: off)."""
        if last_n < 0:
            raise OutOfRange(f"last_n is {last_n}; it must be 0 or more")
        if not repeat > 0:
            raise OutOfRange(f"the repetition penalty is {repeat}; it must be above 0")
        finite = self._finite
        return self._add(
            C.llama_sampler_init_penalties(self._n_vocab, last_n, finite(repeat), finite(frequency), finite(presence))
        )

    def top_k(self, k: int) -> SamplerChain:
        """Keeps the k likeliest tokens."""
        return self._add(C.llama_sampler_init_top_k(k))

    def top_p(self, p: float) -> SamplerChain:
        """Keeps the likeliest tokens whose probabilities sum to p."""
        return self._add(C.llama_sampler_init_top_p(self._finite(p), 1))

    def min_p(self, p: float) -> SamplerChain:
        """Keeps tokens at least p times as likely as the likeliest."""
        return self._add(C.llama_sampler_init_min_p(self._finite(p), 1))

    def temperature(self, value: float) -> SamplerChain:
        """Divides the logits by `value`."""
        return self._add(C.llama_sampler_init_temp(self._finite(value)))

    def dist(self, seed: int) -> SamplerChain:
        """Draws from the distribution, with its own random state from `seed` (32 bits)."""
        return self._add(C.llama_sampler_init_dist(seed & 0xFFFFFFFF))

    def greedy(self) -> SamplerChain:
        """Takes the likeliest token."""
        return self._add(C.llama_sampler_init_greedy())

    def _add(self, sampler: Any) -> SamplerChain:
        C.llama_sampler_chain_add(self._open(), sampler)
        return self

    @staticmethod
    def _finite(value: float) -> float:
        if not math.isfinite(value):
            raise OutOfRange(f"a sampling parameter is {value}; it must be a finite number")
        return value

    def accept(self, token: int) -> None:
        """Notes a token that was not sampled here (of the prompt, say), for the penalties."""
        C.llama_sampler_accept(self._open(), token)

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """Chooses a token from float32[n_vocab] and accepts it. The row is not changed.

        Raises `OutOfRange` for a row of another size, `LlamaError` when no token can be chosen (all logits -inf, or
        one of them NaN or +inf).
        """
        if logits.shape != (self._n_vocab,):
            raise OutOfRange(f"a row of logits has the shape {logits.shape}; it must be ({self._n_vocab},)")
        if not np.isfinite(logits.max()):
            raise LlamaError(f"no token can be sampled: the largest logit of this row is {logits.max()}")
        candidates = np.empty(self._n_vocab, _CANDIDATE)
        candidates["id"] = np.arange(self._n_vocab, dtype=np.int32)
        candidates["logit"] = logits
        candidates["p"] = 0.0
        array = C.llama_token_data_array(
            data=ctypes.cast(candidates.ctypes.data, ctypes.POINTER(C.llama_token_data)),
            size=self._n_vocab,
            selected=-1,
            sorted=False,
        )
        C.llama_sampler_apply(self._open(), ctypes.byref(array))
        if not 0 <= array.selected < array.size:
            raise LlamaError("no token can be sampled: the chain has left none")
        token: int = array.data[array.selected].id
        self.accept(token)
        return token

    def _open(self) -> Any:
        if self._handle is None:
            raise LlamaError("the sampler chain is closed")
        return self._handle

    def close(self) -> None:
        """Frees the chain and its samplers. Closing again does nothing."""
        if self._handle is not None:
            C.llama_sampler_free(self._handle)
            self._handle = None

    def __enter__(self) -> SamplerChain:
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
