"""Chooses the draft tokens that a step computes with its decode rows: as many as speed up generation, often none.

Example, default model on two AVX-512 cores, one sequence: a row takes 7 ms, 16 rows take 24 ms. A draft of 15 tokens,
each right with a probability of 0.9 if those before it are, gives 8 tokens on average: 3 ms for each of them.
docs/decisions/0033 has the rules and their measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from cppbatch.config import DRAFT_LOGITS_BYTES
from cppbatch.engine.kv.radix_tree import n_common
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.proposer import MOST_PROBABLE, PRIOR_WEIGHT, Draft, ModelProposer, Proposer
from cppbatch.engine.step_cost import MAX_TIME_RATIO, TILES, Groups, StepCost

_MIN_GAIN = 1.1  # minimum gain of drafts, in expected tokens per second relative to rows alone: estimates are rough
_MIN_GAIN_OF_MODEL = 1.03  # ... of a draft model, whose time is measured; 1.0 after a step that asked it
_MIN_GAIN_OF_TRY = 0.8  # ... of drafts that a try has paid for: computing them teaches what their steps take
_MAX_SLOWDOWN = 2.5  # maximum ratio of step times, for each token that every sequence may expect: the others wait
_UNNOTICED_S = 0.05  # seconds that no reader notices: a step may take them, and so may the first tries
_SAME_END_TOKENS = 32  # tokens: sequences whose ends are at most this far apart end together
_PLAIN_EVERY_STEPS = 32  # steps with drafts in a row; the next one has none, and measures what rows alone take now
_LENGTHS = (1, 2, 3, 4, 5, 7, 9, 11, 13, 15, 16, 23, 31, 47, 63, 64)  # draft tokens to choose from, in streams
_LENGTHS_ON_GPU = (1, 3, 7, 15, 31, 63)  # ... on a GPU: llama.cpp plans its graph again for a new number of rows
_KEPT_PER_STEP = 0.998  # weight left after a step, and after a verified token: half after 350, because texts change
_MAX_STEP_WEIGHT = 0.05  # maximum weight of a new step in what is known: one bad step of many sequences must not decide
_NEW_DRAFT_WEIGHT = 0.2  # weight of a new draft in the typical one of its sequence, and of a new time of sampling
_MIN_WEIGHT_OF_ALL = (
    0.02  # weight of a new draft in the typical one of all sequences: a few bad ones must not be the last
)
_WELL_KNOWN_DRAFTS = (
    10  # drafts of a draft model; before, one sequence is tried if reading the prompts of all takes too long
)
_COLD_STEPS = 16  # first steps with a draft model that are not measured: nothing is in the CPU's caches
_VAIN_STEPS = 16  # steps in a row without drafts that are worth it, before the share limits looking for them

Probabilities = npt.NDArray[np.float64]
"""Arrays named `expected`, float64[rows, draft_max]: that a draft token and all before it are accepted."""


class DraftPlan(msgspec.Struct):
    """The number of draft tokens per row of a step."""

    lengths: list[int]  # for each row, in the order of the rows; shorter drafts get filling tokens
    groups: Groups  # `StepPlan.row_groups` with the draft tokens
    value: float  # expected accepted draft tokens, each as the part of a row's time that it saves
    rate: float  # expected tokens per second
    n_padding: int = 0  # draft tokens of each padding row


class DraftLimits(msgspec.Struct):
    """What a step allows."""

    tokens: int  # maximum draft tokens of the step, including those of padding rows: each has a row of logits
    each: Sequence[int]  # maximum tokens after the known ones of each sequence for which there are cells
    has_streams: bool  # `KVPool.has_streams`: only equally long pieces of consecutive seq_ids are computed together
    is_one_group: bool = True  # whether llama.cpp computes all rows together if they have equally many tokens
    on_gpu: bool = False  # whether only a few different numbers of rows are computed
    is_queue_empty: bool = False  # whether the rows of finished sequences stay empty


class TypicalDraft(NamedTuple):
    """The mean of a draft model's latest drafts; at first, a guess."""

    acceptance: float = 0.7  # probability that a token is accepted if the preceding ones are
    made: float = 0.8  # fraction of calls that give a draft: an unsure draft model stops after its first token
    continues: float = 0.9  # fraction of draft tokens followed by another one, if the draft may be longer

    def updated(self, draft: Draft | None, longest: int, weight: float) -> TypicalDraft:
        """Returns the mean with a new draft of this weight, which could have `longest` tokens."""
        if draft is None:
            return self._replace(made=(1 - weight) * self.made)
        n = len(draft.tokens)
        n_tried = n - 1 + (n < longest)
        new = float(draft.probabilities.sum()) / n, 1.0, (n - 1) / n_tried if n_tried else self.continues
        return TypicalDraft(*[old + weight * (value - old) for old, value in zip(self, new, strict=True)])


class Speculator:
    """Collects the drafts of the proposers, and chooses how many of their tokens a step computes.

    Lookup proposers are called in every step while their drafts are worth it. A draft model is called if its typical
    drafts are worth their time; otherwise it is tried again after 100 times that time. The first tries come sooner.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        draft_max: int,
        *,
        one_group_only: bool = False,
        clock: Callable[[], float] = float,
        wall: Callable[[], float] = float,
    ) -> None:
        """`draft_max`: draft tokens of a sequence in a step at most. `one_group_only`: drafts can only be removed if
        all rows are computed together. `clock`: the CPU time of this thread; by default looking for drafts is free.
        `wall`: the time; by default the steps of a draft model take no longer than expected."""
        self._proposers = proposers
        self._lookups = [proposer for proposer in proposers if not proposer.costs_compute]
        self._model = cast("ModelProposer | None", next((p for p in proposers if p.costs_compute), None))
        self._draft_max, self._one_group_only, self._clock = draft_max, one_group_only, clock
        self._acceptance, self._model_time = _AcceptanceTable(), _ModelTime(wall)
        # Tries of drafts that are not expected to pay, as estimates may be wrong; 4 steps' time in advance.
        self._tries = _TimeBudget(share=0.01, first=4.0)
        self._looks = _TimeBudget(share=0.005)  # looking in vain: with a small model that takes 2% of a step
        self._look = self._began = 0.0  # the last look for drafts: its time, in steps without drafts, and its start
        self._n_vain = self._n_drafted = 0  # steps in a row without drafts that are worth it, and with drafts
        self._sampling_s = 0.0  # time that an accepted token takes beside its row
        self._computed: list[tuple[Seq, Probabilities]] = []  # the drafts of the last plan
        self._uncomputed: dict[Seq, tuple[Draft, int]] = {}  # drafts that were not worth it, and where they start

    def plan(self, rows: Sequence[Seq], groups: Groups, cost: StepCost, limits: DraftLimits) -> DraftPlan | None:
        """Sets the drafts of these decoding sequences (`Seq.set_draft`) if that is faster, else returns None. `rows`:
        by ascending seq_id. `groups`: `StepPlan.row_groups` without drafts."""
        if not cost.knows_rows or cost.is_learning(groups) or (self._one_group_only and not limits.is_one_group):
            return None
        if self._n_drafted >= _PLAIN_EVERY_STEPS:
            self._n_drafted = 0
            return None
        self._acceptance.trust.learn(_KEPT_PER_STEP)
        if self._n_vain >= _VAIN_STEPS and not self._looks.allows(self._look):
            return None
        self._began = self._clock()
        self._model_time.step_begins()
        if self._uncomputed:
            known = [(draft, s.tokens[start : s.n_tokens]) for s, (draft, start) in self._uncomputed.items()]
            self._acceptance.learn([(draft.probabilities[: len(t)], n_common(draft.tokens, t)) for draft, t in known])
        step = _Step(rows, groups, cost, limits, self._sampling_s)
        plan = self._choose(step)
        self._look = (self._clock() - self._began) / step.seconds
        self._n_vain, self._n_drafted = (0, self._n_drafted + 1) if plan else (self._n_vain + 1, 0)
        return plan

    def _choose(self, step: _Step) -> DraftPlan | None:
        """Gets drafts from the proposers, and sets those that are worth it."""
        rows, texts = step.rows, [i for i, s in enumerate(step.rows) if not s.media]  # placeholders are not tokens
        most = [
            max(0, min(self._draft_max, each, s.n_room - 1)) if s.params.speculate and not s.media else 0
            for s, each in zip(rows, step.limits.each, strict=True)
        ]
        drafts: list[Draft | None] = [None] * len(rows)
        expected = np.zeros((len(rows), self._draft_max))
        for proposer in self._lookups:
            made = proposer.propose([rows[i] for i in texts], [most[i] for i in texts])
            if any(made):
                self._acceptance.keep_more_likely(drafts, expected, dict(zip(texts, made, strict=True)))
        asked_s, worth = self._ask_model(self._model, step, drafts, expected, most) if self._model else (0.0, _MIN_GAIN)
        plan, self._computed, self._uncomputed = step.best(expected), [], {}
        if not plan or plan.rate < worth * step.rate_without:
            self._uncomputed = {s: (draft, s.n_tokens) for s, draft in zip(rows, drafts, strict=True) if draft}
            return None
        if asked_s:
            self._model_time.expected_s = asked_s + step.cost.rows_s(plan.groups)
        for sequence, draft, n in zip(rows, drafts, plan.lengths, strict=True):
            if n:
                sequence.set_draft(draft.tokens[:n].tolist() if draft else [], n)
            if n and draft:
                self._computed.append((sequence, draft.probabilities[:n]))
        return plan

    def _ask_model(
        self, model: ModelProposer, step: _Step, drafts: list[Draft | None], expected: Probabilities, most: list[int]
    ) -> tuple[float, float]:
        """Gets drafts from the draft model if its typical ones are worth their time, or as a try. Returns their
        expected seconds (0: not asked, or not known), and the minimum gain of the step's drafts."""
        model.token_s = 1 / step.rate_without
        served = [n if n and model.serves(sequence) else 0 for sequence, n in zip(step.rows, most, strict=True)]
        made, guesses = self._acceptance.typical_drafts(step.rows, served, self._draft_max)
        n_expected = guesses.sum(axis=1)
        is_better = made * n_expected > expected.sum(axis=1)
        if not is_better.any():
            return 0.0, _MIN_GAIN
        plan = step.best(np.where(is_better[:, None], guesses, expected), partial(model.seconds, int(is_better.sum())))
        asked = (is_better * plan.lengths).tolist() if plan else []
        if not plan or not any(asked):
            return 0.0, _MIN_GAIN
        n_asked = sum(n > 0 for n in asked)
        unread = [model.read_seconds(sequence) if n else 0.0 for sequence, n in zip(step.rows, asked, strict=True)]
        read_s = float(np.dot(unread, np.minimum(1.0, (1 + n_expected) / step.n_left)))
        share = float(made[np.array(asked) > 0].mean())
        n_tokens = len(step.rows) + share * plan.value
        with_drafts, without = (len(step.rows) + plan.value) / plan.rate, step.seconds + model.seconds(n_asked, 1)
        expected_s = (read_s + share * with_drafts + (1 - share) * without) / self._model_time.trust.value
        rate_before = max(step.rate_without, before.rate if (before := step.best(expected)) else 0.0)
        worth = self._model_time.worth
        if n_tokens / expected_s <= worth * rate_before:
            worth, asked = _MIN_GAIN_OF_TRY, self._try(model, step, asked, unread, expected_s - n_tokens / rate_before)
            if not any(asked):
                return 0.0, _MIN_GAIN
        began = self._clock()
        others = model.propose(step.rows, asked)
        self._began += self._clock() - began  # tries have their own budget
        for sequence, draft, n in zip(step.rows, others, asked, strict=True):
            if n and (draft or not model.read_seconds(sequence)):
                self._acceptance.learn_typical(sequence, draft, n)
        self._acceptance.keep_more_likely(drafts, expected, dict(enumerate(others)))
        asked_s = model.seconds(sum(n > 0 for n in asked), max(asked)) + read_s
        return asked_s, worth if asked_s or worth == _MIN_GAIN_OF_TRY else _MIN_GAIN

    def _try(self, model: ModelProposer, step: _Step, asked: list[int], unread: list[float], loss: float) -> list[int]:
        """Returns what a try asks of the draft model, if it may lose `loss` seconds: all, one sequence, or nothing."""
        ways = [(asked, max(0.0, loss) + sum(unread))]
        if any(unread) and self._acceptance.n_typical < _WELL_KNOWN_DRAFTS:
            one = min((i for i, n in enumerate(asked) if n), key=unread.__getitem__)
            ways.append(([n * (i == one) for i, n in enumerate(asked)], model.seconds(1, asked[one]) + unread[one]))
        for way, seconds in ways:
            if self._tries.allows(seconds / step.seconds, _UNNOTICED_S / step.seconds):
                return way
        return []

    def verified(self, accepted: Mapping[Seq, int], seconds: float) -> None:
        """Records the draft tokens accepted in the last plan's step, by sequence, 0 for missing ones. `seconds`: the
        time to verify them, in addition to the first row of each sequence."""
        kept = self._acceptance.learn([(draft, accepted.get(sequence, 0)) for sequence, draft in self._computed])
        self._model_time.step_is_verified(kept)
        if n_accepted := sum(accepted.values()):
            self._sampling_s += _NEW_DRAFT_WEIGHT * (seconds / n_accepted - self._sampling_s)

    def finished(self, sequence: Seq) -> None:
        """Called when the sequence has ended, or has a new array of tokens (`Seq.shift`)."""
        self._acceptance.typical.pop(sequence, None)
        self._uncomputed.pop(sequence, None)
        for proposer in self._proposers:
            proposer.finished(sequence)

    def close(self) -> None:
        """Frees the proposers' resources."""
        for proposer in self._proposers:
            proposer.close()


def max_draft_rows(n_vocab: int) -> int:
    """The maximum rows of a step with drafts, limited by the memory of their logits. `n_vocab`: logits per row."""
    return DRAFT_LOGITS_BYTES // (4 * max(1, n_vocab))


class _Trust:
    """The ratio of what came to what was expected, at most 1: estimates that are too high are chosen first."""

    def __init__(self) -> None:
        self._came, self._expected, self.value = 0.0, 0.0, 1.0

    def learn(self, kept: float, came: float = 0.0, expected: float = 0.0) -> None:
        """Adds an observation; earlier ones keep this weight."""
        self._came, self._expected = kept * self._came + came, kept * self._expected + expected
        self.value = min(1.0, (self._came + PRIOR_WEIGHT) / (self._expected + PRIOR_WEIGHT))


class _AcceptanceTable:
    """How far drafts are accepted: their tokens relative to the estimates, and what a draft model typically drafts."""

    def __init__(self) -> None:
        self.trust = _Trust()  # by token
        self.typical: dict[Seq, TypicalDraft] = {}
        self._of_all = TypicalDraft()
        self.n_typical = 2  # drafts of the draft model; the guess counts as two

    def learn(self, drafts: Sequence[tuple[Probabilities, int]]) -> float:
        """Learns from drafts: their probabilities and numbers of right tokens. Returns the weight of earlier drafts."""
        verified = [probabilities[: n + 1] for probabilities, n in drafts]  # with the first wrong token
        kept = max(1 - _MAX_STEP_WEIGHT, _KEPT_PER_STEP ** sum(map(len, verified)))
        self.trust.learn(kept, sum([n for _, n in drafts]), sum([float(each.sum()) for each in verified]))
        return kept

    def keep_more_likely(
        self, drafts: list[Draft | None], expected: Probabilities, others: Mapping[int, Draft | None]
    ) -> None:
        """Replaces the drafts of these rows, and their `expected` tokens, by `others` with more tokens to expect."""
        probabilities = np.zeros(expected.shape)
        for i, other in others.items():
            if other:
                probabilities[i, : len(other.tokens)] = other.probabilities
        new = (self.trust.value * np.minimum(probabilities, MOST_PROBABLE)).cumprod(axis=1)
        for i in np.flatnonzero(new.sum(axis=1) > expected.sum(axis=1)).tolist():
            drafts[i], expected[i] = others[i], new[i]

    def typical_drafts(self, rows: Sequence[Seq], most: Sequence[int], draft_max: int) -> tuple[Probabilities, ...]:
        """The typical drafts of these sequences, of up to `most` tokens: the fractions of calls that give one,
        float64[rows], and their expected tokens. Before its first draft, a sequence has that of all."""
        typical = np.array([self.typical.get(sequence, self._of_all) for sequence in rows])
        acceptance, continues = self.trust.value * np.minimum(typical[:, :1], MOST_PROBABLE), typical[:, 2:]
        at = np.arange(draft_max)
        return typical[:, 1], acceptance ** (at + 1) * continues**at * (at < np.array(most)[:, None])

    def learn_typical(self, sequence: Seq, draft: Draft | None, longest: int) -> None:
        """Learns from a draft of the draft model, which could have `longest` tokens."""
        self.n_typical += 1
        self._of_all = self._of_all.updated(draft, longest, max(_MIN_WEIGHT_OF_ALL, 1 / self.n_typical))
        self.typical[sequence] = self.typical.get(sequence, self._of_all).updated(draft, longest, _NEW_DRAFT_WEIGHT)


class _ModelTime:
    """The time of steps that asked a draft model, as a whole: each part displaces the other from the CPU's caches."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began, self._n_cold = clock, 0.0, _COLD_STEPS
        self._latest = [1.0] * 3  # measured times of the last steps, relative to the expected ones
        self.trust, self.worth, self.expected_s = _Trust(), _MIN_GAIN_OF_MODEL, 0.0  # 0: the step asks no draft model

    def step_begins(self) -> None:
        self.worth = min(_MIN_GAIN, 1.0 if self.expected_s else _MIN_GAIN_OF_MODEL)
        self._n_cold = self._n_cold if self.expected_s else max(1, self._n_cold)
        self.trust.learn(_KEPT_PER_STEP)
        self._began, self.expected_s = self._clock(), 0.0

    def step_is_verified(self, kept: float) -> None:
        if self.expected_s and not self._n_cold:
            self._latest = [*self._latest[1:], (self._clock() - self._began) / self.expected_s]
            self.trust.learn(kept, 1.0, min(MAX_TIME_RATIO, sorted(self._latest)[1]))
        elif self.expected_s:
            self._n_cold -= 1


class _TimeBudget:
    """A share of the time, for what is probably in vain. The unit is a step without drafts."""

    def __init__(self, share: float, first: float = 0.0) -> None:
        self._share, self._left = share, first  # before the first step

    def allows(self, time: float, credit: float = 0.0) -> bool:
        """Adds the share of a step, and takes this time if it is left, up to `credit` in advance. Saves up at most four
        times what is needed: no series of tries after a long time."""
        self._left = min(self._left + self._share, 4 * time)
        is_left = time <= self._left + credit
        self._left -= time if is_left else 0.0
        return is_left


class _Step:
    """The rows of a step, and the drafts for them that give the most tokens per second (docs/decisions/0033)."""

    def __init__(self, rows: Sequence[Seq], groups: Groups, cost: StepCost, limits: DraftLimits, each_s: float) -> None:
        """`each_s`: the time that an accepted token takes beside its row."""
        self.rows, self.groups, self.cost, self.limits, self._each_s = rows, groups, cost, limits, each_s
        self.seconds = cost.rows_s(groups)  # without drafts
        self.rate_without = len(rows) / self.seconds  # tokens per second
        self.n_left = np.array([sequence.n_left for sequence in rows])
        ahead = self.n_left.max() - self.n_left
        self._ahead = ahead if limits.is_queue_empty and ahead.max() <= _SAME_END_TOKENS else None
        if self._ahead is not None:
            self._row_s = np.diff(np.maximum.accumulate(cost.relative_up_to(len(rows))))  # of the first row, the second

    def best(self, expected: Probabilities, draft_s: Callable[[int], float] | None = None) -> DraftPlan | None:
        """Returns the plan with drafts that gives the most tokens per second, None if no drafts fit. `draft_s`: the
        seconds that drafts of this length take before the step."""
        if self.limits.tokens <= 0 or not expected.any():
            return None
        has_streams, best = self.limits.has_streams, None
        # Cases: int[cases][rows], and the expected accepted tokens, float64[rows, cases].
        lengths, gains = self._equally_long(expected) if has_streams else self._most_likely(expected)
        max_s = max(_UNNOTICED_S, _MAX_SLOWDOWN * self.seconds)
        for each, value, least in zip(lengths, self._values(gains), gains.min(axis=0).tolist(), strict=True):
            groups = tuple([n * (1 + each[0]) for n in self.groups]) if has_streams else (len(each) + sum(each),)
            seconds = self.cost.rows_s(groups) + (draft_s(max(each)) if draft_s else 0.0)
            rate = (len(each) + value) / (seconds + self._each_s * value)
            if seconds <= max_s * (1 + least) and (best is None or rate > best.rate):
                best = DraftPlan(each, groups, value, rate, n_padding=each[0] if has_streams else 0)
        return best

    def _most_likely(self, expected: Probabilities) -> tuple[list[list[int]], Probabilities]:
        """The draft tokens that are most likely to be accepted, in numbers that fill tiles of rows."""
        n_rows, draft_max = expected.shape
        n_most = min(self.limits.tokens, int(np.count_nonzero(expected)))
        if self.limits.on_gpu:
            counts = {n_rows * n for n in _LENGTHS_ON_GPU if n_rows * n <= n_most} or {n_most}
        else:
            counts = {n for tile in TILES for n in range(tile - n_rows % tile, n_most + 1, tile)} | {n_most}
        order = np.argsort(-expected, axis=None, kind="stable")[:n_most]
        chosen = np.zeros((n_most, n_rows))
        chosen[np.arange(n_most), order // draft_max] = expected.ravel()[order]
        at = np.array(sorted(counts)) - 1
        return (chosen > 0).cumsum(axis=0)[at].tolist(), chosen.cumsum(axis=0)[at].T

    def _equally_long(self, expected: Probabilities) -> tuple[list[list[int]], Probabilities]:
        """As many tokens for each row: llama.cpp computes as many tokens of each sequence together as the shortest has.
        Rows with shorter drafts, padding rows, and on a GPU drafts that are somewhat shorter get filling tokens."""
        n_most = int(np.count_nonzero(expected.any(axis=0)))
        choices, fits = (_LENGTHS_ON_GPU, 3 * n_most // 2) if self.limits.on_gpu else ((*_LENGTHS, n_most), n_most)
        most = min(*self.limits.each, self.limits.tokens // sum(self.groups), expected.shape[1], fits)
        lengths = sorted({n for n in choices if n <= most})
        return [[n] * len(expected) for n in lengths], expected.cumsum(axis=1)[:, [min(n, n_most) - 1 for n in lengths]]

    def _values(self, gains: Probabilities) -> list[float]:
        """The time saved, in rows, in each case of accepted tokens: by the geometric mean of the sequences' speeds, or
        if all end together and no requests wait, by what their last steps take less."""
        if self._ahead is None:
            shares = np.expm1(np.log1p(gains).sum(axis=0) / len(gains))
        else:
            before = self._ahead[:, None]
            saved = np.sort(before + gains, axis=0) - np.sort(before, axis=0)  # steps with one row, with two ...
            shares = (self._row_s @ saved) / self._row_s.sum()
        return cast("list[float]", (len(gains) * shares).tolist())
