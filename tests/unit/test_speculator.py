"""How many draft tokens a step computes: the number that is fastest by the measured step times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cppbatch import GenerationRequest, SamplingParams
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.proposer import Draft
from cppbatch.engine.speculation.speculator import DraftLimits, DraftPlan, Speculator
from cppbatch.engine.step_cost import StepCost

TILED = {n: 0.010 + 0.001 * -(-n // 4) for n in range(1, 257)}
"""Seconds by rows: cheap rows, in tiles of 4."""
STEEP = {n: 0.010 * n for n in range(1, 257)}
"""Every row costs as much as the first one."""
FLAT = dict.fromkeys(range(1, 257), 0.010)


class Given:
    """Drafts these numbers of tokens, which are accepted with these probabilities."""

    costs_compute = False

    def __init__(self, drafts: Sequence[tuple[int, float]]) -> None:
        self.drafts = list(drafts)

    def propose(self, sequences: Sequence[Seq], most: Sequence[int]) -> list[Draft | None]:
        lengths = [min(n, limit) for (n, _), limit in zip(self.drafts, most, strict=True)]
        return [
            Draft(np.arange(1, n + 1, dtype=np.int32), np.full(n, p)) if n else None
            for n, (_, p) in zip(lengths, self.drafts, strict=True)
        ]

    def finished(self, sequence: Seq) -> None: ...
    def close(self) -> None: ...


def decoding(n: int, seq_ids: Sequence[int] = (), **params: object) -> list[Seq]:
    sequences = []
    for i in range(n):
        request = GenerationRequest(id=str(i), prompt=[1, 2], params=SamplingParams(max_tokens=100, **params))  # type: ignore[arg-type]
        sequence = Seq(request, np.array([1, 2], np.int32), max_new=100, seed=0, now=0)
        sequence.seq_id = seq_ids[i] if seq_ids else i
        sequence.n_computed = 1
        sequences.append(sequence)
    return sequences


def plan(
    drafts: Sequence[tuple[int, float]],
    times: dict[int, float],
    *,
    streams: bool = False,
    tokens: int = 1000,
    each: int = 1000,
    groups: tuple[int, ...] | None = None,
    seq_ids: Sequence[int] = (),
) -> tuple[DraftPlan | None, list[Seq]]:
    cost = StepCost()
    cost.seed(times.items())
    sequences = decoding(len(drafts), seq_ids)
    limits = DraftLimits(tokens, [each] * len(drafts), streams)
    return Speculator([Given(drafts)], 16).plan(sequences, groups or (len(drafts),), cost, limits), sequences


@pytest.mark.parametrize("streams", [False, True])
def test_no_drafts_where_every_row_costs_as_much_as_the_first(streams: bool) -> None:
    its, sequences = plan([(8, 0.95)] * 4, STEEP, streams=streams)
    assert its is None
    assert not any(sequence.draft for sequence in sequences)


@pytest.mark.parametrize("streams", [False, True])
def test_drafts_are_whole_where_rows_cost_nothing(streams: bool) -> None:
    its, sequences = plan([(8, 0.95)] * 4, FLAT, streams=streams)
    assert its
    assert its.lengths == [8] * 4
    assert [sequence.draft for sequence in sequences] == [list(range(1, 9))] * 4


@pytest.mark.parametrize("streams", [False, True])
def test_a_gpu_computes_few_different_numbers_of_rows(streams: bool) -> None:
    for n_rows in (1, 4):
        sizes = set[int]()
        for length in range(1, 17):
            cost = StepCost()
            cost.seed(FLAT.items())
            limits = DraftLimits(1000, [1000] * n_rows, streams, on_gpu=True)
            drafts = Given([(length, 0.95)] * n_rows)
            its = Speculator([drafts], 16).plan(decoding(n_rows), (n_rows,), cost, limits)
            assert its
            sizes.update(its.groups)
        assert sizes <= {2 * n_rows, 4 * n_rows, 8 * n_rows, 16 * n_rows}


@pytest.mark.parametrize("draft_max", [1, 2, 5, 10, 16])
def test_filled_drafts_on_a_gpu_have_at_most_the_allowed_length(draft_max: int) -> None:
    for length in range(1, draft_max + 1):
        cost = StepCost()
        cost.seed(FLAT.items())
        limits = DraftLimits(1000, [1000] * 4, has_streams=True, on_gpu=True)
        its = Speculator([Given([(length, 0.95)] * 4)], draft_max).plan(decoding(4), (4,), cost, limits)
        assert its
        assert max(its.lengths) <= draft_max
        assert its.n_padding <= draft_max


def test_the_most_likely_tokens_fill_whole_tiles() -> None:
    its, _ = plan([(16, 0.9), (16, 0.3), (0, 0.0)], TILED)
    assert its
    assert sum(its.groups) % 4 == 0
    assert its.lengths[0] > its.lengths[1]
    assert its.lengths[2] == 0


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("is_queue_empty", "lengths", "n_drafting", "has_drafts"),
    [
        (False, [100] * 8, 6, True),  # another request takes the row of the sequence that ends first
        (True, [100] * 8, 6, False),  # two sequences end as late as without drafts
        (True, [100] * 8, 8, True),
        (True, [*range(20, 180, 20)], 6, True),  # their ends are spread in any case
    ],
)
def test_samples_of_a_prompt_end_when_the_last_one_does(
    streams: bool, is_queue_empty: bool, lengths: list[int], n_drafting: int, has_drafts: bool
) -> None:
    cost = StepCost()
    cost.seed((n, 0.050 + 0.001 * n) for n in range(1, 257))
    sequences = decoding(8)
    for sequence, n in zip(sequences, lengths, strict=True):
        sequence.max_new = n
    drafts = [(2, 0.9) if i < n_drafting else (0, 0.0) for i in range(8)]
    limits = DraftLimits(1000, [1000] * 8, streams, is_queue_empty=is_queue_empty)
    its = Speculator([Given(drafts)], 16).plan(sequences, (8,), cost, limits)
    assert (its is not None) is has_drafts


def test_of_sequences_that_end_together_the_last_one_has_drafts() -> None:
    """The steps of the last one alone cost nearly as much as those of all, so a token of it saves most."""
    cost = StepCost()
    cost.seed((n, 0.040 + 0.006 * n) for n in range(1, 257))
    for is_queue_empty in (False, True):
        sequences = decoding(8)
        for sequence in sequences[1:]:
            sequence.max_new -= 10
        drafts = [(5, 0.9), *[(0, 0.0)] * 7]
        limits = DraftLimits(1000, [1000] * 8, has_streams=False, is_queue_empty=is_queue_empty)
        its = Speculator([Given(drafts)], 16).plan(sequences, (8,), cost, limits)
        assert (its is not None) is is_queue_empty
        assert not its or its.value > sum(0.9**i for i in range(1, its.lengths[0] + 1))


@pytest.mark.parametrize("streams", [False, True])
def test_improbable_drafts_are_left_out(streams: bool) -> None:
    its, _ = plan([(16, 0.02)] * 4, TILED, streams=streams)
    assert its is None


def test_where_sequences_have_streams_all_rows_get_equally_many() -> None:
    its, sequences = plan([(8, 0.95), (8, 0.95), (5, 0.95), (8, 0.95)], TILED, streams=True)
    assert its
    assert its.lengths == [8] * 4
    assert its.groups == (36,)
    assert its.n_padding == 8
    assert sequences[2].draft == [1, 2, 3, 4, 5], "filling tokens are not a draft"
    assert sequences[2].tokens[2:10].tolist() == [1, 2, 3, 4, 5, 2, 2, 2]


@pytest.mark.parametrize("streams", [False, True])
def test_drafts_of_few_sequences_do_not_delay_many_others(streams: bool) -> None:
    """Three of 16 sequences could gain 10 tokens each."""
    times = {n: 0.100 + 0.001 * n for n in range(1, 257)}
    of_few, _ = plan([(12, 0.97) if i < 3 else (0, 0.0) for i in range(16)], times, streams=streams)
    of_most, _ = plan([(12, 0.97) if i < 12 else (0, 0.0) for i in range(16)], times, streams=streams)
    assert times[sum(of_few.groups) if of_few else 16] < 1.25 * times[16]
    assert of_most
    assert times[sum(of_most.groups)] > 1.5 * times[16]
    assert not streams or set(of_most.lengths) == {of_most.lengths[0]}, "llama.cpp computes equal pieces together"


def test_drafts_stay_within_the_step_and_the_cells() -> None:
    its, _ = plan([(16, 0.95)] * 4, FLAT, tokens=9)
    assert its
    assert sum(its.lengths) <= 9
    its, _ = plan([(16, 0.95)] * 4, FLAT, tokens=9, streams=True)
    assert its
    assert its.lengths == [2] * 4
    its, _ = plan([(16, 0.95)] * 4, FLAT, each=3, streams=True)
    assert its
    assert its.lengths == [3] * 4
    assert plan([(16, 0.95)] * 4, FLAT, tokens=0)[0] is None


def test_the_longest_confident_draft_wins() -> None:
    cost = StepCost()
    cost.seed(FLAT.items())
    sequences = decoding(2)
    speculator = Speculator([Given([(10, 0.5), (2, 0.9)]), Given([(3, 0.9), (8, 0.9)])], 16)
    its = speculator.plan(sequences, (2,), cost, DraftLimits(100, [100, 100], False))
    assert its
    assert [len(sequence.draft) for sequence in sequences] == [3, 8]


def test_drafts_that_are_not_worth_it_are_not_computed() -> None:
    cost = StepCost()
    cost.seed([(1, 0.010), (5, 0.045), (256, 2.0)])
    speculator = Speculator([Given([(4, 0.9)])], 16)
    for _ in range(1000):
        assert speculator.plan(decoding(1), (1,), cost, DraftLimits(100, [100], False)) is None


def test_only_one_group_of_rows_gets_drafts_where_others_could_not_be_removed() -> None:
    cost = StepCost()
    cost.seed(FLAT.items())
    drafts = [(5, 0.9)] * 4
    for is_one_group in (True, False):
        limits = DraftLimits(1000, [1000] * 4, has_streams=True, is_one_group=is_one_group)
        its = Speculator([Given(drafts)], 16, one_group_only=True).plan(decoding(4), (4,), cost, limits)
        assert (its.lengths if its else None) == ([5] * 4 if is_one_group else None)


def test_estimates_that_turn_out_too_high_are_trusted_less() -> None:
    times = {n: 0.010 + 0.001 * n for n in range(1, 257)}

    def n_with_drafts(n_accepted: int) -> int:
        cost = StepCost()
        cost.seed(times.items())
        speculator, n = Speculator([Given([(6, 0.7)] * 4)], 16), 0
        for _ in range(40):
            if speculator.plan(sequences := decoding(4), (4,), cost, DraftLimits(100, [100] * 4, False)):
                speculator.verified(dict.fromkeys(sequences, n_accepted), 0.0)
                n += 1
        return n

    assert n_with_drafts(2) == 39  # one of 33 steps measures rows without drafts
    assert n_with_drafts(0) < 25


@pytest.mark.parametrize("streams", [False, True])
def test_drafts_delay_the_next_token_of_each_sequence_by_a_bounded_time(streams: bool) -> None:
    """Drafts for all may lengthen the step more than drafts for which others wait."""
    times = {n: 0.030 + 0.002 * n for n in range(1, 257)}
    for_some, _ = plan([(16, 0.98)] * 12 + [(0, 0.0)] * 4, times, streams=streams)
    for_all, _ = plan([(16, 0.98)] * 16, times, streams=streams)
    assert for_some
    assert for_all
    assert times[sum(for_some.groups)] <= 2.5 * times[16]
    assert 2.5 * times[16] < times[sum(for_all.groups)] <= 2.5 * times[16] * (1 + for_all.value / 16)


def test_wrong_drafts_do_not_end_speculation_for_good() -> None:
    """The times have the shape of 16 sequences on two AVX-512 cores. Drafts are compared with the text that
    comes, computed or not, so no step is lost to know that they are right again."""
    cost = StepCost()
    cost.seed((n, 0.010 + 0.00105 * n) for n in range(1, 257))
    speculator, sequences = Speculator([Given([(3, 0.95)] * 16)], 16), decoding(16)
    for sequence in sequences:
        sequence.tokens, sequence.max_new, sequence.n_ctx = np.resize(sequence.tokens, 9000), 9000, 9000

    def has_drafts(*, are_right: bool) -> bool:
        its = speculator.plan(sequences, (16,), cost, DraftLimits(200, [100] * 16, has_streams=True))
        n_accepted = 3 if its and are_right else 0
        for sequence in sequences:
            text = [1, 2, 3, 4][: n_accepted + 1] if are_right else [9]
            sequence.tokens[sequence.n_tokens : sequence.n_tokens + len(text)] = text
            sequence.n_tokens += len(text)
        if its:
            speculator.verified(dict.fromkeys(sequences, n_accepted), 0.0)
        return its is not None

    wrong = [has_drafts(are_right=False) for _ in range(500)]
    assert 1 <= sum(wrong) <= 4, "few of the steps are lost"
    right = [has_drafts(are_right=True) for _ in range(1000)]
    assert sum(right[100:600]) >= 484  # one of 33 steps measures rows without drafts


def test_a_number_of_rows_is_measured_without_drafts_first() -> None:
    cost = StepCost()
    speculator, n_without = Speculator([Given([(8, 0.95)] * 4)], 16), 0
    limits = DraftLimits(100, [100] * 4, has_streams=True)
    while not (its := speculator.plan(decoding(4), (4,), cost, limits)):
        cost.observe_rows((4,), 0.080)
        n_without += 1
    assert n_without == 4
    assert its.groups[0] > 4


def test_disturbed_steps_affect_no_decision_for_long() -> None:
    """16 rows take 26 ms and 32 take 43, so drafts of one token each, half of them right, do not pay; nor after steps
    that another program has made six times as long."""
    times = {16: 0.026, 32: 0.043}
    cost = StepCost()
    cost.seed(times.items())
    speculator, n = Speculator([Given([(1, 0.5)] * 16)], 16), 0
    for step in range(400):
        its = speculator.plan(sequences := decoding(16), (16,), cost, DraftLimits(16, [100] * 16, has_streams=True))
        rows = its.groups[0] if its else 16
        if its:
            speculator.verified(dict.fromkeys(sequences[:8], 1), 0.0)
            n += 1
        cost.observe_rows((rows,), times[rows] * (6 if 50 <= step < 53 else 1))
    assert n <= 12


def test_sampling_accepted_tokens_is_part_of_what_drafts_cost() -> None:
    """On a fast GPU the rows of drafts are nearly free, but the host samples them one after the other."""

    def n_with_drafts(sampling_s: float) -> int:
        cost = StepCost()
        cost.seed((n, 0.004 + 0.00002 * n) for n in range(1, 257))
        speculator, n = Speculator([Given([(3, 0.8)] * 4)], 16), 0
        for _ in range(300):
            if speculator.plan(sequences := decoding(4), (4,), cost, DraftLimits(100, [100] * 4, has_streams=True)):
                speculator.verified(dict(zip(sequences, (1, 2, 2, 2), strict=True)), 7 * sampling_s)
                n += 1
        return n

    assert n_with_drafts(0.0001) == 291  # one of 33 steps measures rows without drafts
    assert n_with_drafts(0.0015) < 20, "7 accepted tokens take 10 ms, and a step without drafts 4 ms for 4"


@pytest.mark.parametrize("streams", [False, True])
def test_drafts_that_would_take_too_long_in_any_number_are_left_out(streams: bool) -> None:
    its, _ = plan([(8, 0.95)] * 4, {4: 0.010, 5: 0.200, 256: 9.0}, streams=streams)
    assert its is None


class Unsure:
    """A draft model that gives four right tokens in every `every`-th call, and none in the others. 5 ms a decode."""

    costs_compute = True
    token_s = 0.0

    def __init__(self, every: int) -> None:
        self.every = every
        self.n_calls = 0

    def seconds(self, n_sequences: int, k: int) -> float:
        return 0.005 * k

    def read_seconds(self, sequence: Seq) -> float:
        return 0.0

    def serves(self, sequence: Seq) -> bool:
        return True

    def propose(self, sequences: Sequence[Seq], most: Sequence[int]) -> list[Draft | None]:
        self.n_calls += 1
        if self.n_calls % self.every:
            return [None] * len(sequences)
        return [Draft(np.arange(4, dtype=np.int32), np.full(4, 0.85))] * len(sequences)

    def finished(self, sequence: Seq) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize(("every", "is_worth"), [(1, True), (2, True), (10, False)])
def test_a_draft_model_that_is_often_unsure_is_used_while_its_drafts_pay(every: int, is_worth: bool) -> None:
    """A call without a draft costs one decode of the draft model. The times are those of a model four times as deep as
    the default model, in BF16. The first calls are to learn that."""
    cost, model = StepCost(), Unsure(every)
    cost.seed((n, 0.036 + 0.005 * n) for n in range(1, 65))
    speculator, sequences = Speculator([model], 16), decoding(1)
    for step in range(400):
        if step == 100:
            model.n_calls = 0
        if speculator.plan(sequences, (1,), cost, DraftLimits(100, [100], False)):
            speculator.verified({sequences[0]: 3}, 0.0)
    assert (model.n_calls > 250) if is_worth else (model.n_calls < 100)


class Constant(Unsure):
    """A draft model whose drafts of one token are for all sequences, and take 10 ms."""

    def __init__(self) -> None:
        super().__init__(1)
        self.n_asked: list[int] = []

    def propose(self, sequences: Sequence[Seq], most: Sequence[int]) -> list[Draft | None]:
        self.n_asked.append(sum(n > 0 for n in most))
        return [Draft(np.arange(1, dtype=np.int32), np.full(1, 0.8)) if n else None for n in most]

    def seconds(self, n_sequences: int, k: int) -> float:
        return 0.010


@pytest.mark.parametrize(("rows_ms", "share"), [(120, 0.9), (135, 0.7), (140, 0.15), (170, 0.02)])
def test_a_draft_model_is_tried_the_more_often_the_less_a_try_is_expected_to_lose(rows_ms: int, share: float) -> None:
    """Four rows take 80 ms, and eight with drafts, of which 80% are right, `rows_ms`: 1.8 tokens in 135 + 10 ms are
    0.99 times as fast. A try is for all sequences: drafts for one of them would not be computed."""
    cost, model, sequences = StepCost(), Constant(), decoding(4)
    cost.seed([(4, 0.080), (8, rows_ms / 1000)])
    speculator = Speculator([model], 1)
    for step in range(2000):
        if speculator.plan(sequences, (4,), cost, DraftLimits(100, [100] * 4, has_streams=True)):
            speculator.verified(dict.fromkeys(sequences, 1) if step % 5 else {}, 0.0)
    assert 0.5 * share < len(model.n_asked) / 2000 < 1.5 * share
    assert set(model.n_asked) == {4}


@pytest.mark.parametrize(("slower", "is_worth"), [(1.0, True), (2.0, False)])
def test_a_draft_model_is_used_while_its_steps_are_not_slower_than_rows_alone(slower: float, is_worth: bool) -> None:
    """By the estimates four tokens in 81 ms, instead of 41 ms for one; but the steps may take longer than that."""
    now = 0.0
    cost, model, sequences = StepCost(), Unsure(1), decoding(1)
    cost.seed((n, 0.036 + 0.005 * n) for n in range(1, 65))
    speculator = Speculator([model], 4, wall=lambda: now)
    for _ in range(300):
        planned = speculator.plan(sequences, (1,), cost, DraftLimits(100, [100], False))
        if planned:
            now += slower * 0.081
            speculator.verified({sequences[0]: 3}, 0.0)
    assert (model.n_calls > 250) if is_worth else (model.n_calls < 100)


@pytest.mark.parametrize("n_right", [2, 6])
def test_the_acceptance_is_learned_by_token_so_drafts_are_as_long_as_they_are_right(n_right: int) -> None:
    """Two tokens of each draft are right: a third one, and all after it, would be wasted rows."""
    cost = StepCost()
    cost.seed((n, 0.020 + 0.006 * n) for n in range(1, 257))
    speculator, lengths = Speculator([Given([(12, 0.95)])], 16), []
    for _ in range(200):
        if its := speculator.plan(sequences := decoding(1), (1,), cost, DraftLimits(100, [100], False)):
            lengths.append(its.lengths[0])
            speculator.verified({sequences[0]: min(n_right, lengths[-1])}, 0.0)
    assert lengths[0] > 6
    assert (lengths[-1] <= 5) if n_right == 2 else (lengths[-1] >= 6)


class Looking(Given):
    """Looking for a draft takes 1 ms of this thread."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    def propose(self, sequences: Sequence[Seq], most: Sequence[int]) -> list[Draft | None]:
        self.now += 0.001
        return super().propose(sequences, most)


def test_drafts_that_are_not_worth_it_are_looked_for_in_half_a_percent_of_the_time() -> None:
    cost = StepCost()
    cost.seed(TILED.items())
    looking = Looking([(1, 0.01)] * 16)
    speculator, sequences = Speculator([looking], 16, clock=looking.clock), decoding(16)
    limits = DraftLimits(200, [100] * 16, has_streams=True)
    for _ in range(1000):
        assert speculator.plan(sequences, (16,), cost, limits) is None
    assert 0.016 + 0.9 * 0.005 * 1000 * TILED[16] < looking.now < 0.017 + 0.005 * 1000 * TILED[16]
    looking.drafts = [(8, 0.97)] * 16
    n_until = next(i for i in range(100) if speculator.plan(sequences, (16,), cost, limits))
    assert n_until < 20
    looking.now = 0.0
    for _ in range(100):
        if speculator.plan(sequences, (16,), cost, limits):
            speculator.verified(dict.fromkeys(sequences, 8), 0.0)
    assert looking.now > 0.09  # while they are worth it, in every step
