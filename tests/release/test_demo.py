"""scripts/demo.py: each demonstration shows what it says. With small sizes and a tiny model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo.py"


@pytest.fixture
def demo(tiny_llama: Path):
    def demo(name: str, *args: str) -> str:
        command = [sys.executable, str(SCRIPT), name, "-m", str(tiny_llama), "--small", *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return demo


def rows(shown: str) -> list[list[str]]:
    """The cells of a table's body."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]


def test_basic_shows_each_prompt_with_its_continuation_and_takes_a_step_a_token(demo) -> None:
    shown = demo("basic")
    finished = [row for row in rows(shown) if row[3]]
    assert [row[2:] for row in finished] == [["8", "length"]] * 4
    assert finished[0][0] == "The capital of France is"
    assert all(row[1] for row in finished)
    assert "32 tokens" in shown
    assert "8 steps" in shown


def test_throughput_does_the_same_work_in_fewer_steps_and_less_time(demo) -> None:
    shown = demo("throughput")
    one_by_one, batch = rows(shown)
    assert (one_by_one[:3], batch[:3]) == (["one by one", "32", "32"], ["one batch", "32", "8"])
    ratio = re.search(r"The batch is ([\d.]+) times as fast", shown)
    assert ratio
    assert float(ratio[1]) > 1


def test_lengths_has_one_row_a_prompt_and_the_short_ones_do_not_wait_for_the_long_one(demo) -> None:
    shown = [row for row in rows(demo("lengths")) if row[0]]
    assert len(shown) == 4
    n_tokens = [int(row[0]) for row in shown]
    assert n_tokens == sorted(n_tokens)
    assert n_tokens[-1] > 10 * n_tokens[0]
    first_token = [float(row[1].removesuffix(" s")) for row in shown]
    assert first_token[0] < first_token[-1]


def test_stress_loses_none_of_its_requests_although_cells_are_few(demo) -> None:
    shown = demo("stress")
    assert "24 of 24 requests have all their tokens" in shown
    last = rows(shown)[-1]
    assert last[:4] == ["24", "0", "0", "0 of 256"]
    assert int(last[4]) > 0, "nothing had to be swapped out"
    had = re.search(r"had ([\d,]+) tokens in all, and there were 256 cells", shown)
    assert had
    assert int(had[1].replace(",", "")) > 2 * 256


def test_streaming_shows_a_panel_for_every_sequence_with_its_prompt_and_its_text(demo) -> None:
    shown = demo("streaming")
    assert re.findall(r"request-\d", shown) == ["request-1", "request-2", "request-3", "request-4"]
    for prompt in ("The capital of France is", "Once upon a time, there was a fox", "The three primary colours are"):
        assert prompt in shown
    assert "4 sequences grew together in 8 steps" in shown


def test_a_model_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "basic", "-m", str(tmp_path / "none.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("demo.py: there is no file")
