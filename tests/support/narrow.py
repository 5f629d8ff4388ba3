"""Values of a union type as the one type that the test expects."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def expect(kind: type[T], value: object) -> T:
    """The value, which must be of this type."""
    assert isinstance(value, kind), f"{value!r} is not of type {kind.__name__}"
    return value


def some(value: T | None) -> T:
    """The value, which must not be None."""
    assert value is not None
    return value
