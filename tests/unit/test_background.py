"""Background work (priority 100) uses the capacity that others leave, and yields it at once."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import strategies as st

from cppbatch import FinishReason, GenerationRequest
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.request import BACKGROUND
from cppbatch.engine.sequence import Seq, SeqStatus
from cppbatch.engine.step_plan import StepPlan
from tests.support.fakes import context_of, drain, fake_engine, greedy, reference, tokens_of
from tests.support.lora_policies import NONE, Policy, X, Y
from tests.support.randomised import randomised


def background(policy: Policy, n: int, n_prompt: int = 1) -> list[Seq]:
    return [policy.add(NONE, n_prompt, priority=BACKGROUND) for _ in range(n)]


def computed(plan: StepPlan) -> dict[Seq, int]:
    return dict(plan.scheduled)


def by_tokens(plan: StepPlan) -> float:
    """Steps that cost a tenth of a second for each token, so that prompts beside streams are read in small pieces."""
    return 0.1 * plan.n_tokens


def test_the_lowest_priority_is_that_of_background_work() -> None:
    assert BACKGROUND == 100
    assert GenerationRequest(id="", prompt="", priority=BACKGROUND).priority == BACKGROUND


def test_while_a_prompt_is_read_background_rows_and_prompts_pause_and_then_continue() -> None:
    policy = Policy(n_ctx=512)
    streams = background(policy, 2)
    policy.step()
    prompt, *_ = background(policy, 1, 30)
    policy.step()
    urgent = policy.add(NONE, 40)
    plans = [policy.step() for _ in range(3)]
    assert [computed(plan) for plan in plans] == [{urgent: 16}, {urgent: 16}, {urgent: 8}]
    assert [plan.n_decode for plan in plans] == [0, 0, 0]
    assert set(computed(policy.step())) == {urgent, prompt, *streams}


def test_a_prompt_is_read_in_whole_steps_as_if_background_streams_were_not_there() -> None:
    policy = Policy(n_ctx=512)
    background(policy, 3)
    for _ in range(10):
        policy.step(by_tokens)
    urgent = policy.add(NONE, 32)
    assert [computed(policy.step(by_tokens)) for _ in range(2)] == [{urgent: 16}] * 2


def test_beside_other_streams_it_is_read_in_pieces_to_limit_their_delay() -> None:
    policy = Policy(n_ctx=1024)
    stream = policy.add(NONE)
    background(policy, 2)
    for _ in range(40):
        policy.step(by_tokens)
    urgent = policy.add(NONE, 20)
    while not urgent.n_generated:
        plan = policy.step(by_tokens)
        assert set(computed(plan)) <= {stream, urgent}
        assert plan.n_tokens <= 1 + 8, "the least piece, or twice that if it ends the prompt"


def test_no_other_priority_is_paused() -> None:
    policy = Policy(n_ctx=512)
    low = policy.add(NONE, priority=BACKGROUND - 1)
    policy.step()
    policy.add(NONE, 40)
    assert low in computed(policy.step())


def test_a_prompt_that_is_cached_but_for_its_last_token_is_waited_for_too() -> None:
    engine = fake_engine(n_ctx=256, n_batch=64, sharing="cells")
    (first,) = engine.generate([[1] * 40], greedy(1))
    for i in range(3):
        engine.add_request([i + 2, 3], greedy(30, ignore_eos=True), priority=BACKGROUND)
    engine.step()
    engine.add_request([1] * 40, greedy(1), request_id="urgent")
    (event,) = engine.step()
    assert (event.request_id, event.tokens) == ("urgent", first.tokens)
    assert context_of(engine).steps[-1] == {3: 1}
    drain(engine)


def test_background_work_with_other_adapters_waits_meanwhile() -> None:
    policy = Policy(n_ctx=512)
    policy.add(X, priority=BACKGROUND)
    stream = policy.add(Y)
    for _ in range(3):
        policy.step()
    policy.add(NONE, 100)
    turns = policy.turns(12)
    assert X not in turns
    assert {NONE, Y} == set(turns), "but those of others that run have theirs"
    assert stream.n_generated > 3


def test_paused_rows_are_not_counted_in_measured_steps() -> None:
    def cost(plan: StepPlan) -> float:
        return 0.1 * plan.n_decode + 0.01 * (plan.n_tokens - plan.n_decode)

    policy = Policy(n_ctx=512)
    background(policy, 3)
    for _ in range(10):
        policy.step(cost)
    policy.add(NONE, 64)
    for _ in range(4):
        policy.step(cost)
    times = policy.scheduler._budgets.of(NONE)
    assert times.cost.token_s(64) == pytest.approx(0.01)
    assert times.cost.rows_s((3,)) == pytest.approx(0.3)


def test_many_background_prompts_hold_up_streams_of_others_no_more_than_one_does() -> None:
    policy = Policy(n_ctx=1024, n_parallel=8)
    stream = policy.add(NONE)
    for _ in range(10):
        policy.step(by_tokens)
    prompts = background(policy, 7, 20)
    for _ in range(30):
        plan = policy.step(by_tokens)
        assert stream in computed(plan)
        assert plan.n_tokens - plan.n_decode <= max(4, 1.5 * plan.n_decode)
    assert prompts[0].n_generated > 0


def test_without_such_streams_they_are_read_together_however_few_decode() -> None:
    policy = Policy(n_ctx=1024, n_parallel=8)
    background(policy, 1)
    for _ in range(10):
        policy.step(lambda plan: 0.001 * plan.n_tokens)
    background(policy, 7, 20)
    assert policy.step(lambda plan: 0.001 * plan.n_tokens).n_tokens == 16


def test_one_that_comes_when_background_work_has_all_places_and_cells_is_admitted_and_read_at_once() -> None:
    params = greedy(40, ignore_eos=True)
    engine = fake_engine(n_ctx=256, n_batch=128, n_parallel=16)
    names = [engine.add_request([i, 1, 2], params, priority=BACKGROUND) for i in range(16)]
    events = []
    while engine.core.kv.n_free > 20:
        events += engine.step()
    assert engine.stats().running == 16
    engine.add_request([7] * 100, greedy(3, ignore_eos=True), request_id="urgent")
    told = engine.step()
    assert [event.request_id for event in told] == ["urgent"]
    assert context_of(engine).steps[-1].popitem()[1] == 100
    assert engine.stats().running < 12, "several had to make room"
    events += [*told, *drain(engine)]
    assert len([event for event in events if event.finish_reason is FinishReason.LENGTH]) == 17
    for i, name in enumerate(names):
        tokens = tokens_of(events, name)
        assert tokens == reference([i, 1, 2], params)[0]


def test_several_that_come_together_are_admitted_in_one_step() -> None:
    policy = Policy(n_ctx=512)
    streams = background(policy, 4)
    policy.step()
    urgent = [policy.add(NONE, 4) for _ in range(3)]
    plan = policy.step()
    assert plan.admitted == urgent
    assert computed(plan) == dict.fromkeys(urgent, 4)
    assert [its.status for its in streams] == [SeqStatus.DECODE, *[SeqStatus.SWAPPED] * 3]


def test_the_step_in_which_cells_run_out_still_admits_one_of_higher_priority() -> None:
    policy = Policy(n_ctx=64, n_parallel=4)
    streams = background(policy, 3)
    while policy.kv.n_free >= 3:
        policy.step()
    urgent = policy.add(NONE, 8)
    assert policy.step().admitted == [urgent]
    assert streams[0].status is SeqStatus.DECODE


def test_endless_prompts_delay_background_work_until_it_ranks_before_them() -> None:
    policy = Policy(n_ctx=1024, n_parallel=2)
    (patient,) = background(policy, 1)
    policy.step()
    n_known, seconds = patient.n_tokens, count(step=10)
    for now in seconds:
        policy.add(NONE, 8, max_new=1, now=float(now))
        policy.step()
        if patient.n_tokens > n_known:
            break
        assert now < 2000, "it starves"
    assert 1000 <= now <= 1020


ARRIVALS = st.tuples(
    st.sampled_from((NONE, NONE, X)), st.integers(1, 30), st.integers(1, 30), st.sampled_from((0, BACKGROUND))
)


@randomised(
    ring=30,
    nightly=100,
    soak=300,
    arrivals=st.lists(ARRIVALS, min_size=2, max_size=20),
    pauses=st.lists(st.integers(0, 6), min_size=20, max_size=20),
    n_ctx=st.sampled_from((64, 100, 400)),
    unified=st.booleans(),
)
def test_in_any_schedule_no_request_waits_for_background_rows_and_every_step_computes_something(
    arrivals: list[tuple[AdapterSet, int, int, int]], pauses: list[int], n_ctx: int, unified: bool
) -> None:
    policy = Policy(n_ctx=n_ctx if unified else 400, n_parallel=4, unified=unified)
    coming = iter(zip(arrivals, pauses, strict=False))
    pause = 0
    for _ in range(4000):
        pause -= 1
        while pause <= 0 and (new := next(coming, None)):
            (adapters, n_prompt, max_new, priority), pause = new
            policy.add(adapters, n_prompt, max_new, priority=priority)
        if not policy.scheduler.has_work and pause <= 0:
            return
        begun = {its for its in policy.scheduler.running if its.n_generated}
        plan = policy.step(by_tokens)
        urgent = {its for its in policy.scheduler.running if not its.is_background} - begun
        waited_for = {its for its in urgent if not its.n_generated} | (set(computed(plan)) & urgent)
        if waited_for:
            assert not any(its.is_background for its in computed(plan))
        assert plan.scheduled or plan.admitted or not policy.scheduler.running
    raise AssertionError("the scheduler never comes to rest")
