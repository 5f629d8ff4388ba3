"""Runs llama-server's own tests, a file at a time, against cppbatch or a llama-server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.llama_server import adapter
from tests.llama_server.made_models import make_models
from tests.support.llama_cpp_source import server_tests

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """Of one test: "passed", "failed" or "skipped", and the line with the reason."""

    result: str
    why: str


class Ring:
    """Runs the tests of `server_tests` with models that it writes to `folder`, where it leaves the tests' logs too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.tests = server_tests()
        make_models(folder / "models")
        self.cppbatch = folder / "serve"
        self.cppbatch.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{adapter.__file__}" "$@"\n')
        self.cppbatch.chmod(0o755)

    def files(self) -> list[str]:
        """The names of the test files, without their suffix."""
        return sorted(path.stem for path in (self.tests / "unit").glob("test_*.py"))

    def run(self, file: str, server: Path, *arguments: str, failing: Callable[[str], bool]) -> dict[str, Outcome]:
        """The outcomes of one file's tests by their names; `arguments` go to pytest.

        `server`: a llama-server, or `self.cppbatch`. A test that fails is run once more alone, since some depend on how
        busy the machine is; not one of which `failing` says that it always does.
        """
        outcomes = self._run_pytest(f"unit/{file}.py", server, "-n", "2", *arguments)
        for name, outcome in list(outcomes.items()):
            if outcome.result == "failed" and not failing(name):
                outcomes |= self._run_pytest(f"unit/{file}.py::{name}", server, "-p", "no:xdist")
        return outcomes

    def _run_pytest(self, tests: str, server: Path, *arguments: str) -> dict[str, Outcome]:
        name = f"{tests.removeprefix('unit/').partition('.')[0]}.{server.name}"
        reports = self.folder / f"{name}.jsonl"
        reports.unlink(missing_ok=True)
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "RING_MODELS": str(self.folder / "models"),
            "RING_REPORTS": str(reports),
            "LLAMA_SERVER_BIN_PATH": str(server),
        }
        command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "-m", "not slow", "--timeout", "60"]
        command += ["-p", "tests.llama_server.hub_plugin", "-p", "no:cacheprovider", tests, *arguments]
        with (self.folder / f"{name}.log").open("a") as log:
            ended = subprocess.run(command, cwd=self.tests, env=environment, stdout=log, stderr=log, check=False)
        assert ended.returncode in (0, 1), f"pytest ran no test of {tests}: see {log.name}"
        outcomes: dict[str, Outcome] = {}
        for line in reports.read_text("utf-8").splitlines():
            report = json.loads(line)
            if outcomes.get(report["test"], Outcome("passed", "")).result == "passed":  # a teardown may fail after it
                outcomes[report["test"]] = Outcome(report["result"], report["why"])
        return outcomes
