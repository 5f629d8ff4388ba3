"""Files made wrong in random ways, as models, adapters and projectors: each answers or is refused with one sentence,
and neither the server that has them nor its other clients are affected.

All of 1,000 files: pytest -m soak tests/release/test_mutated_files.py (an hour).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cppbatch.errors import ModelError
from cppbatch.models.check import check_model
from cppbatch.models.find import check_file
from tests.support import tiny_models
from tests.support.mutated_files import write_mutants
from tests.support.randomised import cases
from tests.support.server_process import ServerProcess

SIZES = ("-np", "2", "-c", "512", "-t", "1")
SLOWEST_HEALTH_S = 1.0
LONGEST_ANSWER = 4000  # bytes
ERRORS = {400, 404, 503}
"""Invalid; refused when the folder is read; not loaded."""


class HonestClient:
    """Completions of one model, one after the other, and `/health`. Keeps how long the slowest of each took."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._has_ended = threading.Event()
        self.slowest = {"health": 0.0, "completion": 0.0}
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._repeat, args=(kind,)) for kind in self.slowest]

    def _ask(self, kind: str) -> None:
        if kind == "health":
            self._server.get("/health")
        else:
            body = {"model": "honest", "prompt": "Hello", "max_tokens": 32, "ignore_eos": True, "temperature": 0}
            self._server.post("/v1/completions", body)

    def _repeat(self, kind: str) -> None:
        while not self._has_ended.wait(0.1):
            began = time.monotonic()
            try:
                self._ask(kind)
            except OSError as error:
                self.failures.append(f"{kind}: {error}")
            self.slowest[kind] = max(self.slowest[kind], time.monotonic() - began)

    def __enter__(self) -> HonestClient:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._has_ended.set()
        for thread in self._threads:
            thread.join()


def status_of(server: ServerProcess, model: str) -> tuple[int, bytes]:
    try:
        body = {"model": model, "prompt": "Hello", "max_tokens": 2, "timeout": 60}
        return 200, json.dumps(server.post("/v1/completions", body)).encode()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@contextmanager
def served(folder: Path, settings: str, *more: str) -> Iterator[ServerProcess]:
    """A server of this folder, with the model "honest"."""
    tiny_models.llama(folder / "honest.gguf")
    tiny_models.llama(folder / "usual.gguf", seed=1)
    file = folder.parent / "settings.toml"
    file.write_text(f"[models.honest]\npinned = true\n{settings}")
    flags: tuple[str | Path, ...] = (
        "--models-dir",
        folder,
        "--models-config",
        file,
        "--models-max",
        "2",
        "--no-access-log",
        *more,
    )
    with ServerProcess(*flags, "--data-dir", folder.parent / "data", *SIZES) as server:
        server.wait_ready()
        assert status_of(server, "honest")[0] == 200
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@cases(ring=8, soak=1000)
def test_a_server_with_mutated_files_has_no_internal_error_and_stays_fast(n_cases: int, folder: Path) -> None:
    files = write_mutants(folder.parent / "beside", n_cases, seed=1)
    honest, settings, names = folder / "honest.gguf", "", {}
    for i, (name, path) in enumerate(files.items()):
        names[f"m{i}"] = name
        kind = {"lora": "lora", "projector": "mmproj", "audio-projector": "mmproj"}.get(name.split()[0])
        if kind is None:
            (folder / f"m{i}.gguf").symlink_to(path)
            continue
        try:
            check_file(path)
        except ModelError:  # which the settings file may not name
            del names[f"m{i}"]
        else:
            settings += f'[models.m{i}]\nmodel = "{honest}"\n{kind} = "{path}"\n'

    more = ["--no-memory-check"] if n_cases >= 1000 else []  # which starts a process for each
    with served(folder, settings, *more) as server:
        with HonestClient(server) as usual:  # beside loads, which take time on the same cores
            for _ in range(5 if n_cases >= 1000 else 1):
                assert status_of(server, "usual")[0] == 200
                server.post("/models/unload", {"model": "usual"})
                time.sleep(0.5)
        began, statuses, wrong = time.monotonic(), Counter[int](), list[str]()
        with HonestClient(server) as client:
            assert len(server.get("/v1/models")["data"]) >= len(names)
            for model, name in names.items():
                status, answer = status_of(server, model)
                statuses[status] += 1
                if not (status == 200 or status in ERRORS) or len(answer) > LONGEST_ANSWER:
                    wrong.append(f"{name}: {status} {answer!r:.500}")
                assert server.process.poll() is None, name
                if n_cases > 100 and sum(statuses.values()) % 20 == 0:
                    print(f"{time.monotonic() - began:.0f} s", statuses, client.slowest, wrong, flush=True)
        print(f"usual {usual.slowest}, beside mutated files {client.slowest}, {statuses}")
        assert not [*wrong, *client.failures]
        assert client.slowest["health"] < SLOWEST_HEALTH_S
        if n_cases >= 1000:  # few are not compared with few, on a machine that does other things
            assert client.slowest["completion"] < 2 * usual.slowest["completion"]
        server.stop()


COMMANDS = {
    "inspect": ["models", "inspect", "FILE"],
    "generate": ["generate", "-m", "FILE", "-p", "Hello", "-n", "2", *SIZES],
    "chat": ["chat", "-m", "FILE", "-n", "2", *SIZES],
    "batch": ["batch", "-m", "FILE", "INPUT", "-o", "OUTPUT", "-n", "2", *SIZES],
}


def command(name: str, kind: str, path: Path, honest: Path) -> list[str]:
    """A command with a file, as a model or beside one."""
    places = {"INPUT": str(path.with_name("input.txt")), "OUTPUT": str(path.with_suffix(".jsonl")), "FILE": str(path)}
    flag = {"lora": "--lora", "projector": "--mmproj", "audio-projector": "--mmproj"}.get(kind)
    if flag and name != "inspect":
        places["FILE"] = str(honest)
    found = [places.get(word, word) for word in COMMANDS[name]]
    return [*found, flag, str(path)] if flag and name != "inspect" else found


@cases(ring=2, soak=1000)
def test_a_command_with_a_mutated_file_gives_an_answer_or_one_sentence(n_cases: int, folder: Path) -> None:
    """With few files, those that only llama.cpp could refuse."""
    files = write_mutants(folder, 60 if n_cases < 60 else n_cases, seed=2)
    honest = tiny_models.llama(folder / "honest.gguf")
    (folder / "input.txt").write_text("Hello\n")
    if n_cases < 60:
        files = dict([each for each in files.items() if is_plausible(each[1])][:n_cases])
    codes, wrong = Counter[tuple[str, int]](), list[str]()
    for i, (name, path) in enumerate(files.items()):
        kind = name.split()[0]
        for each in COMMANDS if n_cases > 60 else [list(COMMANDS)[i % len(COMMANDS)]]:
            done = subprocess.run(
                [sys.executable, "-m", "cppbatch", *command(each, kind, path, honest)],
                input="Hello\n" if each == "chat" else "", capture_output=True, text=True, errors="replace",
                timeout=120, check=False,
            )  # fmt: skip
            codes[each, done.returncode] += 1
            if done.returncode != 0 and not is_one_sentence(each, done.returncode, done.stderr):
                wrong.append(f"{each} {name}: {done.returncode} {done.stderr[-800:]}")
                print(wrong[-1], flush=True)
        if n_cases > 100 and i % 20 == 0:
            print(i, sorted(codes.items()), flush=True)
    print(sorted(codes.items()))
    assert not wrong


def is_plausible(path: Path) -> bool:
    try:
        check_model(path)
    except ModelError:
        return False
    return True


def is_one_sentence(command: str, code: int, stderr: str) -> bool:
    """Also the report of a batch whose lines failed, for example because all logits are NaN."""
    last = stderr.strip().splitlines()[-1]
    is_report = (command, code) == ("batch", 1) and "first failure: " in stderr
    is_error = code == 2 and last.startswith("error: ")
    return (is_report or is_error) and len(last) < LONGEST_ANSWER and "Traceback" not in stderr
