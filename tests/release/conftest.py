"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cppbatch.cluster.engines import supervisor
from cppbatch.retries import Pauses

LONGEST = [
    "test_docs",
    "test_engine_process",
    "test_examples",
    "test_batch_command",
    "test_abuse",
    "test_out_of_memory",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A process of pytest-xdist runs whole files: none is left alone with a long one at the end."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.fixture(scope="session", autouse=True)
def runtimes_in_workers() -> Iterator[None]:
    """Workers find the runtimes of the tests, although they import nothing from the current folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        yield


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait between restarts of a worker."""
    monkeypatch.setattr(supervisor, "_PAUSES", Pauses(0.002, 30.0))
