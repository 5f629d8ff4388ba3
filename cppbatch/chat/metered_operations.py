"""What a template does that renders in this process: each operation is charged before it runs.

Python cannot interrupt `x == y`, `x | sort` or `x.replace(y, z)`, and no other thread runs meanwhile. So each operation
whose cost depends on its operands is charged here. A rendering that uses up its budget raises `NotQuick`, and so does
an operation that is not known to be cheap.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from functools import reduce
from typing import Any

import jinja2.tests

from cppbatch.chat.render_budget import CHARACTERS_SHIFT, FREE_CHARACTERS, SCALARS, NotQuick, charge, charge_weight

_MAX_INTEGER_BITS = 4096


def to_text(value: Any) -> str:
    """Converts a value as `str` does, and charges for its size."""
    if type(value) is not str:
        charge_weight(value)
        value = str(value)
    text: str = value
    return text


def concat(pieces: Iterable[str]) -> str:
    """Joins the output of macros and of the whole template, and charges for its length."""
    texts = list(pieces)
    charge(sum(map(len, texts)) >> CHARACTERS_SHIFT)
    return "".join(texts)


def write(value: Any) -> Any:
    """`{{ value }}`."""
    return value if type(value) is str else to_text(value)


def each_item(items: Iterable[Any], n: int = 1) -> Iterator[Any]:
    """The items of a loop whose body has the size `n`."""
    for item in items:
        charge(n)
        yield item


def as_list(value: Iterable[Any]) -> list[Any]:
    """The filter `list`."""
    return list(each_item(value))


def _add(*items: Any) -> Any:
    """`a + b + ...`"""
    if len(items) > 8:  # a sum is charged after it was computed
        return reduce(_plus, items)
    try:
        text = "".join(items)
    except TypeError:
        return reduce(_plus, items)
    if len(text) > FREE_CHARACTERS:
        charge(len(text) >> CHARACTERS_SHIFT)
    return text


def _plus(left: Any, right: Any) -> Any:
    for item in (left, right):
        if type(item) is str:
            charge(len(item) >> CHARACTERS_SHIFT)
        elif isinstance(item, (list, tuple)):
            charge(len(item))
    return left + right


def _tilde(*items: Any) -> str:
    """`a ~ b ~ ...`"""
    texts = [item if type(item) is str else to_text(item) for item in items]
    charge(sum(map(len, texts)) >> CHARACTERS_SHIFT)
    return "".join(texts)


def _times(left: Any, right: Any) -> Any:
    items, n = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(items, int) and isinstance(n, int):
        if items.bit_length() + n.bit_length() > _MAX_INTEGER_BITS:
            raise NotQuick
    elif isinstance(items, (str, list, tuple)) and isinstance(n, int):
        charge(len(items) * max(n, 0) >> (CHARACTERS_SHIFT if isinstance(items, str) else 0))
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_INTEGER_BITS:
        raise NotQuick
    return left**right


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str):  # formats
        raise NotQuick
    return left % right


def _slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    if isinstance(value, (str, list, tuple)):
        charge(len(value) >> CHARACTERS_SHIFT)
    return value[start:stop:step]


def _compared_by(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def metered(left: Any, right: Any) -> Any:
        if type(left) not in SCALARS and type(right) not in SCALARS:
            charge_weight(left, right)
        return compare(left, right)

    return metered


def _is_in(left: Any, right: Any) -> bool:
    if type(left) is not str:
        charge_weight(left)
    if isinstance(right, (Iterator, ValuesView, ItemsView)):
        right = as_list(right)
    if type(right) is str:
        charge(len(right) >> CHARACTERS_SHIFT)
    elif type(right) is not dict and type(right) is not _KEYS:
        charge_weight(right)
    return left in right


_KEYS: type = type({}.keys())


def lookup_key(key: Any) -> Any:
    """A key to look up."""
    if type(key) is not str and type(key) is not int:
        charge_weight(key)
    return key


OPERATORS: dict[str, Callable[..., Any]] = {
    "%": _modulo,
    "*": _times,
    "**": _power,
    "+": _add,
    "[:]": _slice,
    "each": each_item,
    "enter": charge,
    "eq": _compared_by(operator.eq),
    "gt": _compared_by(operator.gt),
    "gteq": _compared_by(operator.ge),
    "in": _is_in,
    "key": lookup_key,
    "lt": _compared_by(operator.lt),
    "lteq": _compared_by(operator.le),
    "ne": _compared_by(operator.ne),
    "~": _tilde,
}
"""Filters that the operations of a template become. No template can name them."""
_JINJAS_TESTS: dict[str, Any] = jinja2.tests.TESTS
TESTS: dict[str, Callable[..., Any]] = {
    **{name: _JINJAS_TESTS[name] for name in (
        "boolean", "defined", "false", "float", "integer", "iterable", "mapping", "none", "number", "sequence",
        "string", "true", "undefined",
    )},
    "!=": _compared_by(operator.ne),
    "==": _compared_by(operator.eq),
    "eq": _compared_by(operator.eq),
    "equalto": _compared_by(operator.eq),
    "in": _is_in,
    "ne": _compared_by(operator.ne),
}  # fmt: skip
