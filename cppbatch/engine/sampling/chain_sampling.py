"""Sampling with llama.cpp's samplers, one chain per sequence, after processing logits with numpy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from cppbatch.engine.params import SamplingParams
from cppbatch.engine.sampling.random_sampling import random_bits
from cppbatch.engine.sampling_plan import is_active
from cppbatch.engine.sequence import Seq
from cppbatch.errors import LlamaError
from cppbatch.llama import DrySampler, SamplerChain

Row = npt.NDArray[np.float32]

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


# --- logit processing ------------------------------------------------------------------------------------------------
# In-place changes to rows of logits: the request's `logits_processor`, bans, biases, penalties.


log = logging.getLogger("cppbatch.engine")
Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.integer[Any]]


def run_logits_processors(sequences: list[Seq], logits: Logits) -> dict[int, str]:
    """Calls each request's `logits_processor` on its row of float32[len(sequences), n_vocab].

    An object with `process_rows` is called once for all its rows. Returns error messages by row number: an exception
    only ends the requests that share the failing call.
    """
    rows_by_processor: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        if sequence.params.logits_processor is not None:
            rows_by_processor.setdefault(id(sequence.params.logits_processor), []).append(i)
    errors: dict[int, str] = {}
    for rows in rows_by_processor.values():
        processor = sequences[rows[0]].params.logits_processor
        calls = [rows] if hasattr(processor, "process_rows") else [[i] for i in rows]
        for call in calls:
            try:
                _run_processor(processor, sequences, logits, call)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # also SystemExit, which would end the step of all requests
                log.warning("a logits_processor failed", exc_info=error)
                errors |= dict.fromkeys(call, f"logits_processor raised {type(error).__name__}: {error}")
    return errors


def _run_processor(processor: Any, sequences: list[Seq], logits: Logits, numbers: list[int]) -> None:
    """One call of a processor, with copies of the sequences' tokens and views of their rows."""
    tokens = [sequences[i].text_tokens(0).copy() for i in numbers]
    rows = [logits[i] for i in numbers]
    if hasattr(processor, "process_rows"):
        results = processor.process_rows(tokens, rows)
        results = [None] * len(numbers) if results is None else list(results)
        if len(results) != len(numbers):
            raise ValueError(f"process_rows returned {len(results)} rows instead of {len(numbers)}")
    else:
        results = [processor(tokens[0], rows[0])]
    # All results are copied before any row is written: a result may be a view of another row.
    changed = [None if result is None else np.array(result, np.float32) for result in results]
    for row, new in zip(rows, changed, strict=True):
        if new is None:
            continue
        if new.shape != row.shape:
            raise ValueError(f"it returned an array of shape {new.shape}; a row has shape {row.shape}")
        row[:] = new


def apply_bans_and_biases(sequence: Seq, row: Row, ids: Ids | None = None) -> None:
    """Adds the plan's biases and sets banned tokens to -inf.

    `ids`: the token ids of the row's columns, ascending; None: the row is the whole vocabulary.
    """
    plan = sequence.sampling
    if plan.bias_ids.size:
        columns, found = _columns(plan.bias_ids, ids)
        row[columns] += plan.bias[found]
    if plan.banned_ids.size:
        row[_columns(plan.banned_ids, ids)[0]] = -np.inf
    if plan.min_tokens_ids.size and sequence.n_generated < sequence.params.min_tokens:
        row[_columns(plan.min_tokens_ids, ids)[0]] = -np.inf


def apply_penalties(sequence: Seq, row: Row, ids: Ids | None = None) -> None:
    """Applies repetition, frequency and presence penalties to the logits of recent tokens, as llama.cpp does.

    (The repetition penalty is that of arXiv:1909.05858, but negative logits are multiplied.) `ids` as above.
    """
    params = sequence.params
    tokens, counts = np.unique(recent_tokens(sequence, params.penalty_last_n), return_counts=True)
    columns, found = _columns(tokens, ids)
    values, counts = row[columns], counts[found]
    repetition = np.float32(params.repetition_penalty)
    values = np.where(values <= 0, values * repetition, values / repetition)
    row[columns] = values - (counts * params.frequency_penalty + params.presence_penalty)


def _columns(tokens: Ids, ids: Ids | None) -> tuple[Ids, Ids | slice]:
    """The columns of these tokens in a row of `ids`, and the indices of the tokens that the row contains."""
    if ids is None:
        return tokens, slice(None)
    columns = np.minimum(np.searchsorted(ids, tokens), len(ids) - 1)
    found = np.flatnonzero(ids[columns] == tokens)
    return columns[found], found


def recent_tokens(sequence: Seq, last_n: int) -> npt.NDArray[np.int32]:
    """The text among the last `last_n` tokens, int32[n], prompt included; see `first_recent`."""
    return sequence.text_tokens(first_recent(sequence, last_n))


def first_recent(sequence: Seq, last_n: int) -> int:
    """The index of the first of the last `last_n` tokens; -1: of all, limited to the context."""
    most = len(sequence.tokens) if last_n < 0 else last_n
    return max(0 if sequence.params.penalize_prompt else sequence.n_prompt, sequence.n_text - most)


def penalty_window(params: SamplingParams) -> int:
    """The maximum number of recent tokens used by any sampler of the request; -1: all."""
    windows = [params.penalty_last_n, params.dry_penalty_last_n]
    return -1 if -1 in windows else max(windows)
