"""Suffix matching: drafts are what followed the last tokens before, and say how probably they are accepted."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from cppbatch import GenerationRequest
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.proposer import Draft
from cppbatch.engine.speculation.suffix_proposer import SuffixProposer
from tests.support.randomised import randomised

_ids = itertools.count()


def sequence(
    prompt: list[int],
    *,
    salt: str = "",
    cache_prompt: bool = True,
    prediction: list[int] | None = None,
    room: int = 300,
) -> Seq:
    request = GenerationRequest(id=str(next(_ids)), prompt=prompt, cache_salt=salt, cache_prompt=cache_prompt)
    predicted = None if prediction is None else np.array(prediction, np.int32)
    return Seq(request, np.array(prompt, np.int32), max_new=room, seed=0, now=0.0, prediction=predicted)


def generate(seq: Seq, *tokens: int) -> None:
    seq.tokens[seq.n_tokens : seq.n_tokens + len(tokens)] = tokens
    seq.n_tokens += len(tokens)


def known(seq: Seq) -> list[int]:
    return list(map(int, seq.tokens[: seq.n_tokens]))


def draft(proposer: SuffixProposer, seq: Seq, most: int = 8) -> list[int]:
    (found,) = proposer.propose([seq], [most])
    return [] if found is None else found.tokens.tolist()


def run(proposer: SuffixProposer, seq: Seq, completion: list[int], most: int = 8) -> list[Draft | None]:
    """Generates the completion token by token; the draft before each token."""
    drafts = []
    for token in completion:
        drafts += proposer.propose([seq], [most])
        generate(seq, token)
    return drafts


DISTINCT = list(range(100, 200))


def test_the_earlier_continuation_of_the_last_tokens_is_drafted() -> None:
    seq = sequence([*DISTINCT, 110, 111, 112])
    assert draft(SuffixProposer(), seq, 4) == [113, 114, 115, 116]


def test_nothing_is_drafted_without_an_occurrence_or_without_room() -> None:
    assert draft(SuffixProposer(), sequence(DISTINCT)) == []
    assert draft(SuffixProposer(), sequence([*DISTINCT, 110, 111, 112]), 0) == []
    assert draft(SuffixProposer(), sequence([1])) == []


def test_a_match_continues_token_by_token_and_ends_where_the_text_differs() -> None:
    proposer, seq = SuffixProposer(), sequence([*DISTINCT, 110, 111, 112])
    draft(proposer, seq)
    generate(seq, 113, 114)
    assert draft(proposer, seq, 2) == [115, 116]
    generate(seq, 7)
    assert draft(proposer, seq) == []


def test_the_longest_match_wins_over_later_ones() -> None:
    text = [1, 2, 3, 4, 5, 6, 50, 9, 9, 4, 5, 6, 60, 8, 8, 4, 5, 6, 70]
    assert draft(SuffixProposer(), sequence([*text, 1, 2, 3, 4, 5, 6]), 1) == [50]


def test_of_equally_long_matches_the_most_frequent_continuation_wins() -> None:
    text = [1, 5, 6, 7, 50, 2, 5, 6, 7, 50, 3, 5, 6, 7, 60]
    assert draft(SuffixProposer(), sequence([*text, 4, 5, 6, 7]), 1) == [50]


def test_a_text_that_repeats_its_end_is_drafted_beyond_it() -> None:
    assert draft(SuffixProposer(), sequence([9, 1, 2, 3, 1, 2, 3]), 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_running_and_finished_sequences_with_the_same_salt_are_sources() -> None:
    proposer, first, second = SuffixProposer(), sequence([1, *DISTINCT]), sequence([2, 3, 110, 111, 112])
    proposer.propose([first], [8])
    assert draft(proposer, second, 3) == [113, 114, 115]
    proposer.finished(first)
    third = sequence([3, 4, 120, 121, 122])
    assert draft(proposer, third, 3) == [123, 124, 125]
    generate(third, 123)
    assert draft(proposer, third, 3) == [124, 125, 126]


def test_a_completion_becomes_a_source_while_it_is_generated() -> None:
    proposer, first, second = SuffixProposer(), sequence([1]), sequence([2])
    run(proposer, first, DISTINCT)
    draft(proposer, first)
    run(proposer, second, [110, 111, 112])
    assert draft(proposer, second, 2) == [113, 114]


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("one", "two"),
    [({"salt": "a"}, {}), ({}, {"salt": "a"}), ({"cache_prompt": False}, {}), ({}, {"cache_prompt": False})],
)
def test_another_salt_and_a_request_out_of_the_cache_share_nothing(
    one: dict[str, Any], two: dict[str, Any], finished: bool
) -> None:
    proposer, first, second = SuffixProposer(), sequence(DISTINCT, **one), sequence([110, 111, 112], **two)
    proposer.propose([first], [8])
    if finished:
        proposer.finished(first)
    assert draft(proposer, second) == []


def test_a_prediction_is_drafted_from_its_start_and_found_again_after_a_change() -> None:
    proposer, seq = SuffixProposer(), sequence([1, 2, 3], prediction=DISTINCT)
    assert draft(proposer, seq, 3) == [100, 101, 102]
    generate(seq, 100, 101)
    assert draft(proposer, seq, 3) == [102, 103, 104]
    generate(seq, 7, 8, 120, 121, 122)
    assert draft(proposer, seq, 3) == [123, 124, 125]


@pytest.mark.parametrize(
    ("changed", "rest"), [([7], 113), ([7, 113], 114), ([7, 112], 113), ([7, 8, 112, 113], 114), ([113], 114)]
)
def test_a_long_match_continues_after_a_change_of_a_few_tokens(changed: list[int], rest: int) -> None:
    proposer, seq = SuffixProposer(), sequence([*DISTINCT, 1, *DISTINCT[:3]])
    run(proposer, seq, DISTINCT[3:12])
    generate(seq, *changed)
    assert draft(proposer, seq, 1) == ([] if changed == [7] else [rest])


def test_a_long_prompt_is_indexed_in_several_calls() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 40_000, 30_000).tolist()
    proposer, seq = SuffixProposer(), sequence([*prompt, *prompt[50:54]])
    seqs = [seq, *(sequence(prompt[-40:], salt=str(i)) for i in range(5))]
    for _ in range(6):
        (found, *_) = proposer.propose(seqs, [4] * 6)
    assert found is not None
    assert found.tokens.tolist() == prompt[54:58]


def test_choices_of_a_prompt_are_not_separate_sources() -> None:
    prompt = [i % 997 for i in range(3000)]
    proposer = SuffixProposer()
    seqs = [sequence(prompt) for _ in range(8)]
    for _ in range(4):
        proposer.propose(seqs, [4] * 8)
    shared = [proposer._states[seq].shared for seq in seqs]
    indexed = [text is not None and text.chain_arrays[0].any() for text in shared]
    assert indexed == [True] + [False] * 7
    for seq in seqs:
        assert draft(proposer, seq, 2) == [prompt[3000 - 997], prompt[3001 - 997]]


def test_kept_tokens_are_bounded_and_the_least_recently_used_leave() -> None:
    proposer = SuffixProposer(max_tokens=300)
    for i in range(3):
        seq = sequence([i, *range(1000 * i, 1000 * i + 99)])
        proposer.propose([seq], [1])
        proposer.finished(seq)
    assert proposer.n_tokens == 300
    assert draft(proposer, sequence([10, 11, 12]), 1) == [13]  # the oldest one is used
    seq = sequence([3, *range(3000, 3050)])
    proposer.propose([seq], [1])
    proposer.finished(seq)
    assert proposer.n_tokens == 251
    assert draft(proposer, sequence([10, 11, 12]), 1) == [13]
    assert draft(proposer, sequence([1010, 1011, 1012]), 1) == []
    assert draft(proposer, sequence([2010, 2011, 2012]), 1) == [2013]


def test_kept_texts_are_bounded_however_short_they_are() -> None:
    """A text takes 2.5 KB besides its tokens: 25,000 tiny ones took 64 MB."""
    proposer = SuffixProposer(max_tokens=6400)
    for i in range(500):
        seq = sequence([4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3])
        proposer.propose([seq], [1])
        proposer.finished(seq)
    assert (len(proposer._finished), len(proposer._shared), proposer.n_tokens) == (100, 100, 400)
    assert draft(proposer, sequence([1600, 1601, 1602]), 1) == [1603]
    assert draft(proposer, sequence([1596, 1597, 1598]), 1) == []


def test_a_sequence_longer_than_the_bound_is_not_kept() -> None:
    proposer, seq = SuffixProposer(max_tokens=50), sequence(DISTINCT)
    proposer.propose([seq], [1])
    proposer.finished(seq)
    assert proposer.n_tokens == 0
    assert not proposer._groups


def test_a_lost_match_continues_in_a_finished_text_that_has_been_dropped() -> None:
    proposer, first = SuffixProposer(max_tokens=200), sequence(list(range(100, 220)))
    proposer.propose([first], [1])
    proposer.finished(first)
    seq = sequence(list(range(100, 140)))
    assert draft(proposer, seq, 1) == [140]
    generate(seq, 999)  # not 140: the match is lost
    assert draft(proposer, seq, 1) == []
    other = sequence(list(range(1000, 1150)))
    proposer.propose([other], [1])
    proposer.finished(other)
    assert proposer.n_tokens == 150, "the first text is dropped"
    generate(seq, 142)
    assert draft(proposer, seq, 2) == [143, 144]


def test_closing_frees_everything_and_unknown_sequences_may_finish() -> None:
    proposer, seq = SuffixProposer(), sequence(DISTINCT)
    proposer.finished(sequence([1]))
    proposer.propose([seq, sequence([1, 2])], [1, 1])
    proposer.finished(seq)
    proposer.close()
    assert (proposer.n_tokens, len(proposer._states), len(proposer._finished), len(proposer._shared)) == (0, 0, 0, 0)


lives = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), min_size=1, max_size=60),  # the prompt
        st.sampled_from(("", "", "a")),  # the salt
        st.booleans(),  # cache_prompt
        st.none() | st.lists(st.integers(0, 3), min_size=1, max_size=30),  # the prediction
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), max_size=8),  # tokens between two proposals
    ),
    min_size=1,
    max_size=6,
)


@randomised(
    ring=60,
    nightly=300,
    soak=3000,
    lives=lives,
    n_parallel=st.integers(1, 3),
    max_tokens=st.integers(1, 200),
    most=st.integers(0, 10),
)
def test_a_draft_is_always_what_followed_an_occurrence_that_the_sequence_may_see(
    lives: list[Any], n_parallel: int, max_tokens: int, most: int
) -> None:
    proposer = SuffixProposer(max_tokens=max_tokens)
    waiting = [(sequence(p, salt=s, cache_prompt=c, prediction=f), iter(steps)) for p, s, c, f, steps in lives]
    running: list[tuple[Seq, Any]] = []
    ended: list[Seq] = []
    while waiting or running:
        while waiting and len(running) < n_parallel:
            running.append(waiting.pop(0))
        drafts = proposer.propose([seq for seq, _ in running], [most] * len(running))
        for (seq, steps), found in zip(list(running), drafts, strict=True):
            if found is not None:
                assert 1 <= len(found.tokens) <= most
                assert found.probabilities.min() > 0
                assert found.probabilities.max() < 1
                others = [other for other, _ in running] + ended
                assert is_continuation(seq, found.tokens.tolist(), others)
            tokens = next(steps, None)
            if tokens is not None:
                generate(seq, *tokens)
                continue
            proposer.finished(seq)
            ended.append(seq)
            running.remove((seq, steps))
        assert proposer.n_tokens == sum(text.n for text in proposer._finished) <= max_tokens
        assert len(proposer._shared) == len(proposer._finished) + sum(
            state.shared is not None for state in proposer._states.values()
        )
    proposer.close()


def is_continuation(seq: Seq, found: list[int], others: list[Seq]) -> bool:
    own, n = known(seq), seq.n_tokens
    if seq.prediction is not None:
        predicted = seq.prediction.tolist()
        done = own[seq.n_prompt :]
        if predicted[: len(done)] == done and predicted[len(done) : len(done) + len(found)] == found:
            return True
    texts = [own] if seq.prediction is None else [own, predicted]
    texts += [
        known(other)
        for other in others
        if other.salt == seq.salt and other.request.cache_prompt and seq.request.cache_prompt
    ]
    for text in texts:
        for p in range(1, len(text)):
            if text[p - 1] == own[n - 1]:
                rest = text[p:]
                if text is own:
                    rest = (rest * len(found))[: max(len(found), len(rest))]
                if rest[: len(found)] == found:
                    return True
    return False


def test_estimates_follow_a_text_that_stops_repeating_within_ten_tokens() -> None:
    rng = np.random.default_rng(1)
    block = rng.integers(0, 1000, 40).tolist()
    proposer, seq = SuffixProposer(), sequence(block * 2, room=2000)
    before = run(proposer, seq, block * 3)[-1]
    assert before is not None
    assert before.probabilities.min() > 0.9
    # From now on three tokens of the block, each time of another place, are followed by another token.
    starts = [0, 20, 8, 28, 16, 36, 4, 24, 12, 32]
    after = [run(proposer, seq, [*block[i : i + 3], 5000 + i], 1)[-1] for i in starts]
    estimates = [float(found.probabilities[0]) for found in after if found is not None]
    assert len(estimates) == 10
    assert estimates[-1] < 0.4
    assert estimates[-1] < estimates[0] / 1.5


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_estimates_are_what_is_accepted_on_average(noise: float) -> None:
    """Sequences copy their prompt, and make a mistake in some of their tokens."""
    rng = np.random.default_rng(2)
    proposer = SuffixProposer()
    expected = accepted = 0.0
    for i in range(30):
        prompt = rng.integers(0, 5000, 300).tolist()
        completion = [token if rng.random() > noise else int(rng.integers(5000)) for token in prompt]
        seq = sequence([*prompt, *prompt[:3]], salt=str(i))
        completion = completion[3:]
        for j, found in enumerate(run(proposer, seq, completion, 4)):
            if found is None or i < 5:
                continue
            reached = 1.0
            likely = found.probabilities.tolist()
            for token, p, actual in zip(found.tokens.tolist(), likely, completion[j:], strict=False):
                reached *= p
                expected += reached
                if token != actual:
                    break
                accepted += 1
    assert expected == pytest.approx(accepted, rel=0.25)


def test_values_that_differ_from_record_to_record_are_less_probable_than_the_text_around_them() -> None:
    """Each record is ten fixed tokens, with a different value after the fifth."""
    proposer, seq = SuffixProposer(), sequence([1, 2, 3])
    records = [[*range(50, 55), 1000 + i, *range(60, 65)] for i in range(6)]
    drafts = run(proposer, seq, [token for each in records for token in each], 10)
    found = drafts[4 * 11 + 1]  # after the first token of the fifth record
    assert found is not None
    assert found.tokens.tolist() == [51, 52, 53, 54, 1003, *range(60, 65)]
    value = found.probabilities[4]
    assert value < 0.5
    assert value < 0.7 * np.delete(found.probabilities, 4).min()
