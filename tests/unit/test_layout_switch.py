"""An engine that switches its KV layout between two steps: nothing is refused, cut short, lost or changed."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, FinishReason
from cppbatch.config import KvLayout
from cppbatch.engine.kv.layout_policy import LayoutSwitch
from cppbatch.engine.kv.prefix_cache import ReuseCosts
from cppbatch.errors import InvalidRequest, LlamaError
from tests.support.fakes import context_of, drain, fake_engine, greedy, reference, run_steps, tokens_of
from tests.support.interrupts import assert_survives_ctrl_c
from tests.support.randomised import cases

N_CTX, N_PARALLEL = 120, 3
STREAM = N_CTX // N_PARALLEL
ENDLESS: dict[str, Any] = {"ignore_eos": True}


def auto_engine(**settings: Any) -> BatchInferenceEngine:
    sizes: dict[str, Any] = {"n_ctx": N_CTX, "n_batch": 16, "n_parallel": N_PARALLEL}
    return fake_engine(unified=False, sharing="copy", switches=True, **{**sizes, **settings})


def switch(engine: BatchInferenceEngine, layout: KvLayout) -> None:
    assert engine.core._layout_policy
    engine.core._switch_layout(engine.core._layout_policy, LayoutSwitch(layout, "the test says so"))


def test_a_prompt_that_is_longer_than_a_stream_is_answered() -> None:
    engine = auto_engine()
    prompts = [[1] * 10, [2] * (STREAM + 20), [3] * 10]
    results = engine.generate(prompts, greedy(12, **ENDLESS))
    assert [result.tokens for result in results] == [reference(p, greedy(12, **ENDLESS))[0] for p in prompts]
    assert engine.stats().kv_layout == "unified"


def test_a_text_continues_beyond_the_end_of_its_stream() -> None:
    engine = auto_engine()
    [result] = engine.generate([[1] * 10], greedy(**ENDLESS))
    assert len(result.tokens) == N_CTX - 10  # as far as unified cells reach
    assert result.tokens == reference([1] * 10, greedy(N_CTX - 10, **ENDLESS))[0]
    assert engine.stats().layout_switches == 1


def test_a_text_that_fills_its_stream_to_the_last_cell_stays_there() -> None:
    engine = auto_engine()
    # The last token has no cell: it is not computed.
    assert len(engine.generate([[1] * 10], greedy(STREAM - 10 + 1, **ENDLESS))[0].tokens) == STREAM - 9
    assert engine.stats().layout_switches == 0
    engine.generate([[1] * 10], greedy(STREAM - 10 + 2, **ENDLESS))
    assert engine.stats().layout_switches == 1


def test_more_than_all_cells_is_refused_at_once() -> None:
    engine = auto_engine()
    with pytest.raises(InvalidRequest, match=f"this context holds only {N_CTX} \\(raise n_ctx \\(-c\\) for more\\)"):
        engine.add_request([1] * N_CTX)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        engine.add_request([1] * 100, greedy(30))


def test_a_fixed_layout_keeps_its_limit() -> None:
    engine = fake_engine(unified=False, n_ctx=N_CTX, n_parallel=N_PARALLEL, sharing="copy")
    with pytest.raises(
        InvalidRequest,
        match=f"this context holds only {STREAM} \\(raise n_ctx \\(-c\\) or lower n_parallel \\(-np\\) for more\\)",
    ):
        engine.add_request([1] * STREAM)


def test_a_long_request_waits_for_its_turn_and_delays_none_after_it_by_more_than_a_step() -> None:
    engine = auto_engine()
    running = [engine.add_request([i] * 5, greedy(20, **ENDLESS)) for i in range(3)]
    long, short = engine.add_request([7] * 60, greedy(3, **ENDLESS)), engine.add_request([8] * 5, greedy(3, **ENDLESS))
    events = run_steps(engine, 10)
    assert engine.stats().kv_layout == "per-sequence"  # all places are taken
    engine.cancel(running[0])
    events += run_steps(engine, 3)
    assert engine.stats().kv_layout == "unified"
    events += drain(engine)
    for name, prompt in ((long, [7] * 60), (short, [8] * 5)):
        assert tokens_of(events, name) == reference(prompt, greedy(3, **ENDLESS))[0]


@pytest.mark.parametrize("swap_space", [0, 1, 1024], ids=["recomputed", "one saved", "all saved"])
def test_running_sequences_continue_where_they_were(swap_space: int) -> None:
    engine, params = auto_engine(swap_space=swap_space), greedy(25, **ENDLESS)
    prompts = {engine.add_request([i] * 9, params): [i] * 9 for i in range(5)}
    events = run_steps(engine, 6)
    before = sum(map(sum, (step.values() for step in context_of(engine).steps)))
    for layout in ("unified", "per-sequence", "unified"):
        switch(engine, layout)
        events += run_steps(engine, 3)
        engine.core.kv.check()
    events += drain(engine)
    for name, prompt in prompts.items():
        assert tokens_of(events, name) == reference(prompt, params)[0]
    stats = engine.stats()
    assert stats.recomputes == {0: 9, 1: 6, 1024: 0}[swap_space]
    computed = sum(map(sum, (step.values() for step in context_of(engine).steps)))
    if swap_space == 1024:
        assert computed == 5 * (9 + 24)
    else:
        assert computed > before


def test_a_prefix_that_sequences_share_is_held_once_afterwards() -> None:
    engine = auto_engine(n_batch=64)
    for i in range(3):
        engine.add_request([1] * 24 + [i] * 3, greedy(10, **ENDLESS))
    run_steps(engine, 4)
    assert engine.core.kv.n_used == sum(s.n_computed for s in engine.core.scheduler.running)
    switch(engine, "unified")
    run_steps(engine, 1)
    assert len(engine.core.scheduler.running) == 3
    assert engine.core.kv.n_used == sum(s.n_computed for s in engine.core.scheduler.running) - 2 * 24
    engine.core.kv.check()
    assert context_of(engine).n_used == engine.core.kv.n_used


def test_where_the_first_holder_of_a_prefix_cannot_be_restored_the_others_are_computed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, params = auto_engine(n_batch=64), greedy(10, **ENDLESS)
    prompts = {engine.add_request([1] * 24 + [i] * 3, params): [1] * 24 + [i] * 3 for i in range(3)}
    events = run_steps(engine, 4)
    switch(engine, "unified")
    context = context_of(engine)
    restore, calls = context.restore_sequence, iter([True, False, False])

    def first_fails(seq_id: int, state: Any) -> None:
        if next(calls):
            raise LlamaError("no room")
        restore(seq_id, state)

    with monkeypatch.context() as patch:
        patch.setattr(context, "restore_sequence", first_fails)
        events += run_steps(engine, 1)
    engine.core.kv.check()
    assert context.n_used == engine.core.kv.n_used
    events += drain(engine)
    for name, prompt in prompts.items():
        assert tokens_of(events, name) == reference(prompt, params)[0]


@pytest.mark.parametrize(("ram", "hit"), [(1024, True), (0, False)])
def test_cached_prefixes_are_kept_in_host_memory(ram: int, hit: bool) -> None:
    engine = auto_engine(prefix_cache_ram=ram, reuse_costs=ReuseCosts(min_cached=8))
    engine.generate([[1] * 30], greedy(3, **ENDLESS))
    for layout in ("unified", "per-sequence"):
        switch(engine, layout)
        engine.core.kv.check()
        before = engine.stats().prefix_hits
        prompt = [1] * 30 + [2] * 3
        [result] = engine.generate([prompt], greedy(4, **ENDLESS))
        assert result.tokens == reference(prompt, greedy(4, **ENDLESS))[0]
        assert (engine.stats().prefix_hits > before) == hit
        engine.clear_prefix_cache()
        engine.generate([[1] * 30], greedy(3, **ENDLESS))


def test_sequences_that_were_swapped_out_before_resume_afterwards() -> None:
    engine = auto_engine()
    switch(engine, "unified")
    params = greedy(30, **ENDLESS)
    prompts = {engine.add_request([i] * 20, params): [i] * 20 for i in range(3)}
    events = run_steps(engine, 26)
    assert engine.stats().swapped_bytes > 0  # 3 of 50 tokens do not fit into 120 cells
    switch(engine, "per-sequence")  # and with more than 40 tokens they do not fit into a stream
    events += drain(engine)
    assert engine.stats().kv_layout == "unified"
    for name, prompt in prompts.items():
        assert tokens_of(events, name) == reference(prompt, params)[0]


@cases(ring=50, nightly=150, soak=750)
def test_ctrl_c_anywhere_in_a_switch_leaves_a_working_engine(n_cases: int) -> None:
    params = greedy(6, **ENDLESS)
    prompts = [[1] * 24 + [i] * (i * 5) for i in range(5)]  # the last one outgrows a stream
    for line in range(1, 6000, 6000 // n_cases):
        assert_survives_ctrl_c(auto_engine(), prompts, params, after=line)


def test_a_context_that_cannot_be_created_is_an_error_and_the_engine_continues_in_its_previous_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, params = auto_engine(), greedy(8, **ENDLESS)
    name = engine.add_request([1] * 9, params)
    events = run_steps(engine, 2)
    context = context_of(engine)
    reopen = context.reopen

    def fails(*, kv_unified: bool, **sizes: Any) -> None:
        context.is_closed = True
        if kv_unified:
            raise LlamaError("out of memory")
        context.is_closed = False
        reopen(kv_unified=kv_unified, **sizes)

    with monkeypatch.context() as patch:
        patch.setattr(context, "reopen", fails)
        long = engine.add_request([2] * 60, params)
        events += engine.step()
        with pytest.raises(LlamaError, match="out of memory"):
            engine.step()
    assert engine.stats().kv_layout == "per-sequence"
    events += drain(engine)
    assert tokens_of(events, name) == reference([1] * 9, params)[0]
    assert tokens_of(events, long) == reference([2] * 60, params)[0]


def test_a_switch_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    engine = auto_engine()
    with caplog.at_level(logging.INFO, logger="cppbatch.engine"):
        engine.generate([[1] * 60], greedy(3, **ENDLESS))
    [line] = [record.getMessage() for record in caplog.records if "KV layout" in record.getMessage()]
    assert line.startswith("KV layout: switched to unified in ")
    assert "has 60 tokens, but a stream has 40 cells" in line


def test_the_present_layout_is_in_the_stats_and_the_limits_in_the_info() -> None:
    engine = auto_engine()
    assert (engine.info.kv_layout, engine.info.max_sequence, engine.info.n_ctx) == ("auto", N_CTX, N_CTX)
    assert (engine.stats().kv_layout, engine.stats().layout_switches) == ("per-sequence", 0)
    switch(engine, "unified")
    assert (engine.stats().kv_layout, engine.stats().layout_switches) == ("unified", 1)
    assert engine.info.max_sequence == N_CTX


def test_requests_end_for_their_own_reasons_whatever_the_layout() -> None:
    engine = auto_engine()
    results = engine.generate([[1] * 5, [2] * 5], [greedy(70, **ENDLESS), greedy(2, **ENDLESS)])
    assert [result.finish_reason for result in results] == [FinishReason.LENGTH] * 2
    assert [len(result.tokens) for result in results] == [70, 2]
