"""A message never quotes a whole text of a file or a request: one rule for all errors."""

from __future__ import annotations

from typing import Any

import pytest

from cppbatch import errors
from cppbatch.errors import CppBatchError, InvalidRequest, ModelLoadFailed, NotFound, NotJsonLines, QueueFull, shorten

LONG = "quoted " * 200_000
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CppBatchError) and kind not in (QueueFull, errors.DecodeFailed)
]


def test_a_short_text_is_as_it_was() -> None:
    for text in ("", "short", "x" * 2000):
        assert shorten(text) == text


def test_of_a_long_text_its_start_and_its_end_remain() -> None:
    text = f"start {LONG} the remedy"
    short = shorten(text)
    assert (len(short), short[:6], short[-10:]) == (2000, "start ", "the remedy")
    assert "more characters left out" in short


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_shortened(kind: type[CppBatchError]) -> None:
    arguments: list[Any] = [f"is {LONG}; it must be short"]
    if issubclass(kind, InvalidRequest):
        arguments.insert(0, "field")
    if kind is NotJsonLines:
        arguments.insert(0, "input.json")
    if kind is ModelLoadFailed:
        arguments.append(1.0)
    error = kind(*arguments)
    assert len(str(error)) <= 2000
    assert str(error).endswith("it must be short")


def test_the_field_of_an_error_is_shortened_too() -> None:
    error = NotFound(f"tools.{LONG}", "is unknown").with_field(f"messages.{LONG}")
    assert (len(error.field), error.message) == (200, "is unknown")
    assert str(error) == f"{error.field}: is unknown"
