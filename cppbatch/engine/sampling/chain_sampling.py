"""llama.cpp's own samplers, for requests that want more than numpy does: a chain each, run by a few threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import numpy.typing as npt

from cppbatch.engine.params import SamplingParams
from cppbatch.engine.sampling.logit_processing import recent, window
from cppbatch.engine.sampling.randomness import bits
from cppbatch.engine.sampling.sampling_plan import is_active
from cppbatch.engine.sequence import Seq
from cppbatch.errors import LlamaError
from cppbatch.llama import DrySampler, SamplerChain

Row = npt.NDArray[np.float32]

_THREADS = 4
_BEFORE_ALL = np.array([2**64 - 1], np.uint64)  # a position that no token has


class Chains:
    """Samples rows by llama.cpp's chains. `close` ends its threads."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="cppbatch-sampler")

    def sample(self, work: list[tuple[Seq, Row, int]]) -> list[int | LlamaError]:
        """A token, or why there is none, for each sequence with its row and 32 random bits."""
        if len(work) == 1:
            return [self._sample_one(*work[0])]
        running = [self._threads.submit(self._sample_one, *one) for one in work]  # ctypes releases the GIL
        try:
            return [future.result() for future in running]
        finally:
            wait(running)  # interrupted, nobody may free a chain that is at work

    def _sample_one(self, sequence: Seq, row: Row, seed: int) -> int | LlamaError:
        try:
            if sequence.sampler is None:
                sequence.sampler = _Chain(sequence, self._n_vocab)
            return sequence.sampler.sample(row, seed)
        except LlamaError as error:
            return error

    def close(self) -> None:
        """Waits for the threads."""
        self._threads.shutdown()


class _Chain:
    """A sequence's chain, which is told of every token before it samples the next."""

    def __init__(self, sequence: Seq, n_vocab: int) -> None:
        self._sequence = sequence
        self._chain = _build(sequence, n_vocab)
        self._n_known = sequence.n_tokens - len(recent(sequence, window(sequence.params)))
        self._last = (-1, -1)

    def sample(self, row: Row, seed: int) -> int:
        """A token for this row; 32 random bits decide which."""
        sequence = self._sequence
        if self._last[0] != sequence.n_tokens:  # else it was interrupted, and must not go on twice
            for token in sequence.tokens[self._n_known : sequence.n_tokens].tolist():
                self._n_known += 1
                self._chain.accept(token)
            self._last = sequence.n_tokens, self._chain.sample(row, seed)
        return self._last[1]

    def close(self) -> None:
        """Frees it."""
        self._chain.close()


def _build(sequence: Seq, n_vocab: int) -> SamplerChain:
    """The chain that a request asks for, as llama.cpp's own programs would build it."""
    params = sequence.params
    chain = SamplerChain(n_vocab)
    if params.is_greedy:
        for name in params.samplers:
            if name in ("penalties", "dry") and is_active(name, params):
                _ADD[name](chain, params, sequence)
        return chain.greedy()
    seed = int(bits(np.array([sequence.seed], np.uint64), _BEFORE_ALL)[0] >> np.uint64(32))
    if params.mirostat:
        chain.temperature(max(params.temperature, 1e-3))
        add = chain.mirostat if params.mirostat == 1 else chain.mirostat_v2
        return add(params.mirostat_tau, params.mirostat_eta, seed)
    for name in params.samplers:
        if is_active(name, params):
            _ADD[name](chain, params, sequence)
    if params.adaptive_target >= 0:
        return chain.adaptive_p(params.adaptive_target, params.adaptive_decay, seed)
    return chain.dist()


def _penalties(chain: SamplerChain, params: SamplingParams, sequence: Seq) -> None:
    last_n = _most(params.penalty_last_n, sequence)
    chain.penalties(last_n, params.repetition_penalty, params.frequency_penalty, params.presence_penalty)


def _dry(chain: SamplerChain, params: SamplingParams, sequence: Seq) -> None:
    assert isinstance(sequence.sampling.dry, DrySampler)
    chain.dry(sequence.sampling.dry)


def _most(last_n: int, sequence: Seq) -> int:
    """llama.cpp allocates the whole window, so it is no longer than the sequence may become."""
    return min(last_n, len(sequence.tokens)) if last_n >= 0 else len(sequence.tokens)


_ADD: dict[str, Callable[[SamplerChain, SamplingParams, Seq], object]] = {
    "penalties": _penalties,
    "dry": _dry,
    "top_n_sigma": lambda chain, params, _: chain.top_n_sigma(params.top_n_sigma),
    "top_k": lambda chain, params, _: chain.top_k(params.top_k),
    "typical_p": lambda chain, params, _: chain.typical_p(params.typical_p),
    "top_p": lambda chain, params, _: chain.top_p(params.top_p),
    "min_p": lambda chain, params, _: chain.min_p(params.min_p),
    "xtc": lambda chain, params, _: chain.xtc(params.xtc_probability, params.xtc_threshold),
    "temperature": lambda chain, params, _: chain.temperature(
        params.temperature, params.dynatemp_range, params.dynatemp_exponent
    ),
}
