"""A request's own `logits_processor` over a fake model: its arguments, what it may do, and its errors."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cppbatch import Completion, FinishReason, SamplingParams
from tests.support.fakes import (
    EOG,
    LIKELIEST_FIRST,
    LOGITS,
    N_VOCAB,
    context_of,
    fake_engine,
    greedy,
    mood,
    reference,
    result_of,
    text_of,
)
from tests.support.logits_processors import (
    PROMPTS,
    Row,
    Together,
    Tokens,
    assert_all_is_free,
    fill_with_nan,
    forbid_all,
    one_nan,
    raise_it,
    tokens_of,
)


class Seen:
    """Records its arguments, and changes nothing."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[list[int], Row]]] = []

    def note(self, tokens: list[Tokens], rows: list[Row]) -> None:
        assert all(its.dtype == np.int32 and its.ndim == 1 for its in tokens)
        assert all(row.dtype == np.float32 and row.shape == (N_VOCAB,) for row in rows)
        self.calls.append([(its.tolist(), row.copy()) for its, row in zip(tokens, rows, strict=True)])

    @property
    def pairs(self) -> list[tuple[list[int], Row]]:
        return [pair for call in self.calls for pair in call]


class SeenOneByOne(Seen):
    def __call__(self, tokens: Tokens, row: Row) -> None:
        self.note([tokens], [row])


class SeenTogether(Seen):
    def process_rows(self, tokens: list[Tokens], rows: list[Row]) -> None:
        self.note(tokens, rows)


# --- its arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SeenOneByOne, SeenTogether])
def test_it_sees_the_tokens_so_far_and_the_row_after_them_once_for_every_token(kind: type[Seen]) -> None:
    seen = kind()
    results = fake_engine().generate(PROMPTS, greedy(6, ignore_eos=True, logits_processor=seen))
    wanted = [prompt + result.tokens[:n] for prompt, result in zip(PROMPTS, results, strict=True) for n in range(6)]
    assert sorted(tokens for tokens, _ in seen.pairs) == sorted(wanted)
    for tokens, row in seen.pairs:
        assert row.tolist() == LOGITS[mood(bytes(tokens))].tolist()


def test_a_prompt_that_takes_several_steps_brings_one_call_when_all_of_it_is_read() -> None:
    seen, prompt = SeenOneByOne(), [1, 2, 3] * 10
    fake_engine(n_batch=8).generate([prompt], greedy(1, logits_processor=seen))
    assert [tokens for tokens, _ in seen.pairs] == [prompt]


def test_process_rows_is_called_once_a_step_with_the_rows_of_all_that_have_it() -> None:
    one, other, engine = SeenTogether(), SeenTogether(), fake_engine(n_parallel=9, n_batch=30)
    params = [greedy(5, ignore_eos=True, logits_processor=(one, other, None)[i % 3]) for i in range(9)]
    engine.generate([[i, 1] for i in range(9)], params)
    assert len(context_of(engine).steps) == 5
    for seen, mine in ((one, (0, 3, 6)), (other, (1, 4, 7))):
        assert [sorted(tokens[0] for tokens, _ in call) for call in seen.calls] == [list(mine)] * 5


def test_a_plain_function_is_called_for_each_row_even_when_many_requests_have_it() -> None:
    seen = SeenOneByOne()
    fake_engine(n_parallel=4, n_batch=30).generate([[i, 1] for i in range(4)], greedy(3, logits_processor=seen))
    assert [len(call) for call in seen.calls] == [1] * len(seen.calls)
    assert Counter(tokens[0] for tokens, _ in seen.pairs)[2] == 3


def test_an_object_with_both_is_called_by_process_rows_only() -> None:
    class Both(SeenTogether):
        def __call__(self, _: Tokens, __: Row) -> None:
            raise AssertionError("called for one row")

    seen = Both()
    (result,) = fake_engine().generate([[1]], greedy(3, ignore_eos=True, logits_processor=seen))
    assert (len(result.tokens), len(seen.calls)) == (3, 3)


def test_changing_the_passed_tokens_has_no_effect() -> None:
    def spoil(tokens: Tokens, _: Row) -> None:
        tokens[:] = 0

    def results(**more: Any) -> list[Completion]:
        params = greedy(24, ignore_eos=True, repetition_penalty=1.5, penalty_last_n=-1, **more)
        engine = fake_engine(n_ctx=48, swap_space=0)
        completions = engine.generate(PROMPTS, params)
        assert engine.stats().recomputes > 0  # so they are read once more, from where they are kept
        return completions

    spoilt = results(logits_processor=spoil)
    assert [result_of(result) for result in spoilt] == [result_of(result) for result in results()]


@pytest.mark.parametrize("swap_space", [1024, 0], ids=["swapped", "recomputed"])
def test_a_preempted_request_calls_it_once_for_every_token_all_the_same(swap_space: int) -> None:
    seen = SeenTogether()
    engine = fake_engine(n_ctx=48, n_parallel=4, swap_space=swap_space)
    results = engine.generate(PROMPTS, greedy(24, ignore_eos=True, logits_processor=seen))
    assert engine.stats().swaps + engine.stats().recomputes > 0
    wanted = [prompt + result.tokens[:n] for prompt, result in zip(PROMPTS, results, strict=True) for n in range(24)]
    assert sorted(tokens for tokens, _ in seen.pairs) == sorted(wanted)


# --- what it may do --------------------------------------------------------------------------------------------------


def without(tokens: tuple[int, ...], row: Row) -> Row:
    changed: Row = row.copy()
    changed[list(tokens)] = -np.inf
    return changed


BANNED = tuple(range(0, 60, 2))


def ban_in_place(_: Tokens, row: Row) -> None:
    row[list(BANNED)] = -np.inf


def ban_in_place_and_return_it(_: Tokens, row: Row) -> Row:
    row[list(BANNED)] = -np.inf
    return row


BANS: dict[str, Any] = {
    "in place": ban_in_place,
    "in place, and returned": ban_in_place_and_return_it,
    "a new array": lambda _, row: without(BANNED, row),
    "float64": lambda _, row: without(BANNED, row).astype(np.float64),
    "a list of numbers": lambda _, row: without(BANNED, row).tolist(),
    "all rows in place": Together(ban_in_place, lambda _: None),
    "all rows in place, and a list of None": Together(ban_in_place),
    "all rows returned": Together(lambda _, row: without(BANNED, row)),
    "all rows as one array": Together(lambda _, row: without(BANNED, row), np.stack),
    "all rows as a generator": Together(lambda _, row: without(BANNED, row), iter),
    "some in place, some returned": Together(
        lambda tokens, row: ban_in_place(tokens, row) if tokens[0] % 2 else without(BANNED, row)
    ),
}


@pytest.mark.parametrize("ban", BANS.values(), ids=BANS)
def test_it_changes_the_row_in_place_or_returns_it_anew(ban: Any) -> None:
    banned, plain = greedy(12, suppress_tokens=BANNED), greedy(12)
    params = [greedy(12, logits_processor=ban) if i % 3 else plain for i in range(len(PROMPTS))]
    expected = fake_engine().generate(PROMPTS, [banned if i % 3 else plain for i in range(len(PROMPTS))])
    results = fake_engine().generate(PROMPTS, params)
    assert [result_of(result) for result in results] == [result_of(result) for result in expected]
    assert not set(BANNED) & {token for result in results[1:3] for token in result.tokens}


def test_each_of_many_rows_gets_its_own_back() -> None:
    def prefer(tokens: Tokens, row: Row) -> Row:
        changed: Row = row.copy()
        changed[int(tokens[0]) + 20] = 1000
        return changed

    results = fake_engine(n_parallel=8).generate(PROMPTS, greedy(4, logits_processor=Together(prefer)))
    assert tokens_of(results) == [[prompt[0] + 20] * 4 for prompt in PROMPTS]


def test_it_may_go_by_the_tokens_so_far() -> None:
    def least_likely_after_two(tokens: Tokens, row: Row) -> Row | None:
        return -row if len(tokens) > len(PROMPTS[0]) + 1 else None

    (result,) = fake_engine().generate([PROMPTS[0]], greedy(4, logits_processor=least_likely_after_two))
    start = reference(PROMPTS[0], greedy(2))[0]
    third = LIKELIEST_FIRST[mood(bytes(PROMPTS[0] + start))][-1]
    assert result.tokens[:3] == ([*start, third] if third not in EOG else start)


# --- its mistakes ----------------------------------------------------------------------------------------------------


def exit_(_tokens: Any, _row: Any) -> None:
    raise SystemExit("x")


MISTAKES: dict[str, tuple[Any, str]] = {
    "it raises": (raise_it, "logits_processor raised KeyError: 'no such thing'"),
    "it exits": (exit_, "logits_processor raised SystemExit"),
    "a short row": (lambda _, row: row[:5], "it returned an array of shape (5,); a row has shape (64,)"),
    "a scalar": (lambda _, __: 1.0, "it returned an array of shape (); a row has shape (64,)"),
    "two rows": (lambda _, row: np.stack([row, row]), "it returned an array of shape (2, 64)"),
    "text": (lambda _, __: "abc", "logits_processor raised ValueError"),
    "NaN": (fill_with_nan, "no token can be sampled: the largest logit of this row is nan"),
    "one NaN": (one_nan, "no token can be sampled: the largest logit of this row is nan"),
    "nothing is left": (forbid_all, "no token can be sampled: the largest logit of this row is -inf"),
    "rows: it raises": (Together(raise_it), "logits_processor raised KeyError: 'no such thing'"),
    "rows: one too few": (Together(lambda _, row: row, lambda rows: rows[1:]), "process_rows returned"),
    "rows: one too many": (Together(lambda _, row: row, lambda rows: [*rows, None]), "process_rows returned"),
    "rows: no list": (Together(lambda _, row: row, lambda _: 5), "logits_processor raised TypeError"),
    "rows: short ones": (Together(lambda _, row: row[:5]), "it returned an array of shape (5,)"),
    "rows: NaN": (Together(fill_with_nan), "no token can be sampled: the largest logit of this row is nan"),
}

each_mistake = pytest.mark.parametrize(("bad", "message"), MISTAKES.values(), ids=MISTAKES)


@each_mistake
@pytest.mark.parametrize("temperature", [0, 1], ids=["greedy", "drawn"])
def test_its_mistake_ends_its_own_requests_with_an_error_and_no_other(
    bad: Any, message: str, temperature: float
) -> None:
    good = greedy(10, ignore_eos=True)
    broken = SamplingParams(temperature=temperature, max_tokens=10, logits_processor=bad)
    engine = fake_engine(n_parallel=8)
    results = engine.generate(PROMPTS, [broken if i % 2 else good for i in range(len(PROMPTS))])
    for result in results[1::2]:
        assert (result.tokens, result.text, result.finish_reason) == ([], "", FinishReason.ERROR)
        assert result.error is not None
        assert message in result.error
    for prompt, result in zip(PROMPTS[::2], results[::2], strict=True):
        assert result_of(result) == reference(prompt, good)
        assert result.error is None
    assert_all_is_free(engine)


def later(bad: Any) -> Any:
    """Good for two tokens after a prompt of three, then as `bad` as that."""
    if not hasattr(bad, "process_rows"):
        return lambda tokens, row: bad(tokens, row) if len(tokens) >= 5 else None
    return SimpleNamespace(
        process_rows=lambda tokens, rows: bad.process_rows(tokens, rows) if len(tokens[0]) >= 5 else None
    )


@each_mistake
def test_an_error_in_the_middle_of_a_text_keeps_the_text_so_far(bad: Any, message: str) -> None:
    (result,) = fake_engine().generate([[1, 2, 3]], greedy(10, ignore_eos=True, logits_processor=later(bad)))
    start = reference([1, 2, 3], greedy(2, ignore_eos=True))[0]
    assert (result.tokens, result.text, result.finish_reason) == (start, text_of(start), FinishReason.ERROR)
    assert result.error is not None
    assert message in result.error


def test_one_bad_row_of_many_ends_one_request() -> None:
    def bad_for_4(tokens: Tokens, row: Row) -> None:
        if tokens[0] == 4:
            row[:] = np.nan

    params = greedy(6, logits_processor=Together(bad_for_4))
    results = fake_engine(n_parallel=8).generate(PROMPTS, params)
    ended = [prompt[0] for prompt, result in zip(PROMPTS, results, strict=True) if result.error]
    assert ended == [4]
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert prompt[0] == 4 or result_of(result) == reference(prompt, greedy(6))


def test_of_two_objects_only_the_one_at_fault_ends_its_requests() -> None:
    def params(processor: Any) -> SamplingParams:
        return greedy(6, ignore_eos=True, logits_processor=processor)

    bad, good = Together(raise_it), SeenTogether()
    results = fake_engine(n_parallel=8).generate(PROMPTS, [params((bad, good)[i % 2]) for i in range(len(PROMPTS))])
    assert [result.error is None for result in results] == [False, True] * 4
    assert [result.text for result in results[1::2]] == [reference(p, params(None))[1] for p in PROMPTS[1::2]]


def test_the_engine_continues_after_an_error() -> None:
    engine = fake_engine()
    (failed,) = engine.generate([[1]], greedy(4, logits_processor=raise_it))
    (next_one,) = engine.generate([[1]], greedy(4))
    assert failed.finish_reason is FinishReason.ERROR
    assert result_of(next_one) == reference([1], greedy(4))
