"""The programs in scripts/, as their users start them, and the tables that they print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_script(name: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)


def script(name: str, *args: object) -> str:
    """What the script prints."""
    done = run_script(name, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def columns(printed: str) -> dict[str, dict[str, str]]:
    """The cells of the last printed table by their row and column."""
    (_, *titles), _, *body = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in printed.rpartition("\n\n")[2].splitlines()
    ]
    return {name: dict(zip(titles, cells, strict=True)) for name, *cells in body}


def number(cell: str) -> float:
    """The first number of a cell."""
    return float(cell.split(" ", maxsplit=1)[0].replace(",", ""))


def rows(printed: str) -> dict[str, list[str]]:
    """The cells of the printed tables by their first column."""
    lines = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in lines}
