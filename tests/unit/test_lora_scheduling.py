"""Requests with different LoRA adapters take turns: a step computes one set of them, and none of them starves."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest
from hypothesis import strategies as st

from cppbatch.config import Sharing
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.lora_turns import TURN_STEPS, LoraRoundRobin
from cppbatch.engine.model_info import AdapterInfo
from cppbatch.engine.sequence import SeqStatus
from cppbatch.engine.step_budget import StepBudgets
from cppbatch.engine.step_plan import StepPlan
from tests.support.fakes import context_of, drain, fake_engine, greedy, reference
from tests.support.lora_policies import NONE, Policy, X, Y, Z, sequence
from tests.support.randomised import randomised

KNOWN = tuple(AdapterInfo(name=name, path="", scale=0) for name in "xyz")


def test_each_set_has_a_few_steps_then_the_next_one_has() -> None:
    policy = Policy()
    for adapters in (NONE, X, Y):
        policy.add(adapters)
    turns = [(its, len(list(steps))) for its, steps in groupby(policy.turns(6 * TURN_STEPS))]
    assert turns == [(its, TURN_STEPS) for its in (NONE, X, Y, NONE, X, Y)]


def test_a_set_that_is_alone_computes_in_every_step_and_nothing_is_switched() -> None:
    policy = Policy()
    policy.add(X)
    policy.add(X)
    plans = [policy.step() for _ in range(3 * TURN_STEPS)]
    assert [plan.is_switch for plan in plans] == [True] + [False] * (3 * TURN_STEPS - 1)
    assert all(len(plan.scheduled) == 2 for plan in plans)


def test_sets_are_distinguished_by_scale_too() -> None:
    policy = Policy()
    policy.add(((0, 1.0),))
    policy.add(((0, 0.5),))
    assert len(set(policy.turns(2 * TURN_STEPS))) == 2


def test_all_sequences_of_a_set_compute_in_its_turn() -> None:
    policy = Policy(n_parallel=4)
    for adapters in (X, Y, X, Y):
        policy.add(adapters)
    for _ in range(4 * TURN_STEPS):
        assert len(policy.step().scheduled) == 2


def test_when_the_last_of_a_set_ends_its_turn_does() -> None:
    policy = Policy()
    policy.add(X, max_new=2)
    policy.add(Y)
    assert policy.turns(5) == [X, X, Y, Y, Y]


def test_the_highest_priority_is_first_in_the_current_round() -> None:
    policy = Policy()
    policy.add(X)
    policy.add(Y)
    assert policy.turns(1) == [X]
    policy.add(Z, priority=-1)
    assert policy.turns(3 * TURN_STEPS - 1) == [X] * (TURN_STEPS - 1) + [Z] * TURN_STEPS + [Y] * TURN_STEPS


def test_sets_that_keep_coming_do_not_keep_one_from_its_turn() -> None:
    policy = Policy(n_parallel=4)
    policy.add(X)
    for i in range(20):
        policy.add(((0, 0.01 * (i + 1)),), max_new=3)
    steps = policy.turns(60)
    waits = [len(list(its)) for is_x, its in groupby(steps, lambda adapters: adapters == X) if not is_x]
    assert max(waits) <= 3 * TURN_STEPS


def test_a_set_that_cannot_compute_lets_the_next_one_run() -> None:
    turns = LoraRoundRobin()
    both = [sequence(X), sequence(Y)]
    assert turns.order(both) == [X, Y]
    turns.take(Y)
    firsts = []
    for _ in range(TURN_STEPS):  # X cannot in its turn either
        firsts.append(turns.order(both)[0])
        turns.take(Y)
    assert firsts == [Y] * (TURN_STEPS - 1) + [X]


def test_a_prompt_is_read_in_pieces_in_its_sets_turn_for_the_streams_of_other_sets() -> None:
    def cost(plan: StepPlan) -> float:
        return 0.1 * plan.n_tokens

    policy = Policy(n_ctx=1024)
    policy.add(NONE, n_prompt=40, max_new=400)
    for _ in range(10):
        policy.step(cost)
    prompt = policy.add(X, n_prompt=60, max_new=2)
    while prompt.n_computed < 60:
        plan = policy.step(cost)
        is_last = prompt.n_computed == 60
        # The largest tile in 7 times a step of the stream; twice that ends the prompt.
        assert plan.adapters == NONE or plan.n_tokens == (8 if is_last else 4)


def test_cells_of_sets_that_wait_for_their_turn_count_as_used() -> None:
    policy = Policy(n_ctx=48, n_parallel=3)
    for adapters in (X, Y, Z):
        policy.add(adapters, n_prompt=10, max_new=30)
    for _ in range(200):
        if not policy.scheduler.has_work:
            break
        policy.step()  # checks the books, and the context that no more cells are used than there are
    assert not policy.scheduler.has_work
    assert policy.kv.moves.n_swaps > 0


def test_step_times_are_learnt_for_each_set_and_without_the_switch() -> None:
    def cost(plan: StepPlan) -> float:
        return (0.5 if plan.adapters else 0.1) + 10 * plan.is_switch

    policy = Policy()
    budgets = policy.scheduler._budgets
    policy.add(NONE, n_prompt=4)
    policy.add(X, n_prompt=4)
    for _ in range(30 * TURN_STEPS):
        policy.step(cost)
    assert [budgets.of(its).cost.rows_s((1,)) for its in (NONE, X)] == pytest.approx([0.1, 0.5], rel=0.01)


def test_a_set_that_has_only_read_prompts_uses_the_times_of_the_last_step() -> None:
    budgets = StepBudgets(2048, prefer="latency")
    budgets.observe(X, (), 100, 1.0)
    assert budgets.of(X).prefill_tokens((), 1, n_others=8) == 2048
    budgets.observe(NONE, (), 100, 1.0)
    budgets.observe(NONE, (8,), 0, 0.1)
    assert budgets.of(X).prefill_tokens((), 1, n_others=8) == 16  # whole tiles of 25: 2.5 * 0.1 s at 0.01 s each


def test_the_times_of_few_sets_are_kept() -> None:
    budgets = StepBudgets(2048, prefer="latency")
    for i in range(1000):
        budgets.observe(((0, i + 1.0),), (1,), 0, 0.1)
    assert len(budgets._budgets) <= 64


# --- no request starves ---------------------------------------------------------------------------------------------

ARRIVALS = st.tuples(st.sampled_from((NONE, X, Y, Z)), st.integers(1, 30), st.integers(1, 30))


@randomised(
    ring=30,
    nightly=100,
    soak=300,
    arrivals=st.lists(ARRIVALS, min_size=2, max_size=20),
    pauses=st.lists(st.integers(0, 6), min_size=20, max_size=20),
    n_ctx=st.sampled_from((64, 100, 400)),
    unified=st.booleans(),
)
def test_in_any_schedule_a_set_that_runs_computes_before_long(
    arrivals: list[tuple[AdapterSet, int, int]], pauses: list[int], n_ctx: int, unified: bool
) -> None:
    policy = Policy(n_ctx=n_ctx if unified else 400, n_parallel=4, unified=unified)
    waits: dict[AdapterSet, int] = {}
    coming = iter(zip(arrivals, pauses, strict=False))
    pause = 0
    for _ in range(4000):
        pause -= 1
        while pause <= 0 and (new := next(coming, None)):
            policy.add(*new[0])
            pause = new[1]
        if not policy.scheduler.has_work and pause <= 0:
            return
        streams = [its for its in policy.scheduler.running if its.status is SeqStatus.DECODE]
        plan = policy.step(lambda plan: 0.1 * plan.n_tokens)  # so that prompts are read in small pieces
        others = [its for its in streams if its.adapters != plan.adapters and its.status is SeqStatus.DECODE]
        if unified and plan.n_tokens > plan.n_decode:
            assert policy.kv.n_free >= len(others), "a prompt takes cells that streams of other sets need next"
        running = {its.adapters for its in policy.scheduler.running}
        waits = {its: 0 if its == plan.adapters else waits.get(its, 0) + 1 for its in running}
        assert max(waits.values(), default=0) <= 3 * TURN_STEPS
    raise AssertionError("the scheduler never comes to rest")


@pytest.mark.parametrize(("unified", "sharing"), [(True, "cells"), (False, "copy")])
def test_the_same_prompt_with_other_adapters_never_takes_their_prefix(unified: bool, sharing: Sharing) -> None:
    engine = fake_engine(n_ctx=512, n_batch=64, unified=unified, sharing=sharing, adapters=KNOWN)
    prompt, params = list(range(50)), greedy(8, ignore_eos=True)
    sets: list[dict[str | int, float]] = [{}, {"x": 1}, {"x": 0.5}, {"y": 1}, {"x": 1, "y": 1}, {1: 1}]
    natives: list[AdapterSet] = [NONE, X, ((0, 0.5),), Y, ((0, 1.0), (1, 1.0)), Y]
    for cached in (False, True):
        for lora, native in zip(sets, natives, strict=True):
            (result,) = engine.generate([prompt], params, lora=lora)
            assert result.tokens == reference(prompt, params, native)[0]
            assert (result.usage.cached_tokens > 0) == (cached or lora == {1: 1})
    engine.close()


def test_adapters_are_set_when_the_set_changes_and_steps_are_shared_within_one() -> None:
    engine = fake_engine(n_ctx=512, n_parallel=8, adapters=KNOWN)
    for i in range(8):
        engine.add_request([i + 1], greedy(16, ignore_eos=True), lora={"x": 1} if i % 2 else {"y": 1})
    drain(engine)
    context = context_of(engine)
    assert Counter(len(step) for step in context.steps)[4] >= 2 * 16 - 4  # all of a set together, once all have begun
    assert len(list(groupby(context.sets))) <= 2 * 16 / TURN_STEPS + 2
