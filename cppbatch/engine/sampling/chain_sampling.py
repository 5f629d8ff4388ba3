"""Sampling with llama.cpp's samplers, one chain per sequence, after processing logits with numpy."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import numpy.typing as npt

from cppbatch.engine.params import SamplingParams
from cppbatch.engine.sampling.logit_processing import Row, first_recent, penalty_window
from cppbatch.engine.sampling.random_sampling import random_bits
from cppbatch.engine.sampling_plan import is_active
from cppbatch.engine.sequence import Seq
from cppbatch.errors import LlamaError
from cppbatch.llama import DrySampler, SamplerChain

_SEED_POSITION = np.array([2**64 - 1], np.uint64)  # the position of a chain's own seed; no token has it


class ChainSampler:
    """Samples rows with the sequences' chains, concurrently on threads. `close` stops the threads."""

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="cppbatch-sampler")

    def sample(self, rows: list[tuple[Seq, Row, int]]) -> list[int | LlamaError]:
        """A token, or the error, for each (sequence, float32[n_vocab], 32 random bits)."""
        if len(rows) == 1:
            return [self._sample_one(*rows[0])]
        running = [self._threads.submit(self._sample_one, *row) for row in rows]  # ctypes releases the GIL
        try:
            return [future.result() for future in running]
        finally:
            wait(running)  # also after an interrupt: a chain must not be freed while a thread uses it

    def _sample_one(self, sequence: Seq, row: Row, seed: int) -> int | LlamaError:
        try:
            if sequence.sampler is None:
                sequence.sampler = _SequenceChain(sequence, self._n_vocab)
            return sequence.sampler.sample(row, seed)
        except LlamaError as error:
            return error

    def close(self) -> None:
        """Waits for the threads and stops them."""
        self._threads.shutdown()


class _SequenceChain:
    """A sequence's sampler chain. It accepts every token of the sequence before the next one is sampled."""

    def __init__(self, sequence: Seq, n_vocab: int) -> None:
        self._sequence = sequence
        self._chain = _build_chain(sequence, n_vocab)
        self._n_accepted = first_recent(sequence, penalty_window(sequence.params))
        self._last = (-1, -1)  # number of tokens before the last sample, and that sample
        self.left: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]] | None = None

    def sample(self, row: Row, seed: int) -> int:
        """Samples a token of float32[n_vocab] with 32 random bits."""
        sequence = self._sequence
        if self._last[0] != sequence.n_text:  # equal after an interrupt: the chain must not advance twice
            for token in sequence.known_tokens(self._n_accepted).tolist():
                self._n_accepted += 1
                if token >= 0:  # else a placeholder of an image
                    self._chain.accept(token)
            token, candidates = self._chain.draw(row, seed)
            self._last = sequence.n_text, token
            if sequence.params.post_sampling_probs:
                self.left = candidates["id"].astype(np.int64), candidates["logit"].astype(np.float64)
        return self._last[1]

    def close(self) -> None:
        """Frees the chain."""
        self._chain.close()


def _build_chain(sequence: Seq, n_vocab: int) -> SamplerChain:
    """The chain that llama.cpp's own programs would build for this request."""
    params = sequence.params
    chain = SamplerChain(n_vocab)
    if params.is_greedy:
        for name in params.samplers:
            if name in ("penalties", "dry") and is_active(name, params):
                _ADD[name](chain, params, sequence)
        return chain.greedy()
    seed = int(random_bits(np.array([sequence.seed], np.uint64), _SEED_POSITION)[0] >> np.uint64(32))
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
    capacity = len(sequence.tokens)
    # llama.cpp allocates the whole window, so it is limited to the maximum tokens of the sequence.
    last_n = min(params.penalty_last_n, capacity) if params.penalty_last_n >= 0 else capacity
    chain.penalties(last_n, params.repetition_penalty, params.frequency_penalty, params.presence_penalty)


def _dry(chain: SamplerChain, params: SamplingParams, sequence: Seq) -> None:
    assert isinstance(sequence.sampling.dry_sampler, DrySampler)
    chain.dry(sequence.sampling.dry_sampler)


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
