"""llama.cpp's samplers, over one row of logits on the CPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from cppbatch.errors import LlamaError, OutOfRange
from cppbatch.llama.library import C
from cppbatch.llama.owned import Owned

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_MIN_KEEP = 1

_DROP = "drop impossible candidates"

Seeded = Callable[[int], Any]
"""Creates a llama.cpp sampler from 32 bits of seed."""


class DrySampler:
    """llama.cpp's DRY sampler, to be cloned into chains: looking up its sequence breakers in the vocabulary is slow.

    `vocab`: llama.cpp's pointer, used by the constructor only.
    """

    def __init__(
        self, vocab: Any, *, multiplier: float, base: float, allowed_length: int, last_n: int, breakers: tuple[str, ...]
    ) -> None:
        raw = [breaker.encode("utf-8", "replace") for breaker in breakers]
        array = (ctypes.c_char_p * len(raw))(*raw)
        handle = C.llama_sampler_init_dry(
            vocab, _finite(multiplier), _finite(base), allowed_length, last_n, array, len(raw)
        )
        self._owned = Owned(handle, C.llama_sampler_free)

    def clone(self) -> Any:
        """A copy in the initial state: llama.cpp's pointer, which the caller frees."""
        return C.llama_sampler_clone(self._owned.pointer)


class SamplerChain:
    """A chain of samplers, applied in the order of addition. The last one selects (`dist`, `greedy`, `mirostat` ...).

    Each sequence needs its own chain, which remembers recent tokens. `dist` and `xtc` have no state: they are created
    for each row, from the seed of that row. A context manager.
    """

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._samplers: list[Any | Seeded] | None = []  # pointers, `Seeded`, or _DROP
        self._owned = Owned(self._samplers, _free_samplers)

    def penalties(self, last_n: int, repeat: float, frequency: float, presence: float) -> SamplerChain:
        """Lowers the logits of the last `last_n` accepted tokens; 0: off."""
        if last_n < 0:
            raise OutOfRange(f"last_n is {last_n}; it must be 0 or more")
        if not repeat > 0:
            raise OutOfRange(f"the repetition penalty is {repeat}; it must be above 0")
        numbers = _finite(repeat), _finite(frequency), _finite(presence)
        return self._add(lambda: C.llama_sampler_init_penalties(self._n_vocab, last_n, *numbers))

    def dry(self, dry: DrySampler) -> SamplerChain:
        """Lowers the logits of tokens that would make a repetition longer."""
        return self._add(dry.clone)

    def top_n_sigma(self, n: float) -> SamplerChain:
        """Keeps logits at most n standard deviations below the largest."""
        _finite(n)
        self._add(lambda: C.llama_sampler_init_top_n_sigma(n))
        return self._drop()

    def top_k(self, k: int) -> SamplerChain:
        """Keeps the k most likely tokens."""
        return self._add(lambda: C.llama_sampler_init_top_k(k))

    def typical_p(self, p: float) -> SamplerChain:
        """Keeps the most typical tokens whose probabilities sum to p."""
        _finite(p)
        return self._drop()._add(lambda: C.llama_sampler_init_typical(p, _MIN_KEEP))

    def top_p(self, p: float) -> SamplerChain:
        """Keeps the most likely tokens whose probabilities sum to p."""
        _finite(p)
        return self._add(lambda: C.llama_sampler_init_top_p(p, _MIN_KEEP))

    def min_p(self, p: float) -> SamplerChain:
        """Keeps tokens at least p times as likely as the most likely one."""
        _finite(p)
        return self._add(lambda: C.llama_sampler_init_min_p(p, _MIN_KEEP))

    def xtc(self, probability: float, threshold: float) -> SamplerChain:
        """With this probability, drops all tokens above `threshold` except the least likely of them."""
        _finite(probability), _finite(threshold)
        return self._add_seeded(
            # the seed is changed so that its random numbers differ from those of `dist`
            lambda seed: C.llama_sampler_init_xtc(probability, threshold, _MIN_KEEP, _seed(seed ^ 0x9E3779B9))
        )

    def temperature(self, value: float, spread: float = 0.0, exponent: float = 1.0) -> SamplerChain:
        """Divides the logits by `value`.

        With a `spread`, the divisor is between value - spread and value + spread and grows with entropy ** exponent.
        """
        numbers = _finite(value), _finite(spread), _finite(exponent)
        return self._add(lambda: C.llama_sampler_init_temp_ext(*numbers))

    def dist(self) -> SamplerChain:
        """Selects at random, according to the probabilities."""
        return self._add_seeded(lambda seed: C.llama_sampler_init_dist(_seed(seed)))

    def greedy(self) -> SamplerChain:
        """Selects the most likely token."""
        return self._add(C.llama_sampler_init_greedy)

    def mirostat(self, tau: float, eta: float, seed: int) -> SamplerChain:
        """Selects at random so that the surprise stays near `tau`. Has a random generator, seeded once with `seed`."""
        _finite(tau), _finite(eta)
        return self._drop()._add(
            # 100: tokens from which mirostat version 1 estimates the slope, as in the paper and in llama.cpp
            lambda: C.llama_sampler_init_mirostat(self._n_vocab, _seed(seed), tau, eta, 100)
        )

    def mirostat_v2(self, tau: float, eta: float, seed: int) -> SamplerChain:
        """Mirostat version 2: simpler, otherwise the same."""
        _finite(tau), _finite(eta)
        return self._add(lambda: C.llama_sampler_init_mirostat_v2(_seed(seed), tau, eta))

    def adaptive_p(self, target: float, decay: float, seed: int) -> SamplerChain:
        """Selects tokens with a probability near `target`. Has a random generator, seeded once with `seed`."""
        _finite(target), _finite(decay)
        return self._add(lambda: C.llama_sampler_init_adaptive_p(target, decay, _seed(seed)))

    def _add(self, make: Callable[[], Any]) -> SamplerChain:
        samplers = self._open()
        samplers.append(make())
        return self

    def _drop(self) -> SamplerChain:
        self._open().append(_DROP)
        return self

    def _add_seeded(self, make: Seeded) -> SamplerChain:
        self._open().append(make)
        return self

    def accept(self, token: int) -> None:
        """Adds a token to the chain's history: first the prompt tokens, then each new token of the sequence."""
        for sampler in self._open():
            if _is_native(sampler):
                C.llama_sampler_accept(sampler, token)

    def sample(self, logits: npt.NDArray[np.float32], seed: int = 0) -> int:
        """Samples a token from float32[n_vocab], which does not change, with 32 bits of `seed`. Raises as `draw`."""
        return self.draw(logits, seed)[0]

    def draw(self, logits: npt.NDArray[np.float32], seed: int = 0) -> tuple[int, npt.NDArray[Any]]:
        """Samples a token. Also returns the candidates that the samplers have left, with fields `id` and `logit`.

        Raises `OutOfRange` for a row of another size, `LlamaError` if no token can be sampled (all logits are -inf, or
        one is NaN or +inf).
        """
        samplers = self._open()
        if logits.shape != (self._n_vocab,):
            raise OutOfRange(f"a row of logits has shape {logits.shape}; it must be ({self._n_vocab},)")
        if not np.isfinite(logits.max()):
            raise LlamaError(f"no token can be sampled: the largest logit of this row is {logits.max()}")
        possible = np.flatnonzero(logits > -np.inf)
        candidates = np.empty(len(possible), _CANDIDATE)
        candidates["id"] = possible
        candidates["logit"] = logits[possible]
        candidates["p"] = 0.0
        array = C.llama_token_data_array(
            data=ctypes.cast(candidates.ctypes.data, ctypes.POINTER(C.llama_token_data)),
            size=len(possible),
            selected=-1,
            sorted=False,
        )
        for sampler in samplers:
            if sampler is _DROP:
                _drop_impossible(candidates, array)
            else:
                _apply(sampler, array, seed)
        if not 0 <= array.selected < array.size:
            raise LlamaError("no token can be sampled: the samplers left no candidates")
        selected = array.data[array.selected]
        if not math.isfinite(selected.logit):
            raise LlamaError(
                f"no token can be sampled: the samplers turned the logits of this row into {selected.logit}"
            )
        return selected.id, _remaining(candidates, array)

    def _open(self) -> list[Any]:
        if self._samplers is None:
            raise LlamaError("the sampler chain is closed")
        return self._samplers

    def close(self) -> None:
        """Frees the samplers. A second call does nothing."""
        self._samplers = None
        self._owned.close()

    def __enter__(self) -> SamplerChain:
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def _free_samplers(samplers: Iterable[Any]) -> None:
    for sampler in samplers:
        if _is_native(sampler):
            C.llama_sampler_free(sampler)


def _is_native(sampler: Any) -> bool:
    return sampler is not _DROP and not callable(sampler)


def _drop_impossible(candidates: npt.NDArray[Any], array: Any) -> None:
    """Removes candidates whose probability is 0 in float32: samplers that take its logarithm would sort by NaN."""
    remaining = _remaining(candidates, array)
    # exp(-87) is nearly the smallest normal float32
    possible = remaining[remaining["logit"] > remaining["logit"].max() - 87.0]
    remaining[: len(possible)] = possible
    array.size = len(possible)


def _remaining(candidates: npt.NDArray[Any], array: Any) -> npt.NDArray[Any]:
    """The part of `candidates` that the samplers have left in `array`, which may have a later start."""
    address = ctypes.addressof(array.data.contents)
    first = (address - candidates.ctypes.data) // _CANDIDATE.itemsize
    return candidates[first : first + array.size]


def _apply(sampler: Any, array: Any, seed: int) -> None:
    if _is_native(sampler):
        C.llama_sampler_apply(sampler, ctypes.byref(array))
        return
    seeded = sampler(seed)
    C.llama_sampler_apply(seeded, ctypes.byref(array))
    C.llama_sampler_free(seeded)


def _seed(seed: int) -> int:
    """32 bits without 2**32 - 1, which llama.cpp interprets as "random"."""
    return seed % (2**32 - 1)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise OutOfRange(f"a sampling parameter is {value}; it must be a finite number")
    return value
