"""Every command and program in the README and in docs/ runs as printed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cppbatch.llama.library import PINNED_VERSION
from tests.support import tiny_models
from tests.support.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()
SEVERAL_MODELS = ROOT / "docs" / "models.md"
PAGES = [README, *(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")) if page != SEVERAL_MODELS)]


def blocks(language: str) -> list[str]:
    return [block for page in PAGES for block in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)]


PROGRAMS = blocks("python")
COMMANDS = [block for block in blocks("bash") if "./scripts/" not in block]  # those two run this test
LONG = [each for each in COMMANDS if "/cppbatch bench " in each or "examples/speculative_decoding.py" in each]
"""Measurements of the default model. Those of tiny models are in test_throughput.py, test_roofline.py,
test_strategies.py, test_bench_serve.py and test_examples.py."""
PLACES = {"python": sys.executable, "cppbatch": f"{sys.executable} -m cppbatch"}


class Servers:
    """A server for each port that the pages name, started when the first page asks for it."""

    def __init__(self, default_model: Path, folder: Path) -> None:
        self._arguments: dict[int, list[str | Path]] = {
            8080: ["-m", default_model],
            8081: ["-m", default_model, "--pooling", "mean"],
            8082: ["-m", tiny_models.reranker(folder / "reranker.gguf")],
        }
        self._running: dict[int, ServerProcess] = {}

    def url(self, port: int) -> str:
        if port not in self._running:
            self._running[port] = ServerProcess(*self._arguments[port]).wait_ready()
        return self._running[port].url

    def stop(self) -> None:
        for process in self._running.values():
            process.stop()


@pytest.fixture(scope="module")
def servers(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(default_model, tmp_path_factory.mktemp("docs"))
    yield servers
    servers.stop()


def on_servers(text: str, servers: Servers) -> str:
    """With the addresses of these servers."""
    return re.sub(r"http://127\.0\.0\.1:(\d+)", lambda url: servers.url(int(url[1])), text)


def run(*command: str) -> str:
    """What it prints. The folders that it makes with `mktemp` are removed."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:  # a short path, for the sockets of workers
        env = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_here(program: str) -> str:
    """Runs it in this process: interpreters would take more time to import the same packages than to run it."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, "a page's program", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


RIGHT = {
    "What do bees make?": ["capital of France is Paris", "red, blue"],  # of the README
    "The capital of Japan is": ["Tokyo", "cold"],
    "LocalEngine(": ["Paris", "Tokyo", "Madrid", "Berlin", "Athens"],
}
"""What the default model answers right in the first examples, by a text in each. It is small: sums it gets wrong."""


def test_the_pages_have_the_programs_and_commands_that_are_tested_here() -> None:
    assert len(PROGRAMS) == 32
    assert len(COMMANDS) == 52
    assert len(LONG) == 6
    for text in RIGHT:
        assert sum(text in program for program in PROGRAMS) == 1


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_runs_and_prints(program: str, servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    ours, changes_llama_cpp = on_servers(program, servers), "cppbatch.patch()" in program
    printed = run(sys.executable, "-c", ours) if changes_llama_cpp else run_here(ours)
    assert printed.strip()
    right = [answer for text, answers in RIGHT.items() if text in program for answer in answers]
    assert [each for each in right if each.lower() not in printed.lower()] == [], printed


@pytest.mark.parametrize(
    "commands", [pytest.param(each, marks=[pytest.mark.nightly] if each in LONG else []) for each in COMMANDS]
)
def test_each_command_runs_and_prints(commands: str, servers: Servers) -> None:
    ours = re.sub(r"\.venv/bin/(cppbatch|python)", lambda name: PLACES[name[1]], commands)
    printed = run("bash", "-euo", "pipefail", "-c", on_servers(ours, servers)).strip()
    assert printed
    assert '"error":{' not in printed, printed


def test_the_page_of_several_models_runs_from_its_first_command_to_its_last(default_model: Path) -> None:
    start, *commands = re.findall(r"```bash\n(.*?)```", SEVERAL_MODELS.read_text(), re.DOTALL)
    assert start == ".venv/bin/cppbatch serve --models-dir models --ttl 600\n"
    server = ServerProcess("--models-dir", default_model.parent, "--ttl", "600").wait_ready()
    try:
        on_server = [command.replace("http://127.0.0.1:8080", server.url) for command in commands]
        lines = [line for command in on_server for line in command.replace("\\\n", "").splitlines()]
        answers = [subprocess.check_output(["bash", "-ec", line], text=True, timeout=120) for line in lines]
    finally:
        server.stop()
    said, listed, *changed = map(json.loads, answers)
    assert said["model"] == "SmolLM2-135M-Instruct.Q4_1"
    assert {each["id"]: each["status"]["value"] for each in listed["data"]}[said["model"]] == "loaded"
    assert [answer["success"] for answer in changed] == [True, True]


def test_the_two_lines_of_the_quickstart_download_no_model(tmp_path: Path) -> None:
    (lines,) = re.findall(r"(\.venv/bin/python scripts/synthetic_model.py .*\n.*serve -m random.gguf\n)", QUICKSTART)
    commands = lines.replace(
        ".venv/bin/python scripts/synthetic_model.py", f"{sys.executable} {ROOT}/scripts/synthetic_model.py"
    )
    commands = commands.replace(".venv/bin/cppbatch serve", f"{sys.executable} -m cppbatch generate -p Once -n 4")
    models = tmp_path / "models"
    env = {**os.environ, "CPPBATCH_MODELS": str(models), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "0.22 GB" in done.stdout
    assert not models.exists(), "a model was downloaded"


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_quickstart_code_and_package_pin_the_same_library() -> None:
    pinned = re.search(r"llama-cpp-python==([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert pinned
    assert {PINNED_VERSION, *re.findall(r"llama-cpp-python==([\d.]+)", QUICKSTART)} == {pinned[1]}
