"""The example of `GET /live` that the page's tests use has the fields of the types, and figures that agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cppbatch.engine.observe.live_state import LiveCells
from cppbatch.server.observe.live import LiveSnapshot

EXAMPLE: dict[str, Any] = msgspec.json.decode(Path(__file__).parents[1].joinpath("live_example.json").read_bytes())


@pytest.mark.parametrize("name", ["full", "idle"])
def test_the_example_has_exactly_the_fields_of_the_types(name: str) -> None:
    snapshot = msgspec.convert(EXAMPLE[name], LiveSnapshot)
    assert msgspec.to_builtins(snapshot) == EXAMPLE[name]


@pytest.mark.parametrize("name", ["full", "idle"])
def test_the_segments_of_the_example_are_its_used_and_cached_cells(name: str) -> None:
    for worker in msgspec.convert(EXAMPLE[name], LiveSnapshot).workers:
        if worker.engine:
            check_cells(worker.engine.cells)


def check_cells(cells: LiveCells) -> None:
    """Raises `AssertionError` if the segments are not the cells that are counted."""
    assert cells.used + cells.cached + cells.free == cells.total
    assert sum(segment.tokens for segment in cells.segments if not segment.cached) == cells.used
    assert sum(segment.tokens for segment in cells.segments if segment.cached) == cells.cached
    assert all(segment.cached == (not segment.sequences) for segment in cells.segments)
    assert all(segment.tokens > 0 and (segment.sequences or segment.prefixes) for segment in cells.segments)
