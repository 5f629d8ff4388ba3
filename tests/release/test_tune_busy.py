"""`cppbatch tune` beside a program that keeps a core busy: its choice is not slower than what it measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cppbatch import EngineConfig
from cppbatch.bench.tune.tuner import Tuner
from cppbatch.llama.quantize_child import quantize
from tests.conftest import once_a_run


@pytest.fixture(scope="module")
def q4_0(tmp_path_factory: pytest.TempPathFactory, default_source: Path) -> Path:
    return once_a_run(tmp_path_factory, "default-Q4_0.gguf", lambda path: quantize(default_source, path, "Q4_0"))


@pytest.fixture
def busy_core() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
        yield
        loop.kill()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("busy_core")
@pytest.mark.parametrize("turn", range(10))
def test_beside_a_busy_core_nothing_slower_is_chosen_than_what_was_measured(turn: int, q4_0: Path) -> None:
    tuning = Tuner(EngineConfig(model_path=str(q4_0)), most_parallel=64, seconds=180).run()
    best = max(tuning.points, key=lambda point: point["tokens_per_s"])
    chosen = tuning.speed
    ratio = chosen.tokens_per_s / best["tokens_per_s"]
    print(
        f"turn {turn}: -np {chosen.n_parallel} with {chosen.tokens_per_s:.0f} tokens/s, the best was "
        f"{best['what']} {best['setting']} with {best['tokens_per_s']:.0f}: {ratio:.2f}"
    )
    assert ratio >= 0.9
    assert [note for note in tuning.notes if note.startswith("other programs used")]
