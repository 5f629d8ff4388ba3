"""Chooses the draft tokens that a step computes with its decode rows: as many as speed up generation, often none.

Example, default model on two AVX-512 cores, one sequence: a row takes 7 ms, 16 rows take 24 ms. A draft of 15 tokens,
each right with a probability of 0.9 if those before it are, gives 8 tokens on average: 3 ms for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from cppbatch.engine.kv.radix_tree import n_common
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.proposer import Draft, ModelProposer, Proposer
from cppbatch.engine.step_cost import TILES, Groups, StepCost

_WORTH = 1.1  # drafts are expected to make tokens this many times as fast as rows alone: estimates are rough
_WORTH_OF_MODEL = 1.03  # the same of a draft model, whose time is measured; 1.0 after a step for which it was asked
_COLD = 16  # the first steps with a draft model take longer, and so does the first one after steps without
_PRIOR_STEPS = 4.0  # steps whose time is as expected, before any is measured
_MAX_LONGER = 2.0  # times the expected time: a step that takes longer was disturbed
_TRY_SHARE = 0.01  # of the time for tries of a draft model
_TRIED = 0.8  # drafts of a try are computed if they make tokens this many times as fast
_LOOK_SHARE = 0.005  # of the time for drafts that are looked for in vain, after this number of steps in a row:
_VAIN = 16
_FIRST_TRIES = 4.0  # steps whose time its first tries may take
_FIRST_TRIES_S = 0.05  # ... and this much longer: first decodes on a GPU take as long as many steps
_SLOWDOWN = 2.5  # times the time of a token without drafts, for the sequence with the least expected tokens
_SHORT_S = 0.05  # a step that is shorter may have drafts in any case
_ALMOST_CERTAIN = 0.99  # no draft counts as more probable: so longer ones are worth less and less

_TOGETHER = 32  # tokens; sequences that end within this many tokens of each other end together

_PLAIN_EVERY = 32  # steps with drafts; then one without measures what rows alone take now

_LOGITS_BYTES = 32 << 20  # of a step with drafts: 170 rows with a vocabulary of 49,152

_LENGTHS = (1, 2, 3, 4, 5, 7, 9, 11, 13, 15, 16, 23, 31, 47, 63, 64)
"""Of drafts, where sequences have streams: the lengths to choose from."""
_LENGTHS_ON_GPU = (1, 3, 7, 15, 31, 63)
"""The same on a GPU, where llama.cpp plans its graph again for each new number of rows."""
_NEW_VERIFIED_STEP = 0.05  # maximum weight of a new step with drafts in what is known of the latest ones
_FEW_VERIFIED = 600.0  # a step that verifies n draft tokens weighs n / 600 if that is less: few tokens are chance
_REMEMBERED = 0.998  # of the same, for each step: texts change, and wrong drafts must not be the last ones
_PRIOR = 8.0  # accepted tokens that are expected right before anything is known
_NEW = 0.2  # weight of a new draft in what is usual of a sequence's drafts of the draft model
_NEW_OF_ALL = 0.02  # the same for all sequences together: a few bad drafts must not be the last ones
_GUESSED = 2  # first drafts that weigh as much as the guess before them
_WELL_KNOWN = 10  # drafts after which typical ones are known well enough to be tried for all sequences together
_NEW_LOOK = 0.1  # weight of a new time in that of looking for drafts
_NEW_VERIFIED = 0.1  # weight of a new time in that of an accepted token

Probabilities = npt.NDArray[np.float64]


class DraftPlan(msgspec.Struct):
    """The number of draft tokens per row of a step."""

    lengths: list[int]
    """For each row, in the order of the rows; those without a draft of this length get filling tokens."""
    groups: Groups
    """As `StepPlan.row_groups`, with the draft tokens."""
    value: float
    """The expected number of accepted draft tokens, each as the part of a row's time that it saves (`_Step`)."""
    n_padding: int = 0
    """Draft tokens of each padding row."""


class DraftLimits(msgspec.Struct):
    """What a step allows."""

    tokens: int
    """Maximum draft tokens of the step, including those of padding rows: each has a row of logits."""
    each: Sequence[int]
    """Maximum tokens after the known ones of each sequence for which there are cells."""
    has_streams: bool
    """As `KVPool.has_streams`: llama.cpp computes only equally long pieces of consecutive seq_ids together."""
    is_one_group: bool = True
    """Whether llama.cpp computes all rows together if they have equally many tokens."""
    on_gpu: bool = False
    """Whether only a few different numbers of rows are computed."""
    is_queue_empty: bool = False
    """Whether the rows of finished sequences stay empty."""


class Usual(NamedTuple):
    """A typical draft of the draft model."""

    acceptance: float
    """The probability that a token is accepted if the preceding ones are."""
    made: float
    """The fraction of calls that give a draft: an unsure draft model stops after its first token."""
    goes_on: float
    """The fraction of draft tokens followed by another one, if the draft may be longer."""


def _no_time(n: int) -> float:
    return 0.0


_FIRST_GUESS = Usual(acceptance=0.7, made=0.8, goes_on=0.9)  # before anything is known
_NO_DRAFT: Probabilities = np.zeros(0)


class Speculator:
    """Collects the drafts of the proposers, and chooses how many of their tokens a step computes.

    Lookup proposers are called in every step. A draft model is called if its typical drafts are worth their time;
    otherwise it is tried again after 100 times that time. The first tries come sooner.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        draft_max: int,
        *,
        one_group_only: bool = False,
        clock: Callable[[], float] | None = None,
        wall: Callable[[], float] | None = None,
    ) -> None:
        """`draft_max`: draft tokens of a sequence in a step at most. `one_group_only`: drafts can only be
        removed if all rows are computed together. `clock`: the CPU time of this thread; None: looking for drafts counts
        as free. `wall`: the time; None: the time of a draft model's steps is not measured.
        """
        self._looks = _Looks(clock) if clock else None
        self._model_time = _ModelTime(wall)
        self._one_group_only = one_group_only
        self._proposers = proposers
        self._lookups = [proposer for proposer in proposers if not proposer.costs_compute]
        self._model = cast("ModelProposer | None", next((p for p in proposers if p.costs_compute), None))
        self._draft_max = draft_max
        self._model_tried = _Tries()
        self._computed: list[tuple[Seq, Probabilities]] = []  # the drafts of the last plan
        self._shadow: list[tuple[Seq, int, Draft]] = []  # drafts that were not computed, and where they start
        self._accepted = self._expected = 0.0  # verified tokens of the latest drafts: the estimates may be too high
        self._usual: dict[Seq, Usual] = {}  # drafts of the draft model
        self._usual_of_all, self._n_usual = _FIRST_GUESS, _GUESSED
        self._since_plain = 0  # steps with drafts since one without
        self._accepted_s = 0.0  # time that an accepted token takes beside its row: its sampling

    def plan(self, rows: Sequence[Seq], groups: Groups, cost: StepCost, limits: DraftLimits) -> DraftPlan | None:
        """Sets the drafts of these decoding sequences (`Seq.set_draft`) if that is faster, else returns None.

        `rows`: by ascending seq_id. `groups`: as `StepPlan.row_groups`, without drafts.
        """
        if not cost.knows_rows or cost.is_learning(groups) or (self._one_group_only and not limits.is_one_group):
            return None
        if self._since_plain >= _PLAIN_EVERY:
            self._since_plain = 0
            return None
        self._expected *= _REMEMBERED
        self._accepted *= _REMEMBERED
        if self._looks is None:
            return self._look(rows, groups, cost, limits)
        if not self._looks.may_look(cost.rows_s(groups)):
            return None
        plan = self._look(rows, groups, cost, limits)
        self._looks.looked(is_worth=plan is not None)
        return plan

    def _look(self, rows: Sequence[Seq], groups: Groups, cost: StepCost, limits: DraftLimits) -> DraftPlan | None:
        """Like `plan`."""
        self._model_time.starts()
        self._learn_from_shadow()
        most = [
            max(0, min(self._draft_max, each, sequence.n_room - 1))
            if sequence.params.speculate and not sequence.media
            else 0
            for sequence, each in zip(rows, limits.each, strict=True)
        ]
        drafts: list[Draft | None] = [None] * len(rows)
        for proposer in self._lookups:
            _take_better(drafts, _of_text(proposer, rows, most))
        step = _Step(
            rows, groups, cost, limits, draft_max=self._draft_max, trust=self._trust, accepted_s=self._accepted_s
        )
        asked_s, is_try = self._ask_model(self._model, step, drafts, most) if self._model else (0.0, False)
        plan, rate = step.best([_acceptance(draft) for draft in drafts])
        worth = self._model_time.worth if asked_s else _WORTH
        if plan is None or rate < (_TRIED if is_try else worth) * step.rate_without:
            self._since_plain = 0
            self._shadow = [(s, s.n_tokens, draft) for s, draft in zip(rows, drafts, strict=True) if draft]
            return None
        self._since_plain += 1
        if asked_s:
            self._model_time.expects(asked_s + cost.rows_s(plan.groups))
        self._computed = []
        for sequence, draft, n in zip(rows, drafts, plan.lengths, strict=True):
            if n:
                sequence.set_draft(draft.tokens[:n].tolist() if draft else [], n)
            if n and draft:
                self._computed.append((sequence, draft.probabilities[:n]))
        return plan

    @property
    def _trust(self) -> float:
        """The ratio of right draft tokens to expected ones: estimates that are too high are chosen first."""
        return min(1.0, (self._accepted + _PRIOR) / (self._expected + _PRIOR))

    def verified(self, accepted: Mapping[Seq, int], seconds: float) -> None:
        """Records the draft tokens accepted in the last plan's step, by sequence, 0 for missing ones. `seconds`: the
        time to verify them, in addition to the first row of each sequence."""
        kept = self._learn([(draft, accepted.get(sequence, 0)) for sequence, draft in self._computed])
        self._model_time.verified(kept)
        if n_accepted := sum(accepted.values()):
            self._accepted_s += _NEW_VERIFIED * (seconds / n_accepted - self._accepted_s)

    def _learn_from_shadow(self) -> None:
        """Learns from the drafts that were not computed: how far they are the text that came."""
        known = [(draft, sequence.tokens[start : sequence.n_tokens]) for sequence, start, draft in self._shadow]
        self._learn([(draft.probabilities[: len(text)], n_common(draft.tokens, text)) for draft, text in known])
        self._shadow = []

    def _learn(self, drafts: Sequence[tuple[Probabilities, int]]) -> float:
        """Learns from the probabilities of drafts and their numbers of right tokens. Returns the weight of earlier
        ones."""
        verified = [probabilities[: n + 1] for probabilities, n in drafts]  # with the first wrong token
        kept = 1 - min(_NEW_VERIFIED_STEP, sum(map(len, verified)) / _FEW_VERIFIED)
        self._accepted = kept * self._accepted + sum(n for _, n in drafts)
        self._expected = kept * self._expected + sum(float(each.sum()) for each in verified)
        return kept

    def _ask_model(
        self, model: ModelProposer, step: _Step, drafts: list[Draft | None], most: list[int]
    ) -> tuple[float, bool]:
        """Gets drafts from the draft model if its typical ones are worth their time, or as a try. Returns their
        expected seconds (0: the model is not asked, or its time is not known), and whether they are a try."""
        model.token_s = 1 / step.rate_without
        before = [_acceptance(draft) for draft in drafts]
        usual = [self._usual.get(sequence, self._usual_of_all) for sequence in step.rows]
        served = [n if n and model.serves(sequence) else 0 for sequence, n in zip(step.rows, most, strict=True)]
        guesses, n_guessed = _of_usual(usual, served)
        is_better = [
            each.made * n > (float(known.sum()) if len(known) else 0.0)
            for each, n, known in zip(usual, n_guessed, before, strict=True)
        ]
        n_asked = sum(is_better)
        if not n_asked:
            return 0.0, False
        plan, rate = step.best(
            [guess if better else known for guess, known, better in zip(guesses, before, is_better, strict=True)],
            partial(model.seconds, n_asked),
        )
        if plan is None:
            return 0.0, False
        asked = [n if better else 0 for n, better in zip(plan.lengths, is_better, strict=True)]
        n_asked = sum(n > 0 for n in asked)
        if not n_asked:
            return 0.0, False
        read_s = sum(
            model.read_seconds(sequence) * min(1.0, (1 + expected) / sequence.n_left)
            for sequence, expected, n in zip(step.rows, n_guessed, asked, strict=True)
            if n
        )
        share = sum(each.made for each, n in zip(usual, asked, strict=True) if n) / n_asked
        n_tokens = len(step.rows) + share * plan.value
        with_drafts, without = (len(step.rows) + plan.value) / rate, step.seconds + model.seconds(n_asked, 1)
        expected_s = (read_s + share * with_drafts + (1 - share) * without) / self._model_time.trust
        rate_before = max(step.rate_without, step.best(before)[1])
        self._model_tried.step(step.seconds)
        is_try = n_tokens / expected_s <= self._model_time.worth * rate_before
        if is_try:
            asked = self._try_model(model, step, asked, max(0.0, expected_s - n_tokens / rate_before))
            n_asked = sum(n > 0 for n in asked)
            if not n_asked:
                return 0.0, False
        with self._looks.pause() if self._looks else nullcontext():
            made = model.propose(step.rows, asked)
        for sequence, draft, n in zip(step.rows, made, asked, strict=True):
            if n and (draft or not model.read_seconds(sequence)):
                self._n_usual += 1
                acceptance = float(draft.probabilities.sum()) / len(draft.tokens) if draft else 0.0
                new_of_all = max(_NEW_OF_ALL, 1 / self._n_usual)
                usual_of_all = _mean(self._usual_of_all, draft, acceptance, n, new_of_all)
                self._usual[sequence] = _mean(self._usual.get(sequence, usual_of_all), draft, acceptance, n, _NEW)
                self._usual_of_all = usual_of_all
        _take_better(drafts, made)
        return model.seconds(n_asked, max(asked)) + read_s, is_try

    def _try_model(self, model: ModelProposer, step: _Step, asked: list[int], lost_s: float) -> list[int]:
        """What to ask of the draft model although its drafts are expected to lose `lost_s`: that is what a try takes of
        the time for tries, and what reading prompts takes. If there are prompts to read, and not enough time for all, a
        draft for one sequence, which is only compared with its text, until typical drafts are known. Else nothing."""
        unread = [model.read_seconds(sequence) if n else 0.0 for sequence, n in zip(step.rows, asked, strict=True)]
        if self._model_tried.may_take(lost_s + sum(unread)):
            return asked
        one = min((i for i, n in enumerate(asked) if n), key=unread.__getitem__)
        one_s = model.seconds(1, asked[one]) + unread[one]
        if any(unread) and self._n_usual < _WELL_KNOWN and self._model_tried.may_take(one_s):
            return [n if i == one else 0 for i, n in enumerate(asked)]
        return [0] * len(asked)

    def finished(self, sequence: Seq) -> None:
        """Called when the sequence has ended, or has a new array of tokens (`Seq.shift`)."""
        self._usual.pop(sequence, None)
        self._shadow = [each for each in self._shadow if each[0] is not sequence]
        for proposer in self._proposers:
            proposer.finished(sequence)

    def close(self) -> None:
        """Frees the proposers' resources."""
        for proposer in self._proposers:
            proposer.close()


def max_draft_rows(n_vocab: int) -> int:
    """The maximum rows of a step with drafts, limited by the memory of their logits. `n_vocab`: logits per row."""
    return _LOGITS_BYTES // (4 * max(1, n_vocab))


class _Tries:
    """The time budget for drafts of a draft model that are probably not worth it, since estimates may be wrong."""

    def __init__(self) -> None:
        self._first_s = _FIRST_TRIES_S
        self._left_s: float | None = None

    def step(self, seconds: float) -> None:
        """Called before a step, with its time without drafts."""
        self._left_s = (_FIRST_TRIES * seconds if self._left_s is None else self._left_s) + _TRY_SHARE * seconds

    def may_take(self, seconds: float) -> bool:
        """Whether a try may take this long; if so, takes it from the budget."""
        assert self._left_s is not None
        if seconds <= self._first_s:
            self._first_s -= seconds
            return True
        if seconds > self._left_s:
            return False
        self._left_s = min(self._left_s - seconds, _FIRST_TRIES * seconds)  # no series of tries after a long time
        return True


class _Looks:
    """The time budget for draft lookups. They take less than a millisecond, but a step of many sequences of a small
    model takes little more than ten; while drafts are not worth it, `_LOOK_SHARE` of the time suffices to notice
    repetition."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._n_vain = 0  # looks since drafts were worth it
        self._usual_s = 0.0  # of a look
        self._left_s = 0.0
        self._began = 0.0

    def may_look(self, step_s: float) -> bool:
        """Whether to look for drafts before a step, given its time without drafts."""
        self._left_s = min(self._left_s + _LOOK_SHARE * step_s, self._usual_s)
        self._began = self._clock()
        return self._n_vain < _VAIN or self._left_s >= self._usual_s

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A draft model computes: its time is limited by `_Tries`."""
        began = self._clock()
        yield
        self._began += self._clock() - began

    def looked(self, *, is_worth: bool) -> None:
        """Records a lookup."""
        self._n_vain = 0 if is_worth else self._n_vain + 1
        seconds = self._clock() - self._began
        usual = self._usual_s or seconds
        self._usual_s = usual + _NEW_LOOK * (min(seconds, 2 * usual) - usual)  # the thread may have had to wait
        self._left_s = 0.0


class _ModelTime:
    """The time of steps for which a draft model was asked, measured as a whole: each part takes longer than alone,
    because the other has used the CPU's caches."""

    def __init__(self, clock: Callable[[], float] | None) -> None:
        """`clock`: None: nothing is measured."""
        self._clock = clock
        self._n_cold = _COLD
        self._n_measured = self._taken = 0.0  # the latest steps, and their times as multiples of the expected ones
        self._latest: list[float] = []  # the last three of them: the one in the middle counts
        self._began = self._expects_s = 0.0
        self._is_warm = False  # the step before had drafts of the model

    def starts(self) -> None:
        """A step is planned."""
        self._is_warm = self._expects_s > 0
        if not self._is_warm:
            self._n_cold = max(1, self._n_cold)
        self._expects_s = 0.0
        self._n_measured *= _REMEMBERED
        self._taken *= _REMEMBERED
        if self._clock:
            self._began = self._clock()

    def expects(self, seconds: float) -> None:
        """The draft model was asked for drafts of the step. `seconds`: the expected time of both."""
        self._expects_s = seconds

    def verified(self, kept: float) -> None:
        """The drafts of the step were verified. `kept`: the weight of earlier steps."""
        if not (self._expects_s and self._clock):
            return
        if self._n_cold:
            self._n_cold -= 1
            return
        self._latest = [*self._latest[-2:], (self._clock() - self._began) / self._expects_s]
        self._n_measured = kept * self._n_measured + 1
        self._taken = kept * self._taken + min(sorted(self._latest)[len(self._latest) // 2], _MAX_LONGER)

    @property
    def worth(self) -> float:
        """How many times as fast drafts of the model are expected to make tokens, at least."""
        return min(_WORTH, 1.0 if self._is_warm else _WORTH_OF_MODEL)

    @property
    def trust(self) -> float:
        """The ratio of the expected to the measured time of the latest steps, at most 1."""
        return min(1.0, (self._n_measured + _PRIOR_STEPS) / (self._taken + _PRIOR_STEPS))


class _Step:
    """The rows of a step, the cost of drafts for them, and the time saved by accepted tokens.

    The geometric mean of the sequences' speeds counts, not their sum: 8 tokens more for one of 16 sequences are not
    worth a step in which the others wait twice as long. For equal drafts both are the same. So the value of m accepted
    tokens is less than m rows if few sequences get them.

    But if no requests wait and the sequences end at about the same time, as samples of a prompt do, one that is ahead
    leaves its row empty in the last steps. If m of n such sequences get a token ahead, the last step has n - m rows:
    that saves t(n) - t(n - m).
    """

    def __init__(
        self,
        rows: Sequence[Seq],
        groups: Groups,
        cost: StepCost,
        limits: DraftLimits,
        *,
        draft_max: int,
        trust: float,
        accepted_s: float,
    ) -> None:
        self._draft_max = draft_max
        self._trust = trust
        self._accepted_s = accepted_s
        self.rows = rows
        self.groups = groups
        self.cost = cost
        self.limits = limits
        self.seconds = cost.rows_s(groups)
        """Without drafts."""
        self.max_seconds = max(_SHORT_S, _SLOWDOWN * self.seconds)
        """With drafts, for each token that every sequence may expect."""
        self.rate_without = len(rows) / self.seconds
        """Tokens/s without drafts."""
        left = np.array([sequence.n_left for sequence in rows])
        ahead = left.max() - left
        self._ahead = ahead if limits.is_queue_empty and ahead.max() <= _TOGETHER else None
        self._row_s = np.zeros(0)
        if self._ahead is not None:
            self._row_s = np.diff(np.maximum.accumulate(cost.relative_up_to(len(rows))))  # of the first row, the second

    def _values(self, gains: Probabilities) -> list[float]:
        """The time saved, in rows, if this many tokens of each sequence are accepted. `gains`: float64[rows, cases]."""
        n = len(gains)
        if self._ahead is None:
            shares = np.expm1(np.log1p(gains).sum(axis=0) / n)
        else:
            before = self._ahead[:, None]
            saved = np.sort(before + gains, axis=0) - np.sort(before, axis=0)  # steps with one row, with two ...
            shares = (self._row_s @ saved) / self._row_s.sum()
        values: list[float] = (n * shares).tolist()
        return values

    def best(self, drafts: Sequence[Probabilities], draft_s: Callable[[int], float] = _no_time) -> Choice:
        """The best plan for these drafts, given as the acceptance probabilities of their tokens (`_acceptance`).
        `draft_s`: the seconds that drafts of this length take before the step."""
        longest = max(map(len, drafts))
        if not longest:
            return None, 0.0
        expected = np.zeros((len(drafts), longest))
        for row, draft in zip(expected, drafts, strict=True):
            row[: len(draft)] = draft
        expected *= self._trust ** np.arange(1, longest + 1)
        if self.limits.has_streams:
            return self._best_in_streams(expected, draft_s)
        return self._best_in_unified(expected, draft_s)

    def _best_in_unified(self, expected: Probabilities, draft_s: Callable[[int], float]) -> Choice:
        """The draft tokens most likely to be accepted, as many as are worth their rows."""
        n_rows = len(expected)
        n_most = min(self.limits.tokens, int(np.count_nonzero(expected)))
        if n_most <= 0:
            return None, 0.0
        order = np.argsort(-expected, axis=None, kind="stable")[:n_most]
        chosen = expected.ravel()[order]
        rows = order // expected.shape[1]

        counts = {n for tile in TILES for n in range(tile - n_rows % tile, n_most + 1, tile)} | {n_most}
        if self.limits.on_gpu:
            counts = {n_rows * n for n in _LENGTHS_ON_GPU if n_rows * n <= n_most} or {n_most}
        best: DraftPlan | None = None
        best_rate = 0.0
        for n in sorted(counts):
            gain = np.bincount(rows[:n], chosen[:n], n_rows).astype(np.float64, copy=False)
            lengths = np.bincount(rows[:n], minlength=n_rows).tolist()
            (value,) = self._values(gain[:, None])
            rate = self._rate(value, (n_rows + n,), gain.min, draft_s(max(lengths)))
            if rate and rate >= best_rate:
                best, best_rate = DraftPlan(lengths, (n_rows + n,), value), rate
        return best, best_rate

    def _best_in_streams(self, expected: Probabilities, draft_s: Callable[[int], float]) -> Choice:
        """The same number of tokens for every row.

        llama.cpp computes as many tokens of each sequence together as the shortest has. So equal lengths are one pass
        over the weights, for which rows without a draft, and padding rows, get filling tokens.
        """
        n_rows, longest = expected.shape
        n_computed, least = sum(self.groups), min(self.limits.each)
        n_most = min(least, self.limits.tokens // n_computed)
        if self.limits.on_gpu:
            n_most = min(n_most, self._draft_max)
            lengths = [n for n in _LENGTHS_ON_GPU if 2 * n <= 3 * longest]  # somewhat shorter drafts are filled
        else:
            lengths = [*(n for n in _LENGTHS if n < longest), longest]
        lengths = [n for n in lengths if n <= n_most]
        if not lengths:
            return None, 0.0
        gains = np.cumsum(expected, axis=1)[:, [min(n, longest) - 1 for n in lengths]]
        best: DraftPlan | None = None
        best_rate = 0.0
        for i, (n, value) in enumerate(zip(lengths, self._values(gains), strict=True)):
            groups = tuple(size * (1 + n) for size in self.groups)
            rate = self._rate(value, groups, gains[:, i].min, draft_s(n))
            if rate > best_rate:
                best, best_rate = DraftPlan([n] * n_rows, groups, value, n_padding=n), rate
        return best, best_rate

    def _rate(self, value: float, groups: Groups, least: Callable[[], float], draft_s: float) -> float:
        """Tokens/s of a step whose accepted draft tokens save the time of `value` rows; `least()`: those accepted of
        the sequence with the fewest; `draft_s`: seconds before the step. 0 if it would wait too long for its next
        token."""
        seconds = draft_s + self.cost.rows_s(groups)
        if seconds > self.max_seconds and seconds > self.max_seconds * (1 + least()):
            return 0.0
        return (len(self.rows) + value) / (seconds + self._accepted_s * value)


def _acceptance(draft: Draft | None) -> Probabilities:
    """The probability that each token of the draft is accepted; their sum is the number of tokens to expect."""
    return _NO_DRAFT if draft is None else np.minimum(draft.probabilities, _ALMOST_CERTAIN).cumprod()


def _of_usual(usual: Sequence[Usual], most: Sequence[int]) -> tuple[list[Probabilities], list[float]]:
    """The same for typical drafts of up to this many tokens, and the numbers of tokens to expect."""
    at = np.arange(max(most))
    acceptance = np.minimum([each.acceptance for each in usual], _ALMOST_CERTAIN)[:, None]
    goes_on = np.array([each.goes_on for each in usual])[:, None]
    probabilities = acceptance ** (at + 1) * goes_on**at
    n_expected: list[float] = (probabilities * (at < np.array(most)[:, None])).sum(axis=1).tolist()
    return [row[:n] for row, n in zip(probabilities, most, strict=True)], n_expected


def _mean(old: Usual, draft: Draft | None, acceptance: float, longest: int, new: float) -> Usual:
    """Running means. `acceptance`: mean probability of its tokens. `longest`: tokens that the draft could have. `new`:
    its weight."""
    if draft is None:
        return old._replace(made=(1 - new) * old.made)
    n = len(draft.tokens)
    n_tried = n - 1 + (n < longest)
    went_on = (n - 1) / n_tried if n_tried else old.goes_on
    return Usual(
        old.acceptance + new * (acceptance - old.acceptance),
        old.made + new * (1 - old.made),
        old.goes_on + new * (went_on - old.goes_on),
    )


def _of_text(proposer: Proposer, rows: Sequence[Seq], most: Sequence[int]) -> list[Draft | None]:
    """The proposer's drafts. Excludes sequences with images or audio, whose placeholders are not tokens."""
    if not any(sequence.media for sequence in rows):
        return proposer.propose(rows, most)
    asked = [i for i, sequence in enumerate(rows) if not sequence.media]
    drafts: list[Draft | None] = [None] * len(rows)
    for i, draft in zip(asked, proposer.propose([rows[i] for i in asked], [most[i] for i in asked]), strict=True):
        drafts[i] = draft
    return drafts


def _take_better(drafts: list[Draft | None], others: Sequence[Draft | None]) -> None:
    """Replaces drafts by those with more expected accepted tokens."""
    for i, other in enumerate(others):
        if other and (drafts[i] is None or _acceptance(other).sum() > _acceptance(drafts[i]).sum()):
            drafts[i] = other


Choice = tuple[DraftPlan | None, float]
"""The best plan with drafts within the limits, and its tokens/s."""
