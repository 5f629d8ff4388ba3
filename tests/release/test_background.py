"""Background work on the default model: a first token is nearly as early as on an idle engine."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter

import pytest

from cppbatch import BatchInferenceEngine
from cppbatch.engine.request import BACKGROUND
from tests.support.fakes import greedy


@pytest.mark.soak
def test_a_first_token_comes_nearly_as_early_as_on_an_idle_engine(default_model: Path) -> None:
    """A hundred prompts keep all 16 places busy: less than 1.5 times as long as without them, plus one step."""
    idle, busy, steps = [], [], []
    with BatchInferenceEngine(default_model, n_ctx=16384) as engine:

        def first_token(i: int) -> float:
            began = perf_counter()
            name = engine.add_request([1000 + i, *range(100, 250)], greedy(1), cache_salt=str(i))
            while not any(event.request_id == name for event in engine.step()):
                pass
            return perf_counter() - began

        first_token(0)  # warm-up
        for turn in range(1, 4):
            idle.append(first_token(turn))
            names = [
                engine.add_request([200 + i, 300, 400], greedy(200, ignore_eos=True), priority=BACKGROUND)
                for i in range(100)
            ]
            for _ in range(8):
                began = perf_counter()
                engine.step()
                steps.append(perf_counter() - began)
            assert engine.stats().running == 16
            busy.append(first_token(10 + turn))
            for name in names:
                engine.cancel(name)
    assert median(busy) < 1.5 * median(idle) + median(steps)
