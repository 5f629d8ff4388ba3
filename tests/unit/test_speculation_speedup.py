"""`cppbatch bench throughput --spec`: the same requests with and without drafts, and what becomes of their counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine
from cppbatch.bench.speculation_speedup import Answer, SpeedupSizes, Turn, WorkloadRun, run_prompts, speedup_figures
from cppbatch.bench.text_workloads import TEXT_WORKLOADS
from cppbatch.engine.request import RequestUsage
from cppbatch.errors import ConfigError
from tests.support.fakes import FakeProposer, fake_engine, greedy, know


@pytest.mark.parametrize("name", TEXT_WORKLOADS)
def test_a_seed_gives_the_same_prompts_and_another_seed_others(name: str) -> None:
    workload = TEXT_WORKLOADS[name]
    prompts = workload.prompts(16, "a")
    assert prompts == workload.prompts(16, "a")
    assert prompts[:3] == workload.prompts(3, "a")
    assert len(set(prompts)) == 16
    assert not set(prompts) & set(workload.prompts(16, "b"))


def test_answers_can_be_copied_from_the_prompt() -> None:
    """Why these prompts suit drafts: the model's task is to repeat a part of them."""
    (code,) = TEXT_WORKLOADS["code"].prompts(1, 1)
    assert code.count("result") == 4
    (orders,) = TEXT_WORKLOADS["json"].prompts(1, 1)
    assert orders.count(" ordered ") == 4
    first, second = TEXT_WORKLOADS["job"].prompts(2, 1)
    assert first.partition("Product: ")[0] == second.partition("Product: ")[0]


def drafting_engine(**settings: Any) -> BatchInferenceEngine:
    engine = fake_engine(n_ctx=1600, n_batch=256, n_parallel=8, proposers=[FakeProposer()], **settings)
    know(engine, {1: 0.010, 256: 0.011})  # drafts cost next to nothing
    return engine


def test_a_run_keeps_that_many_requests_in_flight_and_returns_their_answers_in_order() -> None:
    at_once: Counter[int] = Counter()
    engine = drafting_engine(on_plan=lambda plan: at_once.update([len({each.id for each, _ in plan.scheduled})]))
    prompts = ["ab" * (1 + i) for i in range(7)]
    run = run_prompts(engine, prompts, greedy(9, ignore_eos=True), 3, salt="a")
    assert max(at_once) == 3
    assert [answer.usage.prompt_tokens for answer in run.answers] == [2 * (1 + i) for i in range(7)]
    assert [len(answer.tokens) for answer in run.answers] == [9] * 7
    assert run.tokens_per_second == pytest.approx(63 / run.seconds)


def test_requests_that_do_not_speculate_get_no_drafts_and_the_same_texts() -> None:
    engine = drafting_engine()
    prompts = [f"{letter}b" for letter in "abcdefgh"]
    plain, drafted = (
        run_prompts(engine, prompts, greedy(40, ignore_eos=True, speculate=speculate), 8, salt=str(speculate))
        for speculate in (False, True)
    )
    assert [answer.tokens for answer in plain.answers] == [answer.tokens for answer in drafted.answers]
    assert {answer.usage.drafted_tokens for answer in plain.answers} == {0}
    figures = speedup_figures([Turn(plain, drafted)])
    assert figures["same_texts"] == "8 of 8"
    assert 0 < figures["accepted_tokens"] < figures["drafted_tokens"]


def answer(tokens: list[int], *, drafted: int = 0, accepted: int = 0, first: float = 1.0, total: float = 2.0) -> Answer:
    return Answer(
        tokens,
        RequestUsage(
            prompt_tokens=5,
            completion_tokens=len(tokens),
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            queue_seconds=0.0,
            first_token_seconds=first,
            total_seconds=total,
        ),
    )


def test_ratios_are_those_of_the_turns() -> None:
    def turn(plain_seconds: float, drafted_seconds: float) -> Turn:
        plain = WorkloadRun(plain_seconds, [answer([1] * 10, total=1 + plain_seconds), answer([2])])
        drafted = WorkloadRun(
            drafted_seconds,
            [answer([1] * 10, drafted=12, accepted=6, total=1 + drafted_seconds), answer([3], drafted=4)],
        )
        return Turn(plain, drafted)

    figures = speedup_figures([turn(2, 1), turn(9, 3), turn(8, 8)])
    speedup = figures["speedup"]
    assert (speedup.median, speedup.low, speedup.high) == pytest.approx((2, 1, 3))
    assert figures["decode_speedup"].median == pytest.approx(2)  # the answer of one token has no time between tokens
    assert figures["plain"].median == 11 / 8
    assert (figures["draft_tokens_percent"], figures["acceptance_percent"]) == (100 * 48 / 33, 100 * 18 / 48)
    assert figures["same_texts"] == "3 of 6"


def test_without_drafts_no_acceptance_is_reported() -> None:
    run = WorkloadRun(1.0, [answer([1, 2])])
    assert speedup_figures([Turn(run, run)])["acceptance_percent"] is None


def test_sizes_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="--repeats is 0"):
        SpeedupSizes(repeats=0)
    with pytest.raises(ConfigError, match="--new-tokens is 1"):
        SpeedupSizes(new_tokens=1)
