"""Real replicas: requests with a common prefix meet in one of them, and Serve's default router spreads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests.support import tiny_models

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(240)
def test_more_of_the_prompts_is_cached_than_with_the_default_router(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [
        *(sys.executable, "scripts/bench_routing.py", "-m", str(tiny_models.llama(tmp_path / "tiny.gguf"))),
        *("--turns", "1", "--conversations", "36", "--clients", "6", "--apps", "24", "--system-tokens", "700"),
        *("--json", str(results)),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (by_router,) = json.loads(results.read_text())
    ours, default = by_router["prefix"], by_router["power-of-two"]
    assert ours["requests"] == default["requests"] > 30
    assert ours["prompt_tokens"] > 8000
    assert ours["hit_rate"] > default["hit_rate"] + 10
    assert "| prefix |" in done.stdout
