"""Drafts from a draft model: a smaller model with the same vocabulary, in its own context.

Drafts for all sequences of a step together: each decode of the draft context computes one token of each of them, and
the most likely next token is the next draft token. The context has the unified layout, in which any sequences are
computed together, share prefixes without copying, and may have any length. (Q4_0 of 135M weights on two AVX-512 cores,
300 tokens each: 171 tokens/s for one sequence, 270 for four, 351 for 16; per-sequence 159, 308, 501.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.engine.compute_threads import ComputeThreads
from cppbatch.engine.kv.radix_tree import n_common
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.draft_cells import JOINED, DraftCells, DraftMemory, DraftSequence, TargetCells
from cppbatch.engine.speculation.proposer import MOST_PROBABLE, PRIOR_WEIGHT, Draft
from cppbatch.engine.step_cost import StepCost
from cppbatch.errors import LlamaError
from cppbatch.llama import Batch

log = logging.getLogger("cppbatch.engine")

_MIN_PROBABILITY = 0.4  # a less probable token ends a draft, and is not included
_LEAST_READ = 32  # tokens that may be read in any step
_READ_SHARE = 2.0  # relative to the time since the last call: reading prompts at most triples a step's time
_LONGEST_READ_S = 0.2
_FEW_TOKENS = 65_536  # of a vocabulary; for more, see `most_likely`
_SET, _BEST = 64, 24


class DraftContext(DraftMemory, Protocol):
    """The context of a draft model (`cppbatch.llama.Context`), in the unified layout."""

    n_batch: int

    def decode(self, batch: Batch) -> None: ...
    def logits(self, n_outputs: int) -> npt.NDArray[np.float32]: ...
    def use_threads(self, n: int) -> None: ...


class DraftModel(NamedTuple):
    """A draft model opened for an engine."""

    context: DraftContext
    longest: int
    """Tokens of a sequence at most."""


class _Acceptance:
    """The acceptance of draft tokens relative to the draft model's probabilities.

    An unsure draft model may be right more often than predicted, if the model picks the most likely token; and less
    often at a high temperature.
    """

    def __init__(self) -> None:
        self._accepted = self._expected = 0.0

    def observe(self, n_accepted: int, probabilities: Sequence[float]) -> None:
        """`probabilities`: of the tested tokens: the accepted ones, and the first rejected one."""
        decay = 0.98 ** len(probabilities)  # the weight of older tokens
        self._accepted = decay * self._accepted + n_accepted
        self._expected = decay * self._expected + sum(probabilities)

    def factor(self, prior: float = 1.0) -> float:
        """The acceptance relative to the probability; `prior`: its assumed value before any observation."""
        return (self._accepted + PRIOR_WEIGHT * prior) / (self._expected + PRIOR_WEIGHT)


class Guess(NamedTuple):
    """The most likely tokens from some position of a sequence: a draft, and the token at which it ended."""

    start: int
    tokens: list[int]
    probabilities: list[float]


class _Followed:
    """The state of a sequence with drafts."""

    __slots__ = ("acceptance", "guess")

    def __init__(self) -> None:
        self.acceptance = _Acceptance()
        self.guess: Guess | None = None


class DraftModelProposer:
    """A `Proposer` that drafts with a draft model.

    The cells of the draft context follow the sequences: `propose` removes rejected tokens, computes missing ones, and
    then drafts. Prompts are read in pieces, so that they do not delay a step for long; a sequence whose prompt has not
    been read yet gets no draft. A draft ends before a token that is not probable enough.

    If the draft model fails, this is logged, and there are no more drafts.
    """

    costs_compute = True
    kind = "the draft model"

    def __init__(
        self,
        model: DraftModel,
        eog: frozenset[int] = frozenset(),
        *,
        threads: ComputeThreads | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`eog`: tokens after which drafting stops. `threads`: compute threads per decode; None: constant. `clock`: for
        tests."""
        self._context, self._longest = model
        self._eog = eog
        self._threads = threads
        self._clock = clock
        self.cells: DraftCells | TargetCells = self._new_cells()
        self.cost = StepCost()
        """The time of a decode of the draft context."""
        self._batch = self._new_batch()
        self._followed: dict[Seq, _Followed] = {}
        self._acceptance = _Acceptance()
        self._returned_at = clock()
        self._failed = False
        self.token_s = 0.0
        """See `ModelProposer.token_s`."""
        self._decoded: set[int] = set()  # numbers of tokens of the decodes with drafts so far
        self._has_read = False

    def _new_cells(self) -> DraftCells | TargetCells:
        return DraftCells(self._context)

    def _new_batch(self) -> Batch:
        return Batch(self._context.n_batch)

    def seconds(self, n_sequences: int, k: int) -> float:
        """How long drafts of `k` tokens for each of `n_sequences` take, if no prompt has to be read; 0 before any time
        is known."""
        return k * self.cost.rows_s((n_sequences,)) if self.cost.knows_rows else 0.0

    def serves(self, sequence: Seq) -> bool:
        """It drafts for any sequence."""
        return True

    def read_seconds(self, sequence: Seq) -> float:
        """The time to read the unread part of a sequence: at first, its prompt."""
        draft = self.cells.get(sequence)
        return self._read_s(sequence.n_tokens - (draft.n_known if draft else 0) - JOINED)

    def _read_s(self, n: int) -> float:
        """The time to read `n` tokens. Prompts are read together: a token costs as much as in the largest pieces so
        far; before any is known, at most a tenth of a token of the model."""
        token_s = self.cost.token_s(self._context.n_batch)
        return max(0, n) * (token_s if self.cost.knows_prompts else min(token_s, 0.1 * self.token_s))

    def propose(self, sequences: Sequence[Seq], most: Sequence[int]) -> list[Draft | None]:
        """See `Proposer.propose`. Skips sequences for which `most` is 0: their prompts are not read either."""
        drafts: list[Draft | None] = [None] * len(sequences)
        if self._failed:
            return drafts
        # The first draft token needs no cell: only those before the last one are computed.
        lengths = [min(k, self._longest - sequence.n_tokens + 1) for sequence, k in zip(sequences, most, strict=True)]
        wanted = [i for i, k in enumerate(lengths) if k > 0 and self.serves(sequences[i])]
        try:
            if wanted:
                guesses = self._guess([sequences[i] for i in wanted], [lengths[i] for i in wanted])
                for i, guess in zip(wanted, guesses, strict=True):
                    drafts[i] = self._draft(sequences[i], guess, lengths[i]) if guess else None
        except LlamaError as error:
            self._failed = True
            log.error("stopped drafting with %s, which cannot compute: %s", self.kind, error)
            return [None] * len(sequences)
        except BaseException:  # Ctrl-C: the content of the cells is unknown
            self._clear_cells()
            raise
        finally:
            self._returned_at = self._clock()
        return drafts

    def _clear_cells(self) -> None:
        self.cells.clear()

    def _draft(self, sequence: Seq, guess: Guess, most: int) -> Draft | None:
        followed = self._followed[sequence]
        followed.guess = guess
        factor = followed.acceptance.factor(self._acceptance.factor())
        likely = [min(MOST_PROBABLE, factor * p) for p in guess.probabilities]
        n = next((i for i, p in enumerate(likely) if p < _MIN_PROBABILITY), len(likely))
        return Draft(np.asarray(guess.tokens[:n], np.int32), np.asarray(likely[:n])) if n else None

    # --- following the sequences ----------------------------------------------------------------------------------

    def _guess(self, sequences: list[Seq], lengths: list[int]) -> list[Guess | None]:
        """Guesses of up to these lengths; None for a sequence whose prompt has not been read yet."""
        for sequence in sequences:
            self._learn(sequence)
        ready = self._get_ready(sequences, lengths)
        guesses = self._compute_guesses(ready) if ready else {}
        of_sequence = {draft.sequence: guess for draft, guess in guesses.items()}
        return [of_sequence.get(sequence) for sequence in sequences]

    def _get_ready(self, sequences: list[Seq], lengths: list[int]) -> dict[DraftSequence, int]:
        """Returns the sequences whose prompt has been read, and their maximum draft length. Reads a piece of others."""
        if self._threads:
            self._context.use_threads(self._threads.now())
        drafts = self.cells.follow(sequences)
        for draft in drafts:
            if draft.n_missing > JOINED:
                self.cells.share_more(draft)
        length_of = dict(zip(drafts, lengths, strict=True))
        fitting = self._fitting(length_of)
        most = self._most_joined(fitting)
        self._read([draft for draft in fitting if draft.n_missing > most])
        return {draft: length_of[draft] for draft in fitting if draft.n_missing <= most}

    def _most_joined(self, drafts: list[DraftSequence]) -> int:
        """Up to how many missing tokens of each are computed with its first draft token."""
        return min(JOINED, self._context.n_batch // self._context.n_seq_max)

    def _learn(self, sequence: Seq) -> None:
        """Compares the last guess with the actual tokens."""
        followed = self._followed.setdefault(sequence, _Followed())
        guess, followed.guess = followed.guess, None
        if guess is None:
            return
        came = sequence.tokens[guess.start : sequence.n_tokens]
        n_right = n_common(np.asarray(guess.tokens, np.int32), came)
        tested = guess.probabilities[: min(n_right + 1, len(came))]
        for acceptance in (followed.acceptance, self._acceptance):
            acceptance.observe(n_right, tested)

    def _fitting(self, length_of: dict[DraftSequence, int]) -> list[DraftSequence]:
        """Returns the sequences whose missing tokens and drafts fit into cells. Drops the last ones."""
        fitting = list(length_of)
        while fitting and not self.cells.ensure_free(
            sum(draft.n_missing + self._n_drafted_cells(length_of[draft]) for draft in fitting)
        ):
            self.cells.stop_following(fitting.pop())
        return fitting

    def _n_drafted_cells(self, length: int) -> int:
        """Cells that a draft of this length needs after those of the known tokens."""
        return length - 1

    def _read(self, unread: list[DraftSequence]) -> None:
        """Computes a piece of these prompts, shortest remainder first. A prompt that shares a prefix with one being
        read waits for that prefix."""
        if not unread:
            return
        seconds = min(_LONGEST_READ_S, _READ_SHARE * (self._clock() - self._returned_at))
        n_few = sum(draft.n_missing - 1 for draft in unread if draft.n_missing <= JOINED)
        n_left = min(self._context.n_batch, max(_LEAST_READ, n_few, self.cost.prompt_tokens_in(seconds)))
        pieces: list[tuple[DraftSequence, int]] = []
        for draft in sorted(unread, key=lambda each: each.n_missing):
            if n_left and not any(_has_prefix_of(draft, first) for first, _ in pieces):
                n = min(n_left, draft.n_missing - 1)
                pieces.append((draft, n))
                n_left -= n
        self._batch.clear()
        self._add_known(pieces, n_logits=0)
        began = self._clock()
        self._context.decode(self._batch)
        if self._has_read:  # in the first decode, a GPU loads its kernels
            self.cost.observe_prompt(self._batch.n_tokens, self._clock() - began)
        self._has_read = True
        for draft, n in pieces:
            self.cells.computed(draft, n)

    # --- drafting -------------------------------------------------------------------------------------------------

    def _compute_guesses(self, length_of: dict[DraftSequence, int]) -> dict[DraftSequence, Guess]:
        """The most likely tokens of each, until one is not probable enough."""
        guesses: dict[DraftSequence, Guess] = {}
        factors: dict[DraftSequence, float] = {}
        likely = dict.fromkeys(length_of, 1.0)  # probability that all tokens of the guess are accepted
        prior = self._acceptance.factor()
        for draft in length_of:
            assert draft.sequence
            guesses[draft] = Guess(draft.sequence.n_tokens, [], [])
            factors[draft] = self._followed[draft.sequence].acceptance.factor(prior)
        growing = sorted(length_of, key=lambda draft: draft.seq_id)
        while growing:
            tokens, probabilities = self._compute_next(growing, guesses)
            still = []
            for draft, token, p in zip(growing, tokens, probabilities, strict=True):
                guess = guesses[draft]
                guess.tokens.append(token)
                guess.probabilities.append(p)
                likely[draft] *= min(MOST_PROBABLE, factors[draft] * p)
                is_probable = factors[draft] * p >= _MIN_PROBABILITY and token not in self._eog
                if is_probable and len(guess.tokens) < length_of[draft]:
                    still.append(draft)
            growing = still if self._is_worth_another(sum(likely[draft] for draft in still), len(still)) else []
        return guesses

    def _is_worth_another(self, n_expected: float, n_sequences: int) -> bool:
        """Whether one more token for this many sequences takes less time than its accepted tokens can save."""
        if not (n_sequences and self.token_s and self.cost.knows_rows):
            return True
        return n_expected * self.token_s >= self.cost.rows_s((n_sequences,))

    def _compute_next(
        self, growing: list[DraftSequence], guesses: dict[DraftSequence, Guess]
    ) -> tuple[list[int], list[float]]:
        """The most likely next token of each with its probability, from one decode."""
        batch, began = self._batch, self._clock()
        batch.clear()
        if first := not guesses[growing[0]].tokens:
            self._add_known([(draft, draft.n_missing) for draft in growing], n_logits=1)
        else:
            self._add_guessed(growing, [guesses[draft].tokens[-1] for draft in growing])
        self._decode(growing)
        for draft in growing:
            if first:
                self.cells.computed(draft, draft.n_missing)
            else:
                self.cells.guessed(draft, guesses[draft].tokens[-1])
        tokens, probabilities = most_likely(self._logits(growing))
        n = batch.n_tokens
        is_usual = n == batch.n_outputs or n <= 2 * len(growing)  # more tokens without logits take less time than rows
        if is_usual and n in self._decoded:  # in the first decode of `n` tokens, a GPU loads its kernels
            self.cost.observe_rows((n,), self._clock() - began)
        self._decoded.add(n)
        return tokens, probabilities

    def _decode(self, growing: list[DraftSequence]) -> None:
        """Decodes the batch, whose tokens are those of these sequences."""
        self._context.decode(self._batch)

    def _logits(self, growing: list[DraftSequence]) -> npt.NDArray[np.float32]:
        """The logits of the last token of each, float32[n, n_vocab]."""
        return self._context.logits(len(growing))

    def _add_known(self, pieces: Sequence[tuple[DraftSequence, int]], *, n_logits: int) -> None:
        """Adds the next `n` tokens that the cells of each lack to the batch."""
        for draft, n in pieces:
            run = draft.tokens[draft.n_known : draft.n_known + n]
            self._batch.add_run(run, draft.n_known, draft.seq_id, n_logits=n_logits)

    def _add_guessed(self, growing: list[DraftSequence], tokens: list[int]) -> None:
        """Adds the last drafted token of each to the batch."""
        self._batch.add_rows(tokens, [draft.position for draft in growing], [draft.seq_id for draft in growing])

    # --- end ------------------------------------------------------------------------------------------------------

    def finished(self, sequence: Seq) -> None:
        """See `Proposer.finished`. The sequence's cells stay as a prefix for others until they are needed."""
        if sequence in self._followed:
            self._learn(sequence)
            del self._followed[sequence]
            self.cells.finished(sequence)

    def close(self) -> None:
        """Frees nothing: the runtime closes the draft model."""


def most_likely(rows: npt.NDArray[np.float32]) -> tuple[list[int], list[float]]:
    """The most likely token of each row of logits, float32[n, n_vocab], and its probability.

    Of a large vocabulary the probability is somewhat too high if it is small, and takes half of the time: the tokens
    are divided into sets of `_SET`. All tokens of the `_BEST` sets with the largest logits count, and the most likely
    one of each other set.
    """
    n, n_vocab = rows.shape
    tokens = rows.argmax(axis=1)
    top = rows[np.arange(n), tokens][:, None]
    if n_vocab <= _FEW_TOKENS:
        sums = np.exp(rows - top).sum(axis=1)
    else:
        n_sets = n_vocab // _SET
        strides = rows.strides[0], n_sets * rows.strides[1], rows.strides[1]
        sets = np.lib.stride_tricks.as_strided(rows, (n, _SET, n_sets), strides, writeable=False)
        largest = sets.max(axis=1)
        best = np.argpartition(largest, -_BEST, axis=1)[:, -_BEST:]
        sums = np.exp(np.take_along_axis(sets, best[:, None], axis=2) - top[:, None]).sum(axis=(1, 2))
        np.put_along_axis(largest, best, -np.inf, axis=1)
        sums += np.exp(largest - top).sum(axis=1) + np.exp(rows[:, n_sets * _SET :] - top).sum(axis=1)
    return tokens.tolist(), (1 / sums).tolist()


def _has_prefix_of(draft: DraftSequence, first: DraftSequence) -> bool:
    """Whether it shares more missing tokens with `first` than are computed together with a draft."""
    if draft.n_missing <= JOINED or not (draft.may_share and first.may_share and draft.salt == first.salt):
        return False
    assert draft.sequence
    assert first.sequence
    known, other = draft.tokens[: draft.sequence.n_tokens - 1], first.tokens[: first.sequence.n_tokens - 1]
    return n_common(known, other) > draft.n_known + JOINED
