"""Tests that fail beside others run once more, alone, unless they are many."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import run_alone

FAILED = [f"tests/integration/test_a.py::test_{i}[x y]" for i in range(run_alone.MOST + 1)]


@pytest.fixture
def again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the program with these failures in the ring's cache. Returns its exit code and the arguments of pytest."""

    def run(failed: list[str], code: int, *arguments: str) -> tuple[int, list[str]]:
        recorded = tmp_path / "integration/v/cache/lastfailed"
        recorded.parent.mkdir(parents=True, exist_ok=True)
        recorded.write_text(json.dumps(dict.fromkeys(failed, True)))
        ran: list[str] = []

        def run(command: list[str], **_: Any) -> SimpleNamespace:
            ran.extend(command[3:])
            return SimpleNamespace(returncode=code)

        monkeypatch.setattr(run_alone, "CACHES", tmp_path)
        monkeypatch.setattr("subprocess.run", run)
        return run_alone.main(["integration", *arguments]), ran

    return run


def test_a_few_failures_of_this_ring_run_again_and_decide(again: Any, capsys: pytest.CaptureFixture[str]) -> None:
    few = FAILED[:-1]
    assert again(few, 0, "-k", "cache") == (0, few)
    assert few[0] in capsys.readouterr().out
    assert again(few, 1, "-m", "nightly") == (1, ["-m", "nightly", *few])
    assert few[0] not in capsys.readouterr().out


def test_many_failures_or_no_recorded_one_stay_a_failure(again: Any) -> None:
    assert again(FAILED, 0) == (1, [])
    assert again([], 0) == (1, [])
