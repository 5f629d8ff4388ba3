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
from typing import Any, Literal

import pytest

from cppbatch.llama.library import PINNED_VERSION
from tests.support import preloaded, tiny_models
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
LONG = [
    each
    for each in COMMANDS
    if any(part in each for part in ("/cppbatch bench ", "examples/speculative_decoding.py", "memory --shape 8B"))
]
"""Measurements of the default model, and the file of a model with 8 billion weights. Those of tiny models are in
test_throughput.py, test_roofline.py, test_strategies.py, test_bench_serve.py, test_examples.py and
test_memory_command.py."""

RIGHT = {
    "What do bees make?": ["capital of France is Paris", "red, blue"],  # of the README
    "The capital of Japan is": ["Tokyo", "cold"],
    "LocalEngine(": ["Paris", "Tokyo", "Madrid", "Berlin", "Athens"],
    "cat $labels": ["positive", "negative"],  # of the README
}
"""What the default model answers right in the first examples, by a text in each. It is small: sums it gets wrong."""
ENDING = ["text_format=Person", "Is this mail spam?"]
"""What has a text that the model must end by itself, by a text in each."""

Models = Literal["default", "stand-in"]


def cases(texts: list[str]) -> list[Any]:
    """Each program or command with its model: the default one where its answers matter, else a stand-in; at night all
    with the default one."""
    found = []
    for each in texts:
        needs_default = any(part in each for part in (*RIGHT, *ENDING))
        nightly = [pytest.mark.nightly]
        found += [] if needs_default else [pytest.param(each, "stand-in", marks=nightly if each in LONG else [])]
        found.append(pytest.param(each, "default", marks=[] if needs_default else nightly))
    return found


class Servers:
    """A server for each port that the pages name, started when the first page asks for it."""

    def __init__(self, models: dict[Models, Path], folder: Path) -> None:
        self._models, self._reranker = models, tiny_models.reranker(folder / "reranker.gguf")
        self._running: dict[tuple[int, Models], ServerProcess] = {}

    def url(self, port: int, models: Models) -> str:
        arguments: dict[int, list[str | Path]] = {
            8080: ["-m", self._models[models]],
            8081: ["-m", self._models[models], "--pooling", "mean"],
            8082: ["-m", self._reranker],
        }
        if (port, models) not in self._running:
            self._running[port, models] = ServerProcess(*arguments[port]).wait_ready()
        return self._running[port, models].url

    def stop(self) -> None:
        for process in self._running.values():
            process.stop()


@pytest.fixture(scope="module")
def servers(default_model: Path, stand_in: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers({"default": default_model, "stand-in": stand_in}, tmp_path_factory.mktemp("docs"))
    yield servers
    servers.stop()


@pytest.fixture
def models(request: pytest.FixtureRequest, stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> Models:
    """Whose folder of models programs and commands find."""
    chosen: Models = request.param
    if chosen == "stand-in":
        monkeypatch.setenv("CPPBATCH_MODELS", str(stand_in.parent))
    return chosen


def on_servers(text: str, servers: Servers, models: Models) -> str:
    """With the addresses of these servers."""
    return re.sub(r"http://127\.0\.0\.1:(\d+)", lambda url: servers.url(int(url[1]), models), text)


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


def test_the_pages_have_the_programs_and_commands_that_are_tested_here() -> None:
    assert len(PROGRAMS) == 32
    assert len(COMMANDS) == 52
    assert len(LONG) == 7
    for text in RIGHT:
        assert sum(text in each for each in (*PROGRAMS, *COMMANDS)) == 1


def wrong(text: str, printed: str) -> list[str]:
    """What a program or command should have printed."""
    right = [answer for part, answers in RIGHT.items() if part in text for answer in answers]
    return [each for each in right if each.lower() not in printed.lower()]


@pytest.mark.parametrize(("program", "models"), cases(PROGRAMS), indirect=["models"])
def test_each_program_runs_and_prints(
    program: str, models: Models, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    ours, changes_llama_cpp = on_servers(program, servers, models), "cppbatch.patch()" in program
    printed = run(sys.executable, "-c", ours) if changes_llama_cpp else run_here(ours)
    assert printed.strip()
    assert wrong(program, printed) == [], printed


@pytest.mark.parametrize(("commands", "models"), cases(COMMANDS), indirect=["models"])
def test_each_command_runs_and_prints(commands: str, models: Models, servers: Servers) -> None:
    """Those with the default model in new interpreters, as users start them."""
    places = {"python": sys.executable, "cppbatch": f"{sys.executable} -m cppbatch"}
    if models == "stand-in" and preloaded.is_used:
        places["cppbatch"] = f"{sys.executable} -S {preloaded.__file__} {preloaded.preloader().socket}"
    ours = re.sub(r"\.venv/bin/(cppbatch|python)", lambda name: places[name[1]], commands)
    printed = run("bash", "-euo", "pipefail", "-c", on_servers(ours, servers, models)).strip()
    assert printed
    assert '"error":{' not in printed, printed
    assert wrong(commands, printed) == [], printed


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


@pytest.mark.nightly  # writes 0.22 GB of random weights
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
