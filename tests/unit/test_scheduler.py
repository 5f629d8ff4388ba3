"""The scheduler's promises: which requests are admitted or wait, what a step holds, and when cells are free."""

from __future__ import annotations

from collections import Counter
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cppbatch import FinishReason, GenerationRequest, InvalidRequest
from cppbatch.engine.kv.pool import KVPool
from cppbatch.engine.scheduler import Scheduler
from cppbatch.engine.sequence import Seq, SeqStatus
from cppbatch.engine.step_budget import StepBudget, StepBudgets
from cppbatch.engine.step_plan import StepPlan
from cppbatch.engine.step_shape import StepShape, step_shape
from cppbatch.errors import CacheFull, DecodeFailed, LlamaError
from tests.support.fakes import (
    FakeContext,
    context_of,
    drain,
    endless,
    fake_engine,
    greedy,
    reference,
    run_steps,
    tokens_of,
)

UNIFIED = pytest.mark.parametrize("unified", [True, False], ids=["unified", "per-sequence"])


class Policy:
    """A scheduler over a pool, with no engine: `step` plans, and computes by only counting."""

    def __init__(self, *, n_ctx: int = 64, n_seq_ids: int = 4, unified: bool = True, step_tokens: int = 8) -> None:
        self.memory = FakeContext(
            n_ctx=n_ctx, n_batch=step_tokens, n_seq_max=n_seq_ids, kv_unified=unified, sharing="none"
        )
        self.kv = KVPool(self.memory, "none", swap_bytes=1 << 30, cache_bytes=0)
        budgets = StepBudgets(step_tokens)
        self.scheduler = Scheduler(
            self.kv, budgets=budgets, shape=StepShape(self.kv, step_tokens=step_tokens), n_parallel=n_seq_ids
        )

    def add(self, name: str, n_prompt: int, max_new: int, now: float = 0.0, client: str = "") -> Seq:
        prompt = np.zeros(n_prompt, np.int32)
        request = GenerationRequest(id=name, prompt=[], client=client)
        sequence = Seq(request, prompt, max_new=max_new, seed=0, now=now)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        self.kv.apply()
        self.kv.check()
        outputs = plan.outputs()
        for sequence, n in plan.scheduled:
            self.memory.add_text(sequence.seq_id, n)
            self.kv.computed(sequence, n)
        for sequence in outputs:
            sequence.append(0)
            if sequence.n_generated == sequence.max_new:
                self.end(sequence)
        return plan

    def end(self, sequence: Seq) -> None:
        self.scheduler.remove(sequence)
        self.kv.release(sequence, keep=False)
        sequence.finished()

    def admitted_until_idle(self) -> list[str]:
        names = []
        for _ in range(1000):
            names += ids(self.step().admitted)
        assert not self.scheduler.has_work
        return names


def ids(sequences: list[Seq]) -> list[str]:
    return [sequence.id for sequence in sequences]


def chunks(plan: StepPlan) -> dict[str, int]:
    return {sequence.id: n for sequence, n in plan.scheduled}


# --- admission ------------------------------------------------------------------------------------------------------


@UNIFIED
def test_first_come_first_served(unified: bool) -> None:
    policy = Policy(unified=unified)
    sizes = [(3, 2), (9, 5), (1, 1), (14, 2), (2, 9), (5, 5), (1, 15), (8, 1)]
    names = [policy.add(f"r{i}", *size).id for i, size in enumerate(sizes)]
    assert policy.admitted_until_idle() == names


def test_a_sequence_gets_in_when_its_prompt_fits_with_headroom_for_all_to_grow() -> None:
    policy = Policy(n_ctx=64)  # headroom 4 each
    policy.add("a", 24, 30)
    policy.add("b", 32, 30)
    policy.add("c", 1, 30)
    assert ids(policy.step().admitted) == ["a", "b"]
    assert ids(policy.step().admitted) == []


def test_one_cell_too_few_keeps_a_sequence_out() -> None:
    policy = Policy(n_ctx=64)
    policy.add("a", 24, 30)
    policy.add("b", 33, 30)
    assert ids(policy.step().admitted) == ["a"]


def test_headroom_is_at_most_what_may_still_be_generated() -> None:
    policy = Policy(n_ctx=64)
    policy.add("a", 24, 1)
    policy.add("b", 38, 1)
    assert ids(policy.step().admitted) == ["a", "b"]


# --- preemption -----------------------------------------------------------------------------------------------------


def test_when_the_cells_are_full_the_latest_arrived_gives_its_own_up_and_resumes_first() -> None:
    policy = Policy(n_ctx=64, n_seq_ids=4, step_tokens=64)
    first, second, third = (policy.add(name, 16, 40) for name in ("first", "second", "third"))
    policy.add("fourth", 30, 2)
    while third.status is not SeqStatus.SWAPPED:
        policy.step()
    assert policy.kv.n_free < third.n_tokens
    assert (first.status, second.status) == (SeqStatus.DECODE, SeqStatus.DECODE)
    assert [sequence.id for sequence in policy.scheduler.waiting] == ["third", "fourth"]
    n_computed = third.n_computed
    policy.end(first)
    assert ids(policy.step().admitted) == ["third"]
    assert (third.status, third.n_computed) == (SeqStatus.DECODE, n_computed)
    assert chunks(policy.step())["third"] == 1


def test_the_oldest_progresses_in_every_step() -> None:
    policy = Policy(n_ctx=64, n_seq_ids=4, step_tokens=64)
    sequences = [policy.add(f"r{i}", 8, 50) for i in range(6)]
    while policy.scheduler.has_work:
        oldest = next(s for s in sequences if s.status is not SeqStatus.FINISHED)
        plan = policy.step()
        assert oldest in plan.admitted or oldest.id in chunks(plan)


@pytest.mark.parametrize("swap_space", [0, 1, 1024])
def test_preempted_requests_get_the_text_they_would_have_got(swap_space: int) -> None:
    engine = fake_engine(n_ctx=64, n_parallel=8, swap_space=swap_space)
    prompts = [[i, i + 1, i + 2] for i in range(12)]
    results = engine.generate(prompts, endless(40))
    assert [result.tokens for result in results] == [reference(prompt, endless(40))[0] for prompt in prompts]
    stats = engine.stats()
    assert (stats.swaps > 0) == (swap_space > 0)
    assert (stats.recomputes > 0) == (swap_space < 1024)
    assert (stats.kv_cells_used, stats.swapped_bytes) == (0, 0)


def test_a_memory_that_cannot_be_restored_is_computed_again() -> None:
    engine = fake_engine(n_ctx=64, n_parallel=8)
    context_of(engine).fail_restore = True
    results = engine.generate([[i] for i in range(8)], endless(40))
    assert [result.tokens for result in results] == [reference([i], endless(40))[0] for i in range(8)]
    assert engine.stats().recomputes > 0


def test_cancelling_a_swapped_out_request_frees_its_host_memory() -> None:
    engine = fake_engine(n_ctx=64, n_parallel=8)
    names = [engine.add_request([i], endless(60)) for i in range(8)]
    while not engine.stats().swapped_bytes:
        engine.step()
    for name in reversed(names):
        engine.cancel(name)
    assert engine.stats().swapped_bytes == 0
    drain(engine)


# --- admission in either layout ---------------------------------------------------------------------------------------


def test_in_the_per_sequence_layout_every_seq_id_has_its_own_cells() -> None:
    policy = Policy(n_ctx=64, n_seq_ids=4, unified=False)
    for name in "abcde":
        policy.add(name, 10, 6)
    assert ids(policy.step().admitted) == ["a", "b", "c", "d"]


def test_a_big_request_is_not_starved_by_small_ones_after_it() -> None:
    policy = Policy(n_ctx=64)
    first = policy.add("small", 4, 50)
    policy.add("big", 54, 10)
    for i in range(3):
        policy.add(f"late-{i}", 1, 1)
    assert ids(policy.step().admitted) == ["small"]
    for _ in range(5):
        assert ids(policy.step().admitted) == []
    policy.end(first)
    assert policy.step().admitted[0].id == "big"


@UNIFIED
def test_a_request_that_can_never_fit_is_refused_with_both_numbers(unified: bool) -> None:
    engine = fake_engine(n_ctx=64, n_parallel=4, unified=unified)
    limit = 64 if unified else 16
    with pytest.raises(InvalidRequest, match=rf"\b{limit + 1}\b.*\b{limit}\b"):
        engine.add_request([1] * 10, greedy(limit - 9))
    assert not engine.has_work


@UNIFIED
def test_a_request_that_just_fits_runs_to_its_end(unified: bool) -> None:
    engine = fake_engine(n_ctx=64, n_parallel=4, unified=unified)
    limit = 64 if unified else 16
    engine.add_request([1] * 10, endless(limit - 10))
    assert drain(engine)[-1].finish_reason is FinishReason.LENGTH


def test_the_lowest_seq_ids_are_given_first() -> None:
    policy = Policy()
    a, b, c = (policy.add(name, 2, 9) for name in "abc")
    policy.step()
    assert [s.seq_id for s in (a, b, c)] == [0, 1, 2]
    policy.end(b)
    policy.end(a)
    d, e, f = (policy.add(name, 2, 9) for name in "def")
    policy.step()
    assert [s.seq_id for s in (d, e, f)] == [0, 1, 3]


# --- what a step holds ----------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_of_n_batch() -> None:
    engine = fake_engine(n_batch=8)
    engine.add_request([1] * 20, greedy(1))
    drain(engine)
    assert context_of(engine).steps == [{0: 8}, {0: 8}, {0: 4}]


def test_prefill_takes_what_the_decode_rows_leave_of_a_step() -> None:
    policy = Policy(step_tokens=8)
    policy.add("a", 2, 9)
    policy.add("b", 2, 9)
    policy.step()
    policy.add("long", 11, 1)
    assert [chunks(policy.step()) for _ in range(3)] == [
        {"a": 1, "b": 1, "long": 6},
        {"a": 1, "b": 1, "long": 5},
        {"a": 1, "b": 1},
    ]


def test_several_short_prompts_share_one_step() -> None:
    engine = fake_engine(n_batch=8)
    for n in (3, 3, 2):
        engine.add_request([1] * n, greedy(1))
    assert len(engine.step()) == 3
    assert context_of(engine).steps == [{0: 3, 1: 3, 2: 2}]


def test_beside_streams_short_prompts_are_not_held_up_by_a_long_one_nor_it_by_them() -> None:
    policy = Policy(n_ctx=256, n_seq_ids=5, step_tokens=9)
    policy.add("stream", 1, 99)
    policy.step()
    for name, n_prompt in (("long", 100), ("middle", 9), ("short", 3)):
        policy.add(name, n_prompt, 9)
    assert [chunks(policy.step()) for _ in range(4)] == [
        {"stream": 1, "short": 3, "middle": 4},  # whole tiles: 8 tokens in all
        {"stream": 1, "long": 6, "short": 1},
        {"stream": 1, "short": 1, "middle": 5},
        {"stream": 1, "short": 1, "middle": 1, "long": 5},
    ]


@pytest.mark.parametrize("n_before", range(4))
def test_the_next_step_computes_a_short_prompt_and_no_piece_of_the_long_one(n_before: int) -> None:
    policy = Policy(n_ctx=256, n_seq_ids=4, step_tokens=8)
    policy.add("long", 100, 9)
    for _ in range(n_before):
        policy.step()
    policy.add("short", 6, 1)
    steps = [chunks(policy.step()) for _ in range(3)]
    assert steps == [{"short": 6}, {"long": 8}, {"long": 8}]


def test_a_short_prompt_does_not_wait_for_a_piece_of_a_long_one_after_it() -> None:
    policy = Policy(n_ctx=256, n_seq_ids=4, step_tokens=8)
    for name, n_prompt in (("short", 3), ("long", 100), ("another short", 4)):
        policy.add(name, n_prompt, 1)
    assert [chunks(policy.step()) for _ in range(2)] == [{"short": 3, "another short": 4}, {"long": 8}]


@settings(deadline=None, max_examples=50)
@given(
    long=st.lists(st.integers(20, 200), min_size=1, max_size=4),
    arrivals=st.lists(st.lists(st.integers(1, 8), max_size=5), max_size=40),
    step_tokens=st.sampled_from([8, 16]),
)
def test_in_any_schedule_a_prompt_waits_two_steps_for_each_step_of_shorter_ones_before_it(
    long: list[int], arrivals: list[list[int]], step_tokens: int
) -> None:
    """Prompts that fit into one step, however long the others are; and the first long one has every other step."""
    policy = Policy(n_ctx=8192, n_seq_ids=64, step_tokens=step_tokens)
    first, *_ = (policy.add(f"long {i}", n, 1) for i, n in enumerate(long))
    work: dict[Seq, int] = {}  # by waiting short prompt: the tokens of short prompts that were or became pending
    waited: Counter[Seq] = Counter()
    n_steps = 0
    while policy.scheduler.has_work:
        if arrivals:
            n_new = arrivals.pop()
            pending = sum(short.n_pending for short in work)
            for short in work:
                work[short] += sum(n_new)
            for i, n in enumerate(n_new):
                work[policy.add(f"short {i}", n, 1)] = pending + sum(n_new)
        plan = policy.step()
        n_steps += not first.n_generated
        for short in [*work]:
            waited[short] += 1
            assert waited[short] <= 2 * ceil(work[short] / step_tokens) + len(long), "one more where a long prompt ends"
            if short.n_generated:
                del work[short]
        if not plan.scheduled:
            pytest.fail("a step computes nothing")
    assert n_steps <= 2 * ceil(long[0] / step_tokens)


def test_a_long_prompt_has_half_of_the_steps_however_many_short_ones_arrive() -> None:
    policy = Policy(n_ctx=4096, n_seq_ids=8, step_tokens=8)
    long = policy.add("long", 80, 1)
    for n_steps in range(1, 100):
        policy.add(f"short {n_steps}", 8, 1, now=n_steps)
        policy.step()
        if long.n_generated:
            break
    assert 10 <= n_steps <= 20


def test_clients_take_turns() -> None:
    """Each request of a client counts as having arrived after the time that its earlier ones take."""
    policy = Policy(n_seq_ids=1)
    for i in range(20):
        policy.add(f"many {i}", 2, 1, now=0.0, client="many")
    for i in range(3):
        policy.add(f"few {i}", 2, 1, now=1.2, client="few")
    names = policy.admitted_until_idle()
    assert [name for name in names if name.startswith("few")] == ["few 0", "few 1", "few 2"]
    assert names.index("few 0") == 3, "a request takes half a second, as long as none is measured"
    assert names.index("few 2") < 10
    assert [name for name in names if name.startswith("many")] == [f"many {i}" for i in range(20)]


def test_a_client_s_turn_is_as_long_as_its_requests_take() -> None:
    policy = Policy(n_seq_ids=2)
    for i in range(60):
        sequence = policy.add(f"before {i}", 2, 1, now=1.0)
        sequence.admitted_at = 1.0
        policy.scheduler.finished(sequence, 9.0)  # 8 s with two at a time
    for i in range(4):
        policy.add(f"many {i}", 2, 1, now=10.0, client="many")
    policy.add("few", 2, 1, now=13.0, client="few")
    assert [each.id for each in policy.scheduler.waiting] == ["many 0", "few", "many 1", "many 2", "many 3"]


def test_prompts_are_computed_in_order_of_arrival() -> None:
    policy = Policy(step_tokens=8)
    for name in "abc":
        policy.add(name, 6, 1)
    assert [chunks(policy.step()) for _ in range(3)] == [{"a": 6, "b": 2}, {"b": 4, "c": 4}, {"c": 2}]


def test_decode_rows_are_in_order_of_seq_id_regardless_of_arrival() -> None:
    policy = Policy(n_seq_ids=6)
    first = [policy.add(name, 1, 9) for name in "abcd"]
    policy.step()
    policy.end(first[0])
    policy.end(first[2])
    policy.add("e", 1, 9)
    policy.add("f", 1, 9)
    policy.step()
    assert [sequence.seq_id for sequence, _ in policy.step().scheduled] == [0, 1, 2, 3]


@pytest.mark.parametrize(("n_prompt", "order"), [(60, [3, 0, 1, 2]), (200, [3, 2, 1, 0])])
def test_short_prompts_are_computed_together_and_long_ones_apart(n_prompt: int, order: list[int]) -> None:
    policy = Policy(n_seq_ids=4, step_tokens=1000, n_ctx=8192)
    for i in range(4):
        policy.add(str(i), 1 if i == 3 else n_prompt, 9)
    seq_ids = [sequence.seq_id for sequence, _ in policy.step().scheduled]
    assert seq_ids == (sorted(order) if n_prompt < 128 else order)


def test_rows_do_not_pass_over_the_cells_of_a_far_longer_prompt_after_them() -> None:
    policy = Policy(n_seq_ids=4, step_tokens=800, n_ctx=8192)
    sequences = [policy.add(str(i), 1, 9) for i in range(4)]
    policy.step()
    policy.end(sequences[3])
    prompt = policy.add("long", 4000, 9)
    orders = []
    while prompt.n_computed < 2400:
        orders.append([sequence.seq_id for sequence, _ in policy.step().scheduled])
    assert orders[0] == [0, 1, 2, 3], "its first cells cost the rows nothing"
    assert orders[-1] == [3, 0, 1, 2]


def test_a_step_reports_its_tokens_and_its_decode_rows() -> None:
    policy = Policy(step_tokens=8)
    policy.add("a", 2, 9)
    policy.step()
    policy.add("b", 3, 9)
    plan = policy.step()
    assert (plan.n_tokens, plan.n_decode) == (4, 1)


def test_prompt_tokens_and_decoding_rows_are_counted_apart() -> None:
    engine = fake_engine(n_batch=8)
    engine.add_request([1] * 9, endless(3))
    drain(engine)
    stats = engine.stats()
    assert (stats.steps, stats.prompt_tokens, stats.decode_rows, stats.generated_tokens) == (4, 9, 2, 3)


# --- leaving --------------------------------------------------------------------------------------------------------


def test_the_finished_are_gone_in_that_very_step_and_the_next_one_enters_in_the_next() -> None:
    engine = fake_engine(n_parallel=1)
    engine.add_request([1, 2, 3], greedy(1), request_id="first")
    engine.add_request([4, 5], greedy(1), request_id="second")
    assert [event.request_id for event in engine.step() if event.finish_reason] == ["first"]
    assert (engine.core.kv.n_used, engine.core.kv.n_free_ids, context_of(engine).n_used) == (0, 1, 0)
    assert [event.request_id for event in engine.step() if event.finish_reason] == ["second"]
    assert context_of(engine).steps == [{0: 3}, {0: 2}]


@pytest.mark.parametrize(("steps", "state"), [(0, "waiting"), (1, "prefilling"), (3, "decoding")])
def test_a_cancelled_request_gives_everything_back_at_once(steps: int, state: str) -> None:
    engine = fake_engine(n_batch=8)
    cancelled = engine.add_request([1] * 12, endless(9))
    events = run_steps(engine, steps)
    assert (engine.core.kv.n_used, len(events)) == {"waiting": (0, 0), "prefilling": (8, 0), "decoding": (13, 2)}[state]
    assert engine.cancel(cancelled)
    assert (engine.core.kv.n_used, context_of(engine).n_used, engine.core.kv.n_free_ids) == (0, 0, 4)
    assert [event.finish_reason for event in drain(engine)] == [FinishReason.CANCELLED]


def test_cancelling_one_changes_nothing_for_the_others() -> None:
    engine = fake_engine()
    cancelled = engine.add_request([1, 2, 3], endless(9))
    kept = engine.add_request([4, 5, 6], endless(9))
    events = engine.step()
    engine.cancel(cancelled)
    events += drain(engine)
    tokens = tokens_of(events, kept)
    assert tokens == reference([4, 5, 6], endless(9))[0]


def test_cancelling_an_ended_or_unknown_request_returns_false_without_an_event() -> None:
    engine = fake_engine()
    ended = engine.add_request([1], greedy(1))
    drain(engine)
    assert not engine.cancel(ended)
    assert not engine.cancel("nobody")
    assert not engine.has_work


@pytest.mark.parametrize("error", [DecodeFailed(-3, "no reason"), CacheFull("no free KV cells")])
def test_a_failed_step_ends_only_those_in_its_batch(error: LlamaError) -> None:
    engine = fake_engine(n_batch=4)
    context_of(engine).fail_at[1] = error
    in_batch = engine.add_request([1, 2, 3, 4], greedy(4))
    beside = engine.add_request([6, 7], endless(4))
    (event,) = engine.step()
    assert (event.request_id, event.finish_reason, event.error) == (in_batch, FinishReason.ERROR, str(error))
    assert context_of(engine).n_used == 0
    tokens = [token for event in drain(engine) for token in event.tokens]
    assert tokens == reference([6, 7], endless(4))[0]
    assert engine.stats().finished == {"error": 1, "length": 1}
    assert beside not in engine.core.sequences


def test_after_a_failed_step_new_requests_run_as_usual() -> None:
    engine = fake_engine()
    context_of(engine).fail_at[2] = DecodeFailed(-3, "no reason")
    engine.add_request([1], endless(4))
    drain(engine)
    (result,) = engine.generate([[1, 2, 3]], greedy(4))
    assert (result.tokens, result.text, result.finish_reason) == reference([1, 2, 3], greedy(4))


@UNIFIED
def test_every_accepted_request_ends_in_exactly_one_terminal_event(unified: bool) -> None:
    engine = fake_engine(unified=unified)
    context_of(engine).fail_at[9] = DecodeFailed(-3, "no reason")
    accepted = [engine.add_request([i, i + 1], greedy(1 + i % 9)) for i in range(30)]
    for request_id in accepted[5::7]:
        engine.cancel(request_id)
    terminal = [event for event in drain(engine) if event.finish_reason]
    assert sorted(event.request_id for event in terminal) == sorted(accepted)
    assert {event.finish_reason for event in terminal} >= {FinishReason.CANCELLED, FinishReason.ERROR}


@pytest.mark.parametrize("moment", ["after decode", "while advancing"])
def test_ctrl_c_in_a_step_leaves_the_others_and_their_texts_whole(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    names = [engine.add_request([i, i + 1], endless(12)) for i in range(3)]
    events = run_steps(engine, 4)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        if moment == "after decode":
            broken.setattr(engine.core._sampler, "sample", interrupt)
        else:
            broken.setattr(engine.core.outputs, "accept", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert context_of(engine).n_used == engine.core.kv.n_used
    events += drain(engine)
    for i, name in enumerate(names):
        tokens = tokens_of(events, name)
        assert tokens == reference([i, i + 1], endless(12))[0]


def test_a_long_prompt_is_not_overtaken_by_short_ones_for_ever() -> None:
    policy = Policy(n_ctx=4096, n_seq_ids=8, step_tokens=9)
    policy.add("stream", 1, 999)
    policy.step()
    policy.add("first", 3000, 1)
    policy.add("long", 60, 1)
    policy.add("short", 4, 1)
    for n_shorts in range(100):
        policy.add(f"short {n_shorts}", 4, 1, now=n_shorts / 100)
        if "long" in chunks(policy.step()):
            break
    else:
        pytest.fail("it was not read")
    assert n_shorts > 5, "short ones go before it for a while"


@pytest.mark.parametrize(
    ("budget", "tile", "most_whole", "expected"),
    [
        (50, 1, 0, (49, 49)),
        (50, 64, 0, (49, 65)),
        (33, 64, 0, (33, 33)),
        (33, 64, 64, (33, 65)),
        (25, 64, 0, (17, 17)),
        (25, 64, 63, (17, 17)),  # the time for it is short of a tile
        (25, 64, 64, (17, 65)),
        (100, 64, 0, (97, 65)),
        (100, 64, 64, (97, 129)),
        (120, 64, 0, (113, 129)),
        (90, 64, 999, (81, 65)),
        (160, 64, 0, (145, 129)),
    ],
)
def test_a_piece_of_a_long_prompt_is_whole_tiles_of_the_attention(
    budget: int, tile: int, most_whole: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile takes about as long as three quarters of it row by row, after thousands of tokens half. It is more than
    the budget where a step may take longer than its target."""
    monkeypatch.setattr(StepBudget, "prefill_tokens", lambda *_args, **_options: budget)
    monkeypatch.setattr(StepBudget, "whole_tokens", lambda *_args: most_whole)
    policy = Policy(n_ctx=4096, unified=False, step_tokens=256)
    policy.memory.attention_tile = tile
    policy.add("stream", 4, max_new=100)
    policy.step()
    prompt, pieces = policy.add("prompt", 1000, max_new=1), []
    while prompt.n_computed < 800:
        before = prompt.n_computed
        policy.step()
        pieces.append((before, prompt.n_computed - before))
    short, long = ({n for before, n in pieces if (before >= 512) == is_long} for is_long in (False, True))
    assert (short, long) == ({expected[0]}, {expected[1]})  # the first token is among the rows


def test_a_step_that_only_measures_decode_rows_has_no_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = iter([4, 600, 0])
    monkeypatch.setattr(StepBudget, "prefill_tokens", lambda *_args, **_options: next(budgets))
    monkeypatch.setattr(StepBudget, "whole_tokens", lambda *_args: 64)
    policy = Policy(n_ctx=4096, unified=False, step_tokens=1024)
    policy.memory.attention_tile = 64
    policy.add("stream", 4, max_new=100)
    policy.step()
    prompt = policy.add("prompt", 800, max_new=1)
    policy.step()
    assert prompt.n_computed >= 512
    assert chunks(policy.step()) == {"stream": 1}


@pytest.mark.parametrize(("unified", "second", "piece"), [(False, 500, 0), (True, 500, 15), (False, 19, 19)])
def test_a_small_rest_of_a_step_is_no_piece_of_a_second_prompt_unless_it_ends_it(
    unified: bool, second: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With streams it would be an ubatch of its own, which reads all weights."""
    monkeypatch.setattr(StepBudget, "prefill_tokens", lambda *_args, **_options: 100)
    policy = Policy(n_ctx=4096, unified=unified, step_tokens=256)
    policy.add("stream", 4, max_new=100)
    policy.step()
    policy.add("first", 80, max_new=1)
    policy.add("second", second, max_new=1)
    (with_first,) = (step for _ in range(2) if "first" in (step := chunks(policy.step())))
    assert with_first["first"] == 80
    assert with_first.get("second", 0) == piece


def test_a_whole_tile_of_the_attention_never_exceeds_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepBudget, "prefill_tokens", lambda *_args, **_options: 50)
    policy = Policy(n_ctx=4096, unified=False, step_tokens=65)
    policy.memory.attention_tile = 64
    policy.add("stream", 4, max_new=100)
    policy.step()
    policy.add("prompt", 800, max_new=1)
    assert max(policy.step().n_tokens for _ in range(17)) == 50


def test_a_scored_prompt_gets_no_more_rows_of_logits_for_a_tile_of_the_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepBudget, "prefill_tokens", lambda *_args, **_options: 64)
    monkeypatch.setattr(Seq, "is_scored", property(lambda sequence: sequence.n_prompt == 800))
    policy = Policy(n_ctx=4096, unified=False, step_tokens=256)
    policy.memory.attention_tile = 64
    policy.add("stream", 4, max_new=100)
    policy.step()
    policy.add("prompt", 800, max_new=1)
    assert max(policy.step().n_tokens for _ in range(12)) <= 1 + 64


def test_scored_prompts_share_a_step_that_has_room_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepBudget, "prefill_tokens", lambda *_args, **_options: 512)
    monkeypatch.setattr(Seq, "is_scored", property(lambda _: True))
    policy = Policy(n_ctx=4096, unified=False, step_tokens=512)
    for i in range(4):
        policy.add(f"prompt {i}", 300, max_new=1)
    assert chunks(policy.step()) == {f"prompt {i}": 64 for i in range(4)}


@pytest.mark.parametrize(("on_gpu", "has_drafts"), [(True, True), (True, False), (False, True)])
def test_on_a_gpu_steps_with_and_without_drafts_in_turn_are_not_measured(on_gpu: bool, has_drafts: bool) -> None:
    """llama.cpp plans its graph again for each. Without drafts, the rows of most steps may differ."""
    budgets = StepBudgets(16)
    kv = Policy().kv
    shape = step_shape(kv, step_tokens=16, on_gpu=on_gpu)
    scheduler = Scheduler(kv, budgets=budgets, shape=shape, n_parallel=4)
    budgets.of(()).cost.seed([(1, 0.001), (4, 0.002)])
    for i in range(100):
        n = (1, 4)[i % 2]
        n_decode, n_drafted = (1, n - 1) if has_drafts else (n, 0)
        scheduler.computed(StepPlan(row_groups=(n,), n_tokens=n_decode, n_decode=n_decode, n_drafted=n_drafted), 0.01)
    is_measured = not (on_gpu and has_drafts)
    assert budgets.of(()).cost.rows_s((1,)) == pytest.approx(0.01 if is_measured else 0.001, rel=0.5)
