"""`Sampler`: converts the logits of a step to one token per sequence."""

from __future__ import annotations

import itertools
from math import isfinite
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.engine.grammar.structured_output import GrammarMasks
from cppbatch.engine.request import TokenLogprob
from cppbatch.engine.sampling.chain_sampling import ChainSampler
from cppbatch.engine.sampling.logit_processing import (
    Logits,
    Row,
    apply_bans_and_biases,
    apply_penalties,
    run_logits_processors,
)
from cppbatch.engine.sampling.random_sampling import NO_TOKEN, UInt64, filter_logits, random_bits, random_sample
from cppbatch.engine.sampling.token_logprobs import (
    Logprobs,
    PostSamplingLogprobs,
    PromptScorer,
    RowLogprobs,
    make_token_logprob,
)
from cppbatch.engine.sampling_plan import SamplingType
from cppbatch.engine.sequence import Seq
from cppbatch.engine.step_plan import StepPlan
from cppbatch.engine.vocabulary import Vocabulary
from cppbatch.errors import LlamaError
from cppbatch.llama import BackendSampling

Ids = npt.NDArray[np.int64]

_NO_ID = np.iinfo(np.int32).max


class SamplerOutput(NamedTuple):
    """The result for one sequence of a step: a token, an error, or (embedding engines) a vector."""

    token: int = NO_TOKEN
    logprob: TokenLogprob | None = None
    error: str | None = None
    error_field: str | None = None
    """The request field that caused the error, if any."""
    embedding: bytes | None = None
    """The vector as little-endian float32 (`GenerationEvent.embedding`)."""


class LogitsSource(Protocol):
    """The part of a context that the sampler reads (`cppbatch.llama.Context`)."""

    backend_sampling: BackendSampling | None

    def logits(self, n_outputs: int) -> npt.NDArray[np.float32]: ...


class Sampler:
    """Samples one token for each sequence whose pending tokens were computed in a step.

    Each row of logits passes through these stages, in order: log-probabilities, the request's `logits_processor`, bans
    and biases, the grammar mask, then penalties, filters and sampling (and log-probabilities, with
    `post_sampling_probs`). The last stage runs in numpy for all rows together if possible, else in llama.cpp's samplers
    row by row (`SamplingPlan.sampling_type`). With backend sampling, a row only has the n largest logits, which suffice
    for the same token.
    """

    def __init__(self, vocab: Vocabulary, context: LogitsSource) -> None:
        self._vocab = vocab
        self._context = context
        self._prompt_scorer = PromptScorer(vocab)
        self._grammar_masks = GrammarMasks(vocab.n_tokens)
        self._chain_sampler = ChainSampler(vocab.n_tokens)

    def before_decode(self, plan: StepPlan) -> None:
        """Disables backend sampling for sequences that need all their logits, and enables it for
        others."""
        if backend := self._context.backend_sampling:
            for sequence, n in plan.scheduled:
                if sequence.n_logits(n):
                    is_enough = 0 < sequence.sampling.n_candidates <= backend.n_candidates
                    sees_all = sequence.is_scored or (sequence.constraint and sequence.constraint.is_active)
                    backend.set_enabled(sequence.seq_id, is_enough and not sees_all)

    def sample(self, plan: StepPlan, n_outputs: int) -> list[SamplerOutput]:
        """After the decode, which computed `n_outputs` rows of logits: one result per entry of `plan.outputs()`."""
        sequences = plan.outputs()
        if self._context.backend_sampling is None and not (plan.scores or plan.n_drafted):  # one row of each sequence
            logits = self._context.logits(n_outputs)
            if not plan.padding:
                return self.sample_logits(sequences, logits)
            return self._sample_padded(sequences, plan.rows(), logits)
        rows = plan.rows()  # scoring changes the rows to read
        if plan.scores:
            self._prompt_scorer.score(plan.batch, self._context.logits(n_outputs))
        return self.sample_rows(sequences, rows, n_outputs)

    def sample_rows(self, sequences: list[Seq], rows: list[int], n_outputs: int) -> list[SamplerOutput]:
        """Samples for each sequence from one of the last decode's `n_outputs` rows.

        With draft tokens: first from the row of the last known token, then, if that gave the first draft token, from
        the row of that token, and so on.
        """
        backend = self._context.backend_sampling
        if backend is None:
            return self._sample_host_rows(sequences, rows, n_outputs)
        on_backend = [i for i, sequence in enumerate(sequences) if backend.is_enabled(sequence.seq_id)]
        if not on_backend:
            return self._sample_host_rows(sequences, rows, n_outputs)
        ids, logits = backend.candidates([rows[i] for i in on_backend], n_outputs)
        sampled = _sample_candidates([sequences[i] for i in on_backend], ids, logits)
        if len(on_backend) == len(sequences):
            return sampled
        outputs = dict(zip(on_backend, sampled, strict=True))
        on_host = [i for i in range(len(sequences)) if i not in outputs]
        sampled = self._sample_host_rows([sequences[i] for i in on_host], [rows[i] for i in on_host], n_outputs)
        outputs |= zip(on_host, sampled, strict=True)
        return [outputs[i] for i in range(len(sequences))]

    def _sample_host_rows(self, sequences: list[Seq], rows: list[int], n_outputs: int) -> list[SamplerOutput]:
        logits = self._context.logits(n_outputs)
        return _sample_rows_greedily(sequences, rows, logits) or self.sample_logits(sequences, logits[rows])

    def _sample_padded(self, sequences: list[Seq], rows: list[int], logits: Logits) -> list[SamplerOutput]:
        """Samples if there are padding rows. `rows`: the row of each sequence, ascending.

        The last rows move to the places of padding rows, so that the first `len(rows)` rows belong to sequences.
        """
        n = len(rows)
        if rows[-1] == n - 1:
            return self.sample_logits(sequences, logits[:n])
        holes = sorted(set(range(n)).difference(rows))
        places = [*rows[: n - len(holes)], *holes]
        logits[holes] = logits[rows[n - len(holes) :]]
        order = sorted(range(n), key=places.__getitem__)
        sampled = self.sample_logits([sequences[i] for i in order], logits[:n])
        by_sequence = dict(zip(order, sampled, strict=True))
        return [by_sequence[i] for i in range(n)]

    def sample_logits(self, sequences: list[Seq], logits: Logits) -> list[SamplerOutput]:
        """Samples from whole rows: `logits` is float32[len(sequences), n_vocab] and is changed in place."""
        if outputs := _sample_all_greedily(sequences, logits):
            return outputs
        row_logprobs: dict[int, Logprobs] = {
            i: RowLogprobs(logits[i], sequence.params.logprobs)
            for i, sequence in enumerate(sequences)
            if sequence.params.logprobs is not None and not sequence.params.post_sampling_probs
        }
        errors = run_logits_processors(sequences, logits)
        for sequence, row in zip(sequences, logits, strict=True):
            apply_bans_and_biases(sequence, row)
        self._apply_grammars(sequences, logits, errors)
        tokens = self._select(sequences, logits, errors)
        row_logprobs |= {
            i: _post_sampling_logprobs(sequence, logits[i], tokens[i])
            for i, sequence in enumerate(sequences)
            if sequence.params.logprobs is not None and sequence.params.post_sampling_probs and i not in errors
        }
        return [
            SamplerOutput(error=errors[i], error_field=field_at_fault(sequence, logits[i]))
            if i in errors
            else self._output(sequence, tokens[i], row_logprobs.get(i))
            for i, sequence in enumerate(sequences)
        ]

    def _apply_grammars(self, sequences: list[Seq], logits: Logits, errors: dict[int, str]) -> None:
        constraints = ((i, s.constraint) for i, s in enumerate(sequences) if i not in errors)
        constrained = {i: constraint for i, constraint in constraints if constraint and constraint.is_active}
        if constrained:
            reasons = self._grammar_masks.apply([(constraint, logits[i]) for i, constraint in constrained.items()])
            errors |= {i: reason for i, reason in zip(constrained, reasons, strict=True) if reason}

    def _select(self, sequences: list[Seq], logits: Logits, errors: dict[int, str]) -> list[int]:
        """The token of each row without an error, else `NO_TOKEN`; adds to `errors` where no token is possible."""
        rows: dict[SamplingType, list[int]] = {kind: [] for kind in SamplingType}
        for i, sequence in enumerate(sequences):
            if i in errors:
                continue
            kind = sequence.sampling.sampling_type
            rows[kind].append(i)
            if sequence.params.has_penalties and kind is not SamplingType.CHAIN:
                apply_penalties(sequence, logits[i])
        greedy, random, chain = rows[SamplingType.GREEDY], rows[SamplingType.RANDOM], rows[SamplingType.CHAIN]
        results: list[int | LlamaError] = [_argmax(logits[i]) for i in greedy]
        results += _sample_randomly(sequences, random, logits) if random else []
        results += self._sample_by_chains(sequences, chain, logits) if chain else []
        tokens = [NO_TOKEN] * len(sequences)
        for i, result in zip([*greedy, *random, *chain], results, strict=True):
            if isinstance(result, LlamaError):
                errors[i] = str(result)
            elif result == NO_TOKEN:
                errors[i] = _no_token_message(logits[i])
            else:
                tokens[i] = result
        return tokens

    def _sample_by_chains(self, sequences: list[Seq], rows: list[int], logits: Logits) -> list[int | LlamaError]:
        seeds = (_random_keys(sequences, rows) >> np.uint64(32)).tolist()
        return self._chain_sampler.sample(
            [(sequences[i], logits[i], seed) for i, seed in zip(rows, seeds, strict=True)]
        )

    def _output(self, sequence: Seq, token: int, row_logprobs: Logprobs | None) -> SamplerOutput:
        logprob = make_token_logprob(row_logprobs, token, sequence, self._vocab) if row_logprobs else None
        return SamplerOutput(token, logprob)

    def close(self) -> None:
        """Stops the threads of the sampler chains."""
        self._chain_sampler.close()


def _post_sampling_logprobs(sequence: Seq, row: Row, token: int) -> PostSamplingLogprobs:
    """`row`: after all stages before the filters; `token`: drawn from it."""
    n_top = sequence.params.logprobs or 0
    if sequence.params.is_greedy:
        return PostSamplingLogprobs(np.array([token]), np.zeros(1), n_top)
    if sequence.sampling.sampling_type is SamplingType.RANDOM:
        return PostSamplingLogprobs(*filter_logits(row, sequence.sampling.filters), n_top)
    assert sequence.sampler
    assert sequence.sampler.left
    return PostSamplingLogprobs(*sequence.sampler.left, n_top)


def field_at_fault(sequence: Seq, row: Row) -> str | None:
    """The request field because of which this row yields no token.

    None: caused by the logits themselves or llama.cpp.
    """
    params = sequence.params
    if params.logits_processor is not None:
        return "logits_processor"
    if sequence.constraint and sequence.constraint.error:
        return params.grammar_field
    if row.max() != -np.inf:  # NaN
        return None
    if params.suppress_tokens:
        return "suppress_tokens"
    return params.grammar_field or ("stop_token_ids" if params.stop_token_ids else None)


def _no_token_message(row: Row) -> str:
    return f"no token can be sampled: the largest logit of this row is {row.max()}"


def _sample_all_greedily(sequences: list[Seq], logits: Logits) -> list[SamplerOutput] | None:
    """One argmax over all rows. None if any sequence needs more than that.

    A decode evicts most of this program's code from the CPU's caches, so each line here costs microseconds per step.
    """
    if any(sequence.sampling.greedy_unless is None for sequence in sequences):
        return None
    tokens = logits.argmax(axis=1).tolist()
    if any(token in s.sampling.greedy_unless for s, token in zip(sequences, tokens, strict=True)):  # type: ignore[operator]
        return None
    if not all(isfinite(logits[at]) for at in enumerate(tokens)):
        return None
    return [SamplerOutput(token) for token in tokens]


def _sample_rows_greedily(sequences: list[Seq], rows: list[int], logits: Logits) -> list[SamplerOutput] | None:
    """The same for some of the rows, without copying them."""
    if any(sequence.sampling.greedy_unless is None for sequence in sequences):
        return None
    tokens = [_argmax(logits[row]) for row in rows]
    if any(token == NO_TOKEN or token in s.sampling.greedy_unless for s, token in zip(sequences, tokens, strict=True)):  # type: ignore[operator]
        return None
    return [SamplerOutput(token) for token in tokens]


def _sample_candidates(sequences: list[Seq], ids: npt.NDArray[np.int32], logits: Logits) -> list[SamplerOutput]:
    """Samples from the rows' largest logits, found by the backend.

    `ids`, int32[n, n_candidates]: their token ids. `SamplingPlan.n_candidates` is large enough to give the same token
    as the whole row.
    """
    if outputs := _sample_candidates_greedily(sequences, ids, logits):
        return outputs
    order = np.argsort(ids, axis=1)
    ordered: Ids = np.take_along_axis(ids, order, 1).astype(np.int64)
    logits = np.take_along_axis(logits, order, 1)
    for sequence, row_ids, row in zip(sequences, ordered, logits, strict=True):
        apply_bans_and_biases(sequence, row, row_ids)
        if sequence.params.has_penalties:
            apply_penalties(sequence, row, row_ids)
    is_random = [sequence.sampling.sampling_type is SamplingType.RANDOM for sequence in sequences]
    columns = [NO_TOKEN if random else _argmax(row) for random, row in zip(is_random, logits, strict=True)]
    random_rows = [i for i, random in enumerate(is_random) if random]
    if random_rows:
        for i, column in zip(random_rows, _sample_randomly(sequences, random_rows, logits, ordered), strict=True):
            columns[i] = column
    return [
        SamplerOutput(int(ordered[i, column]))
        if column != NO_TOKEN
        else SamplerOutput(error=_no_token_message(logits[i]), error_field=field_at_fault(sequences[i], logits[i]))
        for i, column in enumerate(columns)
    ]


def _sample_candidates_greedily(
    sequences: list[Seq], ids: npt.NDArray[np.int32], logits: Logits
) -> list[SamplerOutput] | None:
    """One argmax over all candidates; equal logits: the lowest token id. None if any sequence needs more."""
    if any(sequence.sampling.greedy_unless is None for sequence in sequences):
        return None
    maxima = logits.max(axis=1, keepdims=True)
    tokens: list[int] = np.where(logits == maxima, ids, _NO_ID).min(axis=1).tolist()
    if any(token in s.sampling.greedy_unless for s, token in zip(sequences, tokens, strict=True)):  # type: ignore[operator]
        return None
    return [SamplerOutput(token) for token in tokens] if np.isfinite(maxima).all() else None


def _argmax(row: Row) -> int:
    """The column of the largest logit; `NO_TOKEN` if it is not finite. (numpy's argmax returns a NaN's column.)"""
    column = int(row.argmax())
    return column if isfinite(row[column]) else NO_TOKEN


def _sample_randomly(sequences: list[Seq], rows: list[int], logits: Logits, ids: Ids | None = None) -> list[int]:
    """Samples in these rows with the filters and the seed of their sequences.

    Returns a column for each row, or `NO_TOKEN`. `ids`: the columns' token ids.
    """
    filters = [sequences[i].sampling.filters for i in rows]
    all_rows = len(rows) == len(logits)
    selected = logits if all_rows else logits[rows]
    selected_ids = ids if ids is None or all_rows else ids[rows]
    columns: list[int] = random_sample(selected, filters, _random_keys(sequences, rows), selected_ids).tolist()
    return columns


def _random_keys(sequences: list[Seq], rows: list[int]) -> UInt64:
    """64 random bits for the next token of each of these sequences."""
    seeds = np.array([sequences[i].seed for i in rows], np.uint64)
    return random_bits(seeds, np.array([sequences[i].n_generated for i in rows], np.uint64))


class Vectors(Protocol):
    """The part of a context that returns vectors (`cppbatch.llama.Context`)."""

    def embedding(self, seq_id: int) -> npt.NDArray[np.float32]: ...
    def token_embeddings(self, n_outputs: int) -> npt.NDArray[np.float32]: ...


class Pooler:
    """Has the interface of `Sampler`; its `SamplerOutput`s have a vector instead of a token.

    `each_token`: one vector per prompt token (pooling none).
    """

    def __init__(self, context: Vectors, *, each_token: bool = False) -> None:
        self._context = context
        self._each_token = each_token

    def before_decode(self, plan: StepPlan) -> None:
        """Does nothing: every token of an embedding sequence is an output."""

    def sample(self, plan: StepPlan, n_outputs: int) -> list[SamplerOutput]:
        """The vector or vectors of each of the plan's outputs, from the last decode."""
        if self._each_token:
            vectors = self._context.token_embeddings(n_outputs)
            ends = itertools.accumulate(n for _, n in plan.scheduled)
            return [_output(vectors[end - n : end]) for (_, n), end in zip(plan.scheduled, ends, strict=True)]
        return [_output(self._context.embedding(sequence.seq_id)) for sequence in plan.outputs()]

    def close(self) -> None:
        """Does nothing: there are no threads."""


def _output(vector: npt.NDArray[np.float32]) -> SamplerOutput:
    if not np.isfinite(vector).all():
        return SamplerOutput(error="the model's vector contains infinite or NaN values")
    return SamplerOutput(embedding=vector.astype("<f4", copy=False).tobytes())
