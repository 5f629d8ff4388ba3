"""Engines and applications over the tiny models, and the command line."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cppbatch import BatchInferenceEngine, LocalEngine
from cppbatch.cli import main
from cppbatch.config import EngineConfig
from cppbatch.engine import runtime
from cppbatch.llama import selfcheck
from cppbatch.models import kernels
from cppbatch.sizing import estimate, estimate_child
from cppbatch.sizing.estimate import MemoryEstimate
from tests.support.app_thread import AppThread
from tests.support.batch_files import client_of
from tests.support.fixtures import engine_of
from tests.support.http_client import Http, http_to
from tests.support.native_engines import SETTINGS, OpenEngine, assert_everything_is_free
from tests.support.scripted_chat import ChatServer


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Long tests that generate their requests while pytest collects them are imported with -m soak only."""
    is_long = collection_path.name.endswith("_for_long.py")
    return True if is_long and config.option.markexpr != "soak" else None


@pytest.fixture
def open_engine() -> Iterator[OpenEngine]:
    """Opens engines; at the end each must have given every cell and seq_id back."""
    with contextlib.ExitStack() as stack:

        def open_engine(path: Path, **settings: Any) -> BatchInferenceEngine:
            engine = stack.enter_context(BatchInferenceEngine(path, **{**SETTINGS, **settings}))
            stack.callback(assert_everything_is_free, engine)
            return engine

        yield open_engine


engine = engine_of()
"""The engine behind `http`. Modules that need other sizes override this fixture."""


@pytest.fixture
async def http(engine: LocalEngine) -> AsyncIterator[Http]:
    async with http_to(engine) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: AppThread) -> openai.OpenAI:
    return client_of(server)


@pytest.fixture
def own_format(server: ChatServer) -> None:
    """The model holds conversations as it does itself, whatever an earlier test let it `use`."""
    server.use(None)


@pytest.fixture(scope="session", autouse=True)
def no_trials() -> Iterator[None]:
    """Neither valid models and projectors (test_load_check.py) nor sampling (test_device_sampling.py) are tried in
    child processes, and memory is estimated in this process (test_memory_command.py starts one)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "check_loads", lambda config, **_: None)
        patch.setattr(runtime, "check_projector", lambda path, model_path: None)
        patch.setattr(runtime, "find_sampling_crash", lambda *_, **__: None)
        patch.setattr(estimate, "_ask", estimate_child.estimate)
        yield


_ASK_CHILD = estimate._ask


@pytest.fixture
def ask_child(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[EngineConfig]], MemoryEstimate]:
    """Memory is estimated in a child process again, as by this function."""
    monkeypatch.setattr(estimate, "_ask", _ASK_CHILD)
    return _ASK_CHILD


@pytest.fixture
def checked_build() -> None:
    """This process knows that its build of llama.cpp works: tests that count child processes do not see the check's."""
    selfcheck.check()


@pytest.fixture
def empty_cache(checked_build: None, empty_cache: Path) -> Path:
    return empty_cache


@pytest.fixture
def untimed_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child process that times kernels answers at once, with made-up times."""

    def command(types: list[str]) -> list[str]:
        times = {kind: {rows: 1.0 + rows / 4 for rows in kernels.ROWS} for kind in types}
        answer = json.dumps({"ms": times, "plain_ms": {}, "has_gpu": False})
        return [sys.executable, "-c", f"print({answer!r}, end='')", "kernels", *types]

    monkeypatch.setattr(kernels, "child_command", command)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process: exit code, stdout, stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cppbatch", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return run
