"""Wrong accounting is found when the engine comes to rest, logged and rebuilt; running texts stay right."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest

from cppbatch.config import Sharing
from tests.support.fakes import context_of, drain, fake_engine, greedy, reference, run_steps, tokens_of
from tests.support.interrupts import assert_survives_ctrl_c
from tests.support.randomised import cases

KINDS = pytest.mark.parametrize(
    ("unified", "sharing"), [(True, "cells"), (False, "copy"), (True, "whole"), (True, "checkpoints")]
)


@KINDS
def test_cells_outside_the_accounting_are_logged_with_a_dump_and_freed(
    unified: bool, sharing: Sharing, caplog: pytest.LogCaptureFixture
) -> None:
    engine = fake_engine(unified=unified, sharing=sharing)
    engine.generate([[1] * 10], greedy(3))
    leak = context_of(engine)
    for at in range(2):
        leak._append(3, 1, (at, at, at))
    with caplog.at_level(logging.ERROR):
        engine.generate([[2] * 10], greedy(3))
    assert "seq_id 3 has 2 positions in llama.cpp, 0 in the accounting" in caplog.text
    assert "cells used, free seq_ids" in caplog.text
    assert (leak.n_used, engine.core.kv.n_used, engine.core.kv.n_cached) == (0, 0, 0)
    engine.core.kv.check()
    assert engine.generate([[3] * 10], greedy(3))[0].tokens == reference([3] * 10, greedy(3))[0]


def test_a_seq_id_that_is_lost_is_found() -> None:
    engine = fake_engine(sharing="cells")
    engine.core.kv._free_ids.pop()
    with pytest.raises(AssertionError, match="a seq_id is lost"):
        engine.core.kv.check()
    engine.core.kv.rebuild()
    engine.core.kv.check()


def test_a_miscount_of_cells_is_found() -> None:
    engine = fake_engine(sharing="cells")
    engine.generate([[1] * 10], greedy(3))
    engine.core.kv._cells.n_used += 1
    with pytest.raises(AssertionError, match="cells are used"):
        engine.core.kv.check()


@KINDS
def test_the_parts_of_a_pool_do_not_refer_back_to_it(unified: bool, sharing: Sharing) -> None:
    engine = fake_engine(unified=unified, sharing=sharing)
    engine.generate([[1] * 10, [1] * 8 + [2]], greedy(3))
    kv = weakref.ref(engine.core.kv)
    gc.collect()
    gc.disable()  # only the count of references frees anything
    try:
        engine.close()
        del engine
        assert kv() is None
    finally:
        gc.enable()


@KINDS
def test_starting_over_under_running_requests_computes_them_again(unified: bool, sharing: Sharing) -> None:
    engine = fake_engine(unified=unified, sharing=sharing)
    params = greedy(10, ignore_eos=True)
    names = [engine.add_request([i] * 3, params) for i in range(6)]
    events = run_steps(engine, 4)
    engine.core.restart()
    engine.core.kv.check()
    events += drain(engine)
    for i, name in enumerate(names):
        tokens = tokens_of(events, name)
        assert tokens == reference([i] * 3, params)[0]


@KINDS
def test_ctrl_c_while_memory_is_moved_leaves_every_text_right(
    unified: bool, sharing: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_engine(n_ctx=64, n_parallel=4, unified=unified, sharing=sharing)
    params = greedy(12, ignore_eos=True)
    prompts = {engine.add_request([i] * 3, params, priority=1): [i] * 3 for i in range(4)}
    events = run_steps(engine, 3)
    prompts[engine.add_request([9] * 3, params)] = [9] * 3  # preempts one and saves its memory

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(context_of(engine), "save_sequence", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    events += drain(engine)
    engine.core.kv.check()
    for name, prompt in prompts.items():
        tokens = tokens_of(events, name)
        assert tokens == reference(prompt, params)[0]


@KINDS
@cases(ring=25, nightly=60, soak=240)
def test_ctrl_c_anywhere_in_a_step_leaves_a_working_engine(unified: bool, sharing: Sharing, n_cases: int) -> None:
    params, prompts = greedy(6, ignore_eos=True), [[1] * 24 + [i] * (i + 1) for i in range(5)]
    for line in range(1, 7000, 7000 // n_cases):
        engine = fake_engine(n_ctx=120, n_batch=16, n_parallel=3, unified=unified, sharing=sharing)
        assert_survives_ctrl_c(engine, prompts, params, after=line, n_priorities=2)
