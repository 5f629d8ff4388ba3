"""The programs that measure and photograph the page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def script(name: str, *args: object) -> str:
    """What the script prints."""
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_open_pages_are_measured_in_turns_beside_a_server_alone(tiny_llama: Path) -> None:
    printed = script("bench_page.py", "-m", tiny_llama, "--pages", 1, "--turns", 1, "--requests", 4, "--tokens", 8)
    lines = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    figures = {name: cells for name, *cells in lines[2:]}
    assert list(figures) == ["alone", "readers of /live", "browsers, idle page", "browsers, Live tab"]
    assert figures["alone"][1] == "100.0% (100.0% to 100.0%)"
    assert all(float(cells[0]) > 0 for cells in figures.values())
    assert float(figures["alone"][-1]) == 0, "no browser runs meanwhile"
    assert float(figures["browsers, Live tab"][-1]) > 0


def test_a_tab_is_photographed_in_both_themes(default_model: Path, tmp_path: Path) -> None:
    script("page_screenshots.py", "-m", default_model, "--only", "models", "--to", tmp_path)
    images = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert images.keys() == {"models-light.png", "models-dark.png"}
    assert images["models-light.png"] != images["models-dark.png"]
