"""docs/media.md: its commands and its program run, with a tiny model and a tiny projector in place of real ones."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cppbatch.cli.serve_command import serve
from tests.support import tiny_projectors
from tests.support.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "media.md").read_text()
COMMANDS = re.findall(r"```bash media\n(.*?)```", PAGE, re.DOTALL)
PROGRAMS = re.findall(r"```python media\n(.*?)```", PAGE, re.DOTALL)
SERVERS = re.findall(r"```bash no-test\n.venv/bin/cppbatch (serve .*?)\n```", PAGE)


@pytest.fixture(scope="module")
def eyes(tiny_folder: Path) -> Path:
    return tiny_projectors.vision(tiny_folder / "mmproj-page.gguf")


@pytest.fixture(scope="module")
def url(tiny_llama: Path, eyes: Path) -> Iterator[str]:
    with ServerProcess("-m", tiny_llama, "--mmproj", eyes, "--no-memory-check", "--log-level", "debug") as process:
        yield process.wait_ready().url
    logged = "".join([*process.lines, *process.errors])
    assert "/v1/chat/completions" in logged
    assert "iVBOR" not in logged, "the log has the base64 of a PNG file"


def in_place(text: str, tiny_llama: Path, eyes: Path, folder: Path) -> str:
    """The text with the names of files that exist here."""
    text = (
        text.replace("mmproj.gguf", "PROJECTOR").replace("model.gguf", str(tiny_llama)).replace("PROJECTOR", str(eyes))
    )
    return text.replace("build/", f"{folder}/").replace(".venv/bin/cppbatch", f"{sys.executable} -m cppbatch")


def test_the_page_has_commands_and_a_program() -> None:
    assert (len(COMMANDS), len(PROGRAMS), len(SERVERS)) == (3, 1, 2)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_runs_and_prints(command: str, tiny_llama: Path, eyes: Path, url: str, tmp_path: Path) -> None:
    here = in_place(command, tiny_llama, eyes, tmp_path).replace("http://127.0.0.1:8084", url)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", here], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert '"error"' not in done.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_runs_and_prints(program: str, tiny_llama: Path, eyes: Path, tmp_path: Path) -> None:
    here = in_place(program, tiny_llama, eyes, tmp_path)
    done = subprocess.run([sys.executable, "-c", here], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.rsplit(" ", 1)[-1] for line in done.stdout.splitlines() if line.endswith(" 16")] == ["16", "16"]


@pytest.mark.parametrize("flags", SERVERS)
def test_each_flag_of_its_servers_exists(flags: str) -> None:
    known = {name for option in serve.params for name in option.opts}
    assert set(re.findall(r"(?<= )-[-a-z]+", flags)) <= known
