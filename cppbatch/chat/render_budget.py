"""What the rendering of a template in this process may cost, and how operations are charged for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jinja2

from cppbatch.chat.sandbox import HostFunction, Missing

_BUDGET = 20_000
"""What a rendering may cost, in units of about half a microsecond; 20 messages cost about 2,000."""
MAX_BUDGET = 500_000
FREE_CHARACTERS = 256
"""Texts up to this length cost nothing: the size of a loop's body or a macro covers them."""
_LARGE_WEIGHT = 100_000
"""The weight from which a conversation is large: with it, any template may exceed its budget."""
CHARACTERS_SHIFT = 4  # 16 characters of a text cost one unit


class NotQuick(Exception):
    """This template does not certainly render quickly. `is_large`: because of the conversation, not of the template."""

    def __init__(self, *, is_large: bool = False) -> None:
        super().__init__("the template is rendered in a child process")
        self.is_large = is_large


class _Meter(threading.local):
    """The budget of the rendering on this thread."""

    left = 0
    variables: dict[str, Any] | None = None
    """The variables of the rendering, until the budget was raised for their size."""
    weight = 0


_METER = _Meter()


@contextmanager
def budget(variables: dict[str, Any]) -> Iterator[None]:
    """A context with the budget of a rendering with these variables."""
    _METER.left, _METER.variables, _METER.weight = _BUDGET, variables, 0
    try:
        yield
    finally:
        _METER.variables = None


def charge(n: int) -> None:
    _METER.left -= n
    if _METER.left < 0:
        _raise_budget()


def _raise_budget(wanted: int = 0) -> None:
    """Raises the budget, once, by the size of the conversation. Raises `NotQuick` if less than `wanted` is left."""
    if _METER.variables is not None:
        given = [value for value in _METER.variables.values() if type(value) is not HostFunction]
        _METER.variables = None
        _METER.weight = weight_of(given, MAX_BUDGET)
        _METER.left += min(32 * _METER.weight, MAX_BUDGET)
    if _METER.left < wanted:
        raise NotQuick(is_large=_METER.weight > _LARGE_WEIGHT)


def weight_of(value: Any, most: int) -> int:
    """The number of values within this one, each with its characters; more than `most` if it has more. What a
    comparison, a hash, JSON or text of it costs. Raises `NotQuick` for objects of other kinds."""
    n, rest = 1, [value]
    while rest and n <= most:
        each = rest.pop()
        if type(each) is str:
            n += len(each) >> CHARACTERS_SHIFT
        elif isinstance(each, (list, tuple)):
            n += len(each)
            rest += each
        elif isinstance(each, dict):
            n += 2 * len(each)
            rest += each
            rest += each.values()
        elif type(each) not in SCALARS:
            raise NotQuick  # its text may be long
    return n


def charge_weight(*values: Any) -> None:
    """Charges what it costs to read these values to their depths. Raises `NotQuick` for objects of other kinds."""
    for value in values:
        kind = type(value)
        if kind is str:
            charge(len(value) >> CHARACTERS_SHIFT)
        elif kind is dict or isinstance(value, (list, tuple)):
            if (n := weight_of(value, _METER.left)) > _METER.left:
                _raise_budget(n)
                n = weight_of(value, _METER.left)
            charge(n)
        elif kind not in SCALARS:
            raise NotQuick


SCALARS = {int, float, bool, type(None), Missing, jinja2.Undefined}
