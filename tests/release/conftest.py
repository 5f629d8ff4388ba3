"""Fixtures of several files."""

from __future__ import annotations

import pytest

from cppbatch.cluster.engines import supervisor


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait between restarts of a worker."""
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.001)
