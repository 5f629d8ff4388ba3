"""Every command and program in the README and in docs/ runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cppbatch.llama.library import PINNED_VERSION
from tests.server_process import ServerProcess

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [README, *(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))]


def blocks(language: str) -> list[str]:
    return [block for page in PAGES for block in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)]


PROGRAMS = blocks("python")
COMMANDS = [block for block in blocks("bash") if "./scripts/" not in block]  # those two run this test


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[ServerProcess]:
    with ServerProcess("-m", default_model) as process:
        yield process.wait_ready()


def run(command: list[str], server: ServerProcess) -> str:
    here = [part.replace("http://127.0.0.1:8080", server.url) for part in command]
    done = subprocess.run(here, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_pages_have_the_programs_and_commands_that_are_tested_here() -> None:
    assert len(PROGRAMS) == 9
    assert len(COMMANDS) == 6


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_runs_and_prints(program: str, server: ServerProcess) -> None:
    assert run([sys.executable, "-c", program], server).strip()


@pytest.mark.parametrize("commands", COMMANDS)
def test_each_command_runs_and_prints(commands: str, server: ServerProcess) -> None:
    ours = commands.replace(".venv/bin/cppbatch", f"{sys.executable} -m cppbatch")
    assert run(["bash", "-euo", "pipefail", "-c", ours], server).strip()


def test_readme_code_and_package_pin_the_same_library() -> None:
    pinned = re.search(r"llama-cpp-python==([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert pinned
    assert {PINNED_VERSION, *re.findall(r"llama-cpp-python==([\d.]+)", README)} == {pinned[1]}
