"""Prefill beside running streams: short steps while any request decodes, full-size steps otherwise."""

from __future__ import annotations

from random import Random

import pytest

from cppbatch.engine.step_budget import StepBudget, with_whole_prompts


def run(budget: StepBudget, *, decode_s: float, token_s: float, steps: int = 30) -> list[float]:
    """Step times on a machine with these costs, a long prompt arriving beside 8 decoding sequences."""
    budget.observe((), 512, 512 * token_s)
    for _ in range(5):
        budget.observe((8,), 0, decode_s)
    return run_on(budget, decode_s=decode_s, token_s=token_s, steps=steps)


def run_on(budget: StepBudget, *, decode_s: float, token_s: float, steps: int) -> list[float]:
    """The same, the prompt being read already."""
    times = []
    for _ in range(steps):
        n = budget.prefill_tokens((8,), 1)
        times.append(decode_s + n * token_s)
        budget.observe((8,), n, times[-1])
    return times


@pytest.mark.parametrize(("decode_s", "token_s"), [(0.05, 1e-3), (0.2, 5e-3), (0.03, 1e-4)])
def test_a_step_with_prefill_takes_well_under_three_times_one_without(decode_s: float, token_s: float) -> None:
    assert max(run(StepBudget(2048, prefer="latency"), decode_s=decode_s, token_s=token_s)) <= 2.55 * decode_s


def test_now_and_then_a_step_without_prefill_tells_what_decoding_takes_now() -> None:
    budget = StepBudget(2048, prefer="latency")
    run(budget, decode_s=0.05, token_s=1e-3)
    times = run_on(budget, decode_s=0.08, token_s=1e-3, steps=200)  # the prompt's cells slow decoding down
    assert 0 < times.count(0.08) <= 200 / 15
    assert max(times[40:100]) <= 2.7 * 0.05, "slower streams do not justify slowing them further"


def test_streams_that_are_slower_for_good_are_the_new_measure() -> None:
    budget = StepBudget(2048, prefer="latency")
    run(budget, decode_s=0.05, token_s=1e-3)
    for _ in range(30):
        budget.observe((8,), 0, 0.1)
    assert run_on(budget, decode_s=0.1, token_s=1e-3, steps=1) == pytest.approx([0.25], rel=0.05)


def test_a_given_target_is_kept() -> None:
    assert max(run(StepBudget(2048, 0.08), decode_s=0.05, token_s=1e-3)) <= 0.0805


def test_a_fast_machine_is_not_slowed_by_tiny_steps() -> None:
    times = run(StepBudget(2048, prefer="latency"), decode_s=0.002, token_s=1e-5)
    assert 0.018 < times[-1] <= 0.026


def test_a_prompt_progresses_however_slow_the_machine_is() -> None:
    budget = StepBudget(2048, 0.001)
    run(budget, decode_s=0.5, token_s=0.1)
    assert budget.prefill_tokens((8,), 1) == 4


def test_without_decode_rows_steps_are_large() -> None:
    budget = StepBudget(2048, prefer="latency")
    run(budget, decode_s=0.05, token_s=1e-3)
    assert budget.prefill_tokens((), 1) == 2048


def test_without_streams_a_step_has_at_most_max_alone_tokens() -> None:
    budget = StepBudget(2048, max_alone=512)
    run(budget, decode_s=0.05, token_s=1e-5)
    assert budget.prefill_tokens((), 3) == 512
    assert budget.prefill_tokens((8,), 1) > 512, "that is for the target to say"


def test_the_budget_never_exceeds_the_step() -> None:
    budget = StepBudget(64)
    run(budget, decode_s=0.05, token_s=1e-7)
    assert budget.prefill_tokens((10,), 1) == 54


def test_it_follows_a_machine_that_gets_slower() -> None:
    budget = StepBudget(2048, prefer="latency")
    fast = run(budget, decode_s=0.05, token_s=1e-3)
    slow = run(budget, decode_s=0.05, token_s=3e-3)
    assert slow[-1] == pytest.approx(fast[-1], rel=0.15)  # whole tiles: 64 and 16 tokens


def test_few_streams_do_not_hold_up_many_prompts() -> None:
    budget = StepBudget(2048, prefer="latency")
    run(budget, decode_s=0.05, token_s=1e-3)
    one, two, eight, sixteen = (budget.prefill_tokens((8,), n) for n in (1, 2, 8, 16))
    assert one == two == 64  # whole tiles of 1.5 * 50
    assert one < eight < sixteen
    assert eight == 512  # whole tiles of 1.5 * 50 * 8 * 7 / 8


def test_a_number_of_streams_that_was_not_seen_is_looked_at_alone_first() -> None:
    budget = StepBudget(2048, prefer="latency")
    run(budget, decode_s=0.01, token_s=1e-3)
    assert budget.prefill_tokens((15,), 1) > 0
    assert budget.prefill_tokens((16,), 1) == 0
    budget.observe((16,), 0, 0.02)
    assert budget.prefill_tokens((16,), 1) == 16  # whole tiles of 1.5 * 18: 8 rows take 10 ms, a token 1 ms
    assert budget.prefill_tokens((8,), 1) == 12, "the time of 16 rows is not used for 8"


def test_a_step_without_streams_is_bounded_by_latency_only_if_other_requests_wait() -> None:
    budget = StepBudget(2048, prefer="latency")
    run(budget, decode_s=0.05, token_s=1e-3)
    assert budget.prefill_tokens((), 1, n_others=8) == 112  # whole tiles of 2.5 * 50 tokens
    assert budget.prefill_tokens((), 1) == 2048


@pytest.mark.parametrize(("token_s", "most"), [(1e-5, 512), (2e-3, 100), (0.1, 32)])
def test_background_prompts_take_a_fifth_of_a_second_of_a_step_where_that_is_a_piece_worth_computing(
    token_s: float, most: int
) -> None:
    budget = StepBudget(2048, max_alone=512)
    assert budget.prefill_tokens((), 3, background=True) <= 200, "before anything is known"
    budget.observe((), 100, 100 * token_s)
    assert budget.prefill_tokens((), 3, background=True) == pytest.approx(most, abs=1)
    assert budget.prefill_tokens((), 3) == 512


def test_background_prompts_progress_however_slow_the_machine_is() -> None:
    budget = StepBudget(16)
    budget.observe((), 1, 10.0)
    assert budget.prefill_tokens((), 1, background=True) == 4


@pytest.mark.parametrize("target_s", [0.08, 0.15, 0.4])
def test_a_target_holds_over_random_loads(target_s: float) -> None:
    """350 loads each: of the steps with a prompt piece, 95% take at most 1.1 times the target."""
    draw, times = Random(target_s), []
    for _ in range(350):
        budget = StepBudget(2048, target_s)
        row_s, token_s = draw.uniform(0.002, 0.006), draw.uniform(2e-4, 2e-3)
        budget.observe((), 512, 512 * token_s)
        for _ in range(60):
            n = draw.randint(1, 8)
            n_prompt = budget.prefill_tokens((n,), draw.randint(1, 4)) if draw.random() < 0.7 else 0
            n_prompt = min(n_prompt, draw.randint(1, 900))
            seconds = n * row_s + n_prompt * token_s
            if n_prompt > 4:
                times.append(seconds)
            budget.observe((n,), n_prompt, seconds)
    times.sort()  # the longest are of numbers of rows that are not known yet, which cost what their neighbours say
    assert len(times) > 5000
    assert times[int(0.95 * len(times))] <= 1.1 * target_s
    assert times[-1] <= 2.5 * target_s


def test_a_prompt_that_takes_twice_the_budget_is_computed_whole() -> None:
    budget = StepBudget(2048)
    run(budget, decode_s=0.05, token_s=1e-3)
    n, most = budget.prefill_tokens((8,), 1), budget.whole_tokens((8,))
    assert with_whole_prompts(n, most, [2 * n]) == 2 * n
    assert with_whole_prompts(n, most, [n // 2, n, n]) == n + n // 2, "the first two, and no piece of the third"
    assert with_whole_prompts(n, most, [2 * n + 1, 10]) == n, "it takes two pieces in any case"


def test_a_whole_prompt_makes_no_pause_of_more_than_two_seconds() -> None:
    budget = StepBudget(2048)
    run(budget, decode_s=0.25, token_s=20e-3)
    n, most = budget.prefill_tokens((8,), 1), budget.whole_tokens((8,))
    assert with_whole_prompts(n, most, [n + 4]) == n + 4
    assert with_whole_prompts(n, most, [2 * n]) == n


@pytest.mark.parametrize("budget", [StepBudget(2048, 0.1), StepBudget(2048, prefer="latency")])
def test_a_strict_target_is_kept_also_for_a_whole_prompt(budget: StepBudget) -> None:
    run(budget, decode_s=0.05, token_s=1e-3)
    assert budget.whole_tokens((8,)) == 0
