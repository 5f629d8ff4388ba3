"""Fixtures that many files have in other sizes: `engine = engine_of(HeldEngine, n_ctx=4096)` defines `engine`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, LocalEngine
from cppbatch.server.settings import ServerSettings
from tests.support.scripted_chat import ChatServer
from tests.support.server_process import ServerProcess


def engine_of(*kinds: Any, model: str = "tiny_llama", **settings: Any) -> Any:
    """An asyncio engine for each test: a `LocalEngine`, or of another kind; of several, one after another. `model`: the
    fixture of its path."""
    kind, *others = kinds or (LocalEngine,)

    @pytest.fixture(params=kinds if others else None)
    async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
        its = {"n_ctx": 1024, "n_parallel": 4, "n_threads": 1, **settings}
        async with getattr(request, "param", kind)(request.getfixturevalue(model), **its) as engine:
            yield engine

    return engine


def shared_engine(model: str = "tiny_llama", **settings: Any) -> Any:
    """A `BatchInferenceEngine` for all tests of a file. `model`: the fixture of its path."""

    @pytest.fixture(scope="module")
    def engine(request: pytest.FixtureRequest) -> Iterator[BatchInferenceEngine]:
        with BatchInferenceEngine(request.getfixturevalue(model), **settings) as engine:
            yield engine

    return engine


def chat_server(settings: ServerSettings | None = None, **engine: Any) -> Any:
    """A `ChatServer` of the tiny Llama for all tests of a file."""

    @pytest.fixture(scope="module")
    def server(tiny_llama: Path) -> Iterator[ChatServer]:
        server = ChatServer(tiny_llama, settings, **engine)
        yield server
        server.stop()

    return server


def server_process(model: str, *flags: str) -> Any:
    """A `ServerProcess` for all tests of a file. `model`: the fixture of its path."""

    @pytest.fixture(scope="module")
    def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
        with ServerProcess("-m", request.getfixturevalue(model), *flags) as process:
            yield process.wait_ready()

    return server
