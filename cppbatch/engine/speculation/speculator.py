"""Which draft tokens a step computes beside its decode rows: as many as make tokens faster, often none.

Example, default model on two AVX-512 cores, one sequence: a row takes 7 ms, 16 rows take 24 ms. A draft of 15 tokens,
each right with a probability of 0.9 if those before it are, gives 8 tokens on average: 3 ms for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.proposer import Draft, Proposer
from cppbatch.engine.step_cost import TILES, Groups, StepCost

_WORTH = 1.03  # drafts must make tokens this many times as fast as rows alone
_TRY_EVERY = 64  # steps that could have drafts, then one with drafts that are not quite worth it: the time may be wrong
_TRIED = 0.7  # ... but which make tokens at least this many times as fast
_MAX_ROWS = 256  # of a step with drafts: each has a row of logits (192 KiB with a vocabulary of 49,152)
_ALMOST_CERTAIN = 0.99  # no draft counts as more probable: so longer ones are worth less and less

Probabilities = npt.NDArray[np.float64]


@dataclass(slots=True)
class DraftPlan:
    """How many draft tokens each row of a step gets."""

    lengths: list[int]
    """For each row, in the order of the rows; those without a draft of this length get filling tokens."""
    groups: Groups
    """As `StepPlan.row_groups`, with the draft tokens."""
    n_padding: int = 0
    """Draft tokens of each padding row."""


@dataclass(slots=True)
class DraftLimits:
    """What a step allows."""

    tokens: int
    """All draft tokens of the step, those of padding rows included."""
    each: Sequence[int]
    """Tokens after the known ones of each sequence, for which it has cells."""
    has_streams: bool
    """As `KVPool.has_streams`: llama.cpp computes only equally long pieces of consecutive seq_ids together."""


@dataclass
class Speculator:
    """Collects the drafts of the proposers, and chooses how many of their tokens a step computes."""

    proposers: Sequence[Proposer]
    draft_max: int
    """Draft tokens of a sequence in a step at most."""
    _n_untried: int = field(default=0, init=False)  # steps since the last one with drafts

    def plan(self, rows: Sequence[Seq], groups: Groups, cost: StepCost, limits: DraftLimits) -> DraftPlan | None:
        """Sets the drafts of these decoding sequences (`Seq.set_draft`) if that makes tokens faster, else returns None.

        `rows`: by rising seq_id. `groups`: as `StepPlan.row_groups`, without drafts.
        """
        if not cost.knows_rows:
            return None
        drafts = self._propose(rows, limits)
        if not any(drafts):
            return None
        expected = _expected(drafts)
        if limits.has_streams:
            plan, rate = _plan_streams(rows, expected, groups, cost, limits)
        else:
            plan, rate = _plan_unified(expected, cost, limits)
        self._n_untried += 1
        least = _TRIED if self._n_untried >= _TRY_EVERY else _WORTH
        if plan is None or rate < least * len(rows) / cost.relative(groups):
            return None
        self._n_untried = 0
        for sequence, draft, n in zip(rows, drafts, plan.lengths, strict=True):
            if n:
                sequence.set_draft(draft.tokens[:n].tolist() if draft else [], n)
        return plan

    def _propose(self, rows: Sequence[Seq], limits: DraftLimits) -> list[Draft | None]:
        """The best draft for each sequence: the one of which most tokens may be expected to be accepted."""
        most = [
            max(0, min(self.draft_max, each, sequence.n_left - 1)) if sequence.params.speculate else 0
            for sequence, each in zip(rows, limits.each, strict=True)
        ]
        best: list[Draft | None] = [None] * len(rows)
        for proposer in self.proposers:
            for i, draft in enumerate(proposer.propose(rows, most)):
                if draft and (best[i] is None or _gain(draft) > _gain(best[i])):  # type: ignore[arg-type]
                    best[i] = draft
        return best

    def finished(self, sequence: Seq) -> None:
        """The sequence has ended."""
        for proposer in self.proposers:
            proposer.finished(sequence)

    def close(self) -> None:
        """Frees what the proposers hold."""
        for proposer in self.proposers:
            proposer.close()


def _gain(draft: Draft) -> float:
    """The number of its tokens that may be expected to be accepted."""
    a = min(draft.acceptance, _ALMOST_CERTAIN)
    return float(a * (1 - a ** len(draft.tokens)) / (1 - a))


def _expected(drafts: Sequence[Draft | None]) -> Probabilities:
    """float64[n_rows, longest]: the probability that each draft token is accepted; 0 behind the end of a draft."""
    longest = max(len(draft.tokens) for draft in drafts if draft)
    expected = np.zeros((len(drafts), longest))
    for row, draft in zip(expected, drafts, strict=True):
        if draft:
            row[: len(draft.tokens)] = min(draft.acceptance, _ALMOST_CERTAIN)
    return np.multiply.accumulate(expected, axis=1)


Choice = tuple[DraftPlan | None, float]
"""The best plan with drafts that the limits allow, and the tokens that it makes in a unit of `StepCost.relative`."""


def _plan_unified(expected: Probabilities, cost: StepCost, limits: DraftLimits) -> Choice:
    """The draft tokens that are most likely to be accepted, as many as are worth their rows."""
    n_rows = len(expected)
    n_most = min(limits.tokens, _MAX_ROWS - n_rows, int(np.count_nonzero(expected)))
    if n_most <= 0:
        return None, 0.0
    order = np.argsort(-expected, axis=None, kind="stable")[:n_most]
    total = n_rows + np.cumsum(expected.ravel()[order])
    counts = {n for tile in TILES for n in range(tile - n_rows % tile, n_most + 1, tile)} | {n_most}
    rate, n = max((float(total[n - 1]) / cost.relative((n_rows + n,)), n) for n in counts)
    lengths = np.bincount(order[:n] // expected.shape[1], minlength=n_rows)
    return DraftPlan(lengths.tolist(), (n_rows + n,)), rate


def _plan_streams(
    rows: Sequence[Seq], expected: Probabilities, groups: Groups, cost: StepCost, limits: DraftLimits
) -> Choice:
    """The same number of tokens for every row, or for every row that has a draft of this length.

    llama.cpp computes as many tokens of each sequence together as the shortest has. So equal lengths are one pass over
    the weights, for which rows without a draft, and padding rows, get filling tokens. Where only some rows have drafts,
    their draft tokens are passes of their own behind that of the rows.
    """
    n_rows, longest = expected.shape
    n_computed, least = sum(groups), min(limits.each)
    n_most = min(limits.tokens, _MAX_ROWS - n_computed)
    gains = np.cumsum(expected.sum(axis=0)).tolist()
    best: DraftPlan | None = None
    best_rate = 0.0
    for n in range(1, longest + 1):
        if n <= least and n * n_computed <= n_most:
            equal = tuple(size * (1 + n) for size in groups)
            rate = (n_rows + gains[n - 1]) / cost.relative(equal)
            if rate > best_rate:
                best, best_rate = DraftPlan([n] * n_rows, equal, n_padding=n), rate
        drafted = np.flatnonzero(expected[:, n - 1]).tolist()
        if len(drafted) < n_rows and n * len(drafted) <= n_most:
            ragged = (*groups, *(size * n for size in _neighbours([rows[i].seq_id for i in drafted])))
            rate = (n_rows + float(expected[drafted, :n].sum())) / cost.relative(ragged)
            if rate > best_rate:
                lengths = np.where(expected[:, n - 1] > 0, n, 0).tolist()
                best, best_rate = DraftPlan(lengths, ragged), rate
    return best, best_rate


def _neighbours(seq_ids: Sequence[int]) -> list[int]:
    """The sizes of the runs of consecutive numbers. `seq_ids`: rising."""
    ends = [i for i, (one, following) in enumerate(pairwise(seq_ids), 1) if following != one + 1]
    return [stop - start for start, stop in pairwise([0, *ends, len(seq_ids)])]
