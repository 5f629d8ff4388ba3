"""Penalties, biases and bans: what becomes of a row before a token is chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cppbatch import FinishReason, InvalidRequest, SamplingParams
from cppbatch.engine.request import GenerationRequest
from cppbatch.engine.sampling.logit_processing import apply_bans_and_biases, apply_penalties, recent_tokens
from cppbatch.engine.sampling_plan import make_sampling_plan
from cppbatch.engine.sequence import Seq
from tests.support.fakes import EOG, LIKELIEST_FIRST, N_VOCAB, FakeVocab, fake_engine, greedy, mood, reference

Row = npt.NDArray[np.float32]

HISTORY = [3, 3, 3, 7, 9, 9, 20, 33, 3, 41, 7, 50, 9, 51, 52, 3]

SETTINGS: dict[str, tuple[float, float, float]] = {  # repetition, frequency, presence
    "repetition": (1.3, 0.0, 0.0),
    "a repetition below one": (0.6, 0.0, 0.0),
    "frequency": (1.0, 0.7, 0.0),
    "a negative frequency": (1.0, -1.5, 0.0),
    "presence": (1.0, 0.0, 1.1),
    "a negative presence": (1.0, 0.0, -2.0),
    "all": (1.7, 0.3, 0.9),
    "all, some of them upwards": (0.8, 0.4, -1.2),
}


def logits(seed: int = 7) -> Row:
    """Half of them negative, none zero."""
    return np.random.default_rng(seed).normal(0, 3, N_VOCAB).astype(np.float32)


def sequence_of(params: SamplingParams, known: list[int], n_prompt: int | None = None) -> Seq:
    """A sequence with these tokens, the first `n_prompt` of them (default: all) from its prompt."""
    n_prompt = len(known) if n_prompt is None else n_prompt
    request = GenerationRequest(id="a", prompt=known[:n_prompt], params=params)
    sequence = Seq(request, np.array(known[:n_prompt], np.int32), max_new=64, seed=1, now=0.0)
    sequence.sampling = make_sampling_plan(params, FakeVocab(), 4096)
    for token in known[n_prompt:]:
        sequence.append(token)
    return sequence


def penalised(row: Row, known: list[int], **fields: Any) -> Row:
    row = row.copy()
    apply_penalties(sequence_of(SamplingParams(**fields), known), row)
    return row


def fields_of(numbers: tuple[float, float, float], last_n: int) -> dict[str, Any]:
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    return {**dict(zip(names, numbers, strict=True)), "penalty_last_n": last_n}


def edited(row: Row, sequence: Seq) -> Row:
    row = row.copy()
    apply_bans_and_biases(sequence, row)
    return row


# --- penalties as in llama.cpp --------------------------------------------------------------------------------------


def test_a_minus_one_window_holds_all_tokens_of_prompt_and_text() -> None:
    known = [5] + [6] * 200
    sequence = sequence_of(SamplingParams(penalty_last_n=-1), known, n_prompt=150)
    assert recent_tokens(sequence, -1).tolist() == known
    ours = penalised(logits(), known, presence_penalty=2.0, penalty_last_n=-1)
    assert ours[5] == logits()[5] - 2


def test_a_window_shorter_than_the_history_holds_its_last_tokens() -> None:
    sequence = sequence_of(SamplingParams(), HISTORY, n_prompt=12)
    assert [recent_tokens(sequence, n).tolist() for n in (0, 1, 5)] == [[], [3], [50, 9, 51, 52, 3]]


def test_without_the_prompt_only_the_text_is_recent() -> None:
    sequence = sequence_of(SamplingParams(penalize_prompt=False), HISTORY, n_prompt=12)
    assert [recent_tokens(sequence, n).tolist() for n in (-1, 2, 64)] == [HISTORY[12:], HISTORY[-2:], HISTORY[12:]]


def test_each_occurrence_within_the_window_counts_for_the_frequency() -> None:
    row = logits()
    ours = penalised(row, HISTORY, frequency_penalty=0.5, penalty_last_n=8)  # 3 41 7 50 9 51 52 3
    lowered = {3: 1.0} | dict.fromkeys((41, 7, 50, 9, 51, 52), 0.5)
    expected = row - np.array([lowered.get(token, 0.0) for token in range(N_VOCAB)], np.float32)
    assert ours == pytest.approx(expected)


def test_a_repetition_penalty_lowers_logits_on_both_sides_of_zero() -> None:
    row = np.array([4.0, -4.0, 0.0, -0.5, 0.5, 4.0] + [1.0] * (N_VOCAB - 6), np.float32)
    ours = penalised(row, [0, 1, 2, 3, 4], repetition_penalty=2.0)
    assert ours[:6].tolist() == [2.0, -8.0, 0.0, -1.0, 0.25, 4.0]


def test_impossible_tokens_stay_impossible_whatever_the_penalties() -> None:
    row = logits()
    row[HISTORY] = -np.inf
    for numbers in SETTINGS.values():
        assert np.isneginf(penalised(row, HISTORY, **fields_of(numbers, 64))[HISTORY]).all()


@pytest.mark.parametrize("n_kept", [1, 5, 20, N_VOCAB])
def test_a_row_of_some_tokens_is_changed_as_these_are_in_the_whole_row(n_kept: int) -> None:
    ids = np.sort(np.random.default_rng(n_kept).permutation(N_VOCAB)[:n_kept])
    params = SamplingParams(
        **fields_of((1.4, 0.3, 0.2), 64), logit_bias={4: 1.0, 9: -2.0}, suppress_tokens=(0, 33), ignore_eos=True
    )
    sequence = sequence_of(params, HISTORY)
    whole, part = logits(), logits()[ids]
    apply_bans_and_biases(sequence, whole)
    apply_penalties(sequence, whole)
    apply_bans_and_biases(sequence, part, ids)
    apply_penalties(sequence, part, ids)
    assert part.tolist() == whole[ids].tolist()


# --- penalties in the engine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "off",
    [{"penalty_last_n": 0, "repetition_penalty": 9.0}, {"samplers": ["temperature"], "repetition_penalty": 9.0}, {}],
)
def test_penalties_that_are_off_change_nothing(off: dict[str, Any]) -> None:
    with fake_engine() as engine:
        text = engine.generate(["abc"], greedy(30, ignore_eos=True, **off))[0].tokens
    assert text == reference("abc", greedy(30, ignore_eos=True))[0]


def test_the_prompt_counts_as_recent() -> None:
    likeliest = {(a, b): LIKELIEST_FIRST[mood(bytes([a, b]))][0] for a in range(N_VOCAB) for b in range(N_VOCAB)}
    prompt = next(list(pair) for pair, token in likeliest.items() if token in pair and token not in EOG)
    with fake_engine() as engine:
        plain, other = engine.generate([prompt] * 2, [greedy(1), greedy(1, presence_penalty=2.0)])
    assert plain.tokens == [likeliest[prompt[0], prompt[1]]]
    assert other.tokens == [LIKELIEST_FIRST[mood(bytes(prompt))][1]]


# --- biases ---------------------------------------------------------------------------------------------------------


def biased(bias: dict[int | str, float], **others: Any) -> Row:
    """What is added to each logit."""
    sequence = sequence_of(SamplingParams(logit_bias=bias, **others), [1])
    return edited(np.zeros(N_VOCAB, np.float32), sequence)


def test_a_bias_is_added_to_the_logit_of_its_token_and_to_no_other() -> None:
    row = logits()
    changed = edited(row, sequence_of(SamplingParams(logit_bias={5: 1.5, 60: -100.0}), [1]))
    expected = row.copy()
    expected[5] += 1.5
    expected[60] -= 100
    assert changed.tolist() == expected.tolist()


def test_a_token_id_may_be_written_as_a_number_or_in_digits() -> None:
    assert biased({7: 2.0, 12: -3.0}).tolist() == biased({"7": 2.0, "12": -3.0}).tolist()
    assert np.flatnonzero(biased({"7": 2.0})).tolist() == [7]


def test_the_biases_of_one_token_add_up() -> None:
    assert biased({7: 2.0, "7": 0.5, "07": -1.0})[7] == 1.5


def test_a_text_stands_for_each_of_its_tokens() -> None:
    wanted = FakeVocab().tokenize("xyz", add_special=False).tolist()
    assert len(set(wanted)) == 3
    changed = biased({"xyz": 4.0})
    assert changed[wanted].tolist() == [4.0] * 3
    assert np.count_nonzero(changed) == 3


@pytest.mark.parametrize("text", ["-5", "1.5", "5 6", "½", "x5"])
def test_a_text_that_is_not_a_whole_number_is_not_a_token_id(text: str) -> None:
    wanted = set(FakeVocab().tokenize(text, add_special=False).tolist())
    assert set(np.flatnonzero(biased({text: 4.0})).tolist()) == wanted


@pytest.mark.parametrize("key", [N_VOCAB, -1, str(N_VOCAB), "99999999999999999999"])
def test_a_bias_for_a_token_that_does_not_exist_is_refused(key: int | str) -> None:
    with fake_engine() as engine, pytest.raises(InvalidRequest, match=rf"logit_bias.* {key}; token ids are 0 to"):
        engine.generate(["abc"], greedy(1, logit_bias={key: 1.0}))


def test_a_bias_for_a_token_id_with_too_many_digits_is_refused() -> None:
    with fake_engine() as engine, pytest.raises(InvalidRequest, match="logit_bias"):
        engine.generate(["abc"], greedy(1, logit_bias={"9" * 5000: 1.0}))


def test_a_bias_makes_a_token_come_every_time_or_never() -> None:
    params = [greedy(40, ignore_eos=True, logit_bias=bias) for bias in ({}, {33: 100.0}, {"33": -100.0})]
    with fake_engine() as engine:
        plain, wanted, unwanted = engine.generate([[33, 1]] * 3, params)
    assert 33 in plain.tokens
    assert wanted.tokens == [33] * 40
    assert 33 not in unwanted.tokens


def test_a_bias_changes_drawn_texts_too() -> None:
    drawn = SamplingParams(max_tokens=40, seed=3, temperature=5.0, top_k=0, ignore_eos=True)
    with fake_engine() as engine:
        params = SamplingParams(max_tokens=40, seed=3, temperature=5.0, top_k=0, logit_bias={"ab": 100.0})
        plain, biased_text = engine.generate(["abc"] * 2, [drawn, params])
    favoured = set(FakeVocab().tokenize("ab").tolist())
    assert set(biased_text.tokens) == favoured
    assert not set(plain.tokens) <= favoured


# --- bans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 50.0])
def test_suppressed_tokens_never_come(temperature: float) -> None:
    never = tuple(range(0, 60, 2))
    params = SamplingParams(
        temperature=temperature, top_k=0, top_p=1, min_p=0, seed=5, max_tokens=55, ignore_eos=True,
        suppress_tokens=never, logit_bias=dict.fromkeys(never, 100.0),
    )  # fmt: skip
    with fake_engine() as engine:
        tokens = engine.generate([[1]], params)[0].tokens
    assert len(tokens) == 55
    assert not set(tokens) & {*never, *EOG}


def test_tokens_that_the_model_suppresses_never_come() -> None:
    class Suppressing(FakeVocab):
        suppressed = frozenset({1, 2, 3})

    plan = make_sampling_plan(SamplingParams(suppress_tokens=(9,)), Suppressing(), 4096)
    assert plan.banned_ids.tolist() == [1, 2, 3, 9]


def test_a_request_that_suppresses_every_token_ends_with_an_error_and_leaves_the_others_alone() -> None:
    with fake_engine() as engine:
        for params in (greedy(8), SamplingParams(max_tokens=8, seed=1)):
            everything = tuple(range(N_VOCAB))
            bad = SamplingParams(max_tokens=8, temperature=params.temperature, suppress_tokens=everything)
            failed, fine = engine.generate(["abc"] * 2, [bad, params])
            assert failed.finish_reason is FinishReason.ERROR
            assert failed.error == "no token can be sampled: the largest logit of this row is -inf"
            assert fine.finish_reason is not FinishReason.ERROR


def test_ignore_eos_bans_every_token_that_ends_a_text() -> None:
    prompt = next([i] for i in range(N_VOCAB) if LIKELIEST_FIRST[mood(bytes([i]))][0] in EOG)
    with fake_engine() as engine:
        ended, endless = engine.generate([prompt] * 2, [greedy(30), greedy(30, ignore_eos=True)])
    assert (ended.tokens, ended.finish_reason) == ([], FinishReason.STOP)
    assert (len(endless.tokens), endless.finish_reason) == (30, FinishReason.LENGTH)
    assert not EOG & set(endless.tokens)


@pytest.mark.parametrize("min_tokens", [0, 1, 5, 20])
def test_before_min_tokens_neither_the_model_nor_a_stop_token_ends_the_text(min_tokens: int) -> None:
    stops = tuple(range(0, 60, 3))
    params = greedy(30, min_tokens=min_tokens, stop_token_ids=stops)
    for prompt in ("abc", "b", "the longest of the three"):
        with fake_engine() as engine:
            result = engine.generate([prompt], params)[0]
        assert (result.tokens, result.text, result.finish_reason) == reference(prompt, params)
        assert len(result.tokens) >= min_tokens
        assert not {*EOG, *stops} & set(result.tokens)


def test_the_ban_of_min_tokens_ends_with_the_token_that_makes_them_enough() -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=(8,))
    for n, is_banned in ((0, True), (2, True), (3, False), (4, False)):
        row = edited(logits(), sequence_of(params, [1, *range(10, 10 + n)], n_prompt=1))
        assert np.isneginf(row[[8, *EOG]]).all() == is_banned
        assert np.isfinite(np.delete(row, [8, *EOG])).all()
