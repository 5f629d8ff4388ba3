"""What a template does that renders in this process: each operation is charged before it runs.

Python cannot interrupt `x == y`, `x | sort` or `x.replace(y, z)`, and no other thread runs meanwhile. So each operation
whose cost depends on its operands is charged here. A rendering that uses up its budget raises `NotQuick`, and so does
an operation that is not known to be cheap.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from contextlib import contextmanager
from functools import reduce
from typing import Any

import jinja2
import jinja2.filters
import jinja2.runtime
import jinja2.tests

from cppbatch.chat.sandbox import HostFunction, Missing, tojson

_BUDGET = 20_000
"""What a rendering may cost, in units of about half a microsecond; 20 messages cost about 2,000."""
_MAX_BUDGET = 500_000
_FREE_CHARACTERS = 256
"""Texts up to this length cost nothing: the size of a loop's body or a macro covers them."""
_LARGE_WEIGHT = 100_000
"""The weight from which a conversation is large: with it, any template may exceed its budget."""
_CHARACTERS_SHIFT = 4  # 16 characters of a text cost one unit
_MAX_INTEGER_BITS = 4096
_MAX_INDENT = 16


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
        _METER.weight = _weight(given, _MAX_BUDGET)
        _METER.left += min(32 * _METER.weight, _MAX_BUDGET)
    if _METER.left < wanted:
        raise NotQuick(is_large=_METER.weight > _LARGE_WEIGHT)


def _weight(value: Any, most: int) -> int:
    """The number of values within this one, each with its characters; more than `most` if it has more. What a
    comparison, a hash, JSON or text of it costs. Raises `NotQuick` for objects of other kinds."""
    n, rest = 1, [value]
    while rest and n <= most:
        each = rest.pop()
        if type(each) is str:
            n += len(each) >> _CHARACTERS_SHIFT
        elif isinstance(each, (list, tuple)):
            n += len(each)
            rest += each
        elif isinstance(each, dict):
            n += 2 * len(each)
            rest += each
            rest += each.values()
        elif type(each) not in _SCALARS:
            raise NotQuick  # its text may be long
    return n


def charge_weight(*values: Any) -> None:
    """Charges what it costs to read these values to their depths. Raises `NotQuick` for objects of other kinds."""
    for value in values:
        kind = type(value)
        if kind is str:
            charge(len(value) >> _CHARACTERS_SHIFT)
        elif kind is dict or isinstance(value, (list, tuple)):
            if (n := _weight(value, _METER.left)) > _METER.left:
                _raise_budget(n)
                n = _weight(value, _METER.left)
            charge(n)
        elif kind not in _SCALARS:
            raise NotQuick


_SCALARS = {int, float, bool, type(None), Missing, jinja2.Undefined}


# --- operations -------------------------------------------------------------------------------------------------------


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
    charge(sum(map(len, texts)) >> _CHARACTERS_SHIFT)
    return "".join(texts)


def write(value: Any) -> Any:
    """`{{ value }}`."""
    return value if type(value) is str else to_text(value)


def _each(items: Iterable[Any], n: int = 1) -> Iterator[Any]:
    """The items of a loop whose body has the size `n`."""
    for item in items:
        charge(n)
        yield item


def _add(*items: Any) -> Any:
    """`a + b + ...`"""
    if len(items) > 8:  # a sum is charged after it was computed
        return reduce(_plus, items)
    try:
        text = "".join(items)
    except TypeError:
        return reduce(_plus, items)
    if len(text) > _FREE_CHARACTERS:
        charge(len(text) >> _CHARACTERS_SHIFT)
    return text


def _plus(left: Any, right: Any) -> Any:
    for item in (left, right):
        if type(item) is str:
            charge(len(item) >> _CHARACTERS_SHIFT)
        elif isinstance(item, (list, tuple)):
            charge(len(item))
    return left + right


def _tilde(*items: Any) -> str:
    """`a ~ b ~ ...`"""
    texts = [item if type(item) is str else to_text(item) for item in items]
    charge(sum(map(len, texts)) >> _CHARACTERS_SHIFT)
    return "".join(texts)


def _times(left: Any, right: Any) -> Any:
    items, n = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(items, int) and isinstance(n, int):
        if items.bit_length() + n.bit_length() > _MAX_INTEGER_BITS:
            raise NotQuick
    elif isinstance(items, (str, list, tuple)) and isinstance(n, int):
        charge(len(items) * max(n, 0) >> (_CHARACTERS_SHIFT if isinstance(items, str) else 0))
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
        charge(len(value) >> _CHARACTERS_SHIFT)
    return value[start:stop:step]


def _compared_by(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def metered(left: Any, right: Any) -> Any:
        if type(left) not in _SCALARS and type(right) not in _SCALARS:
            charge_weight(left, right)
        return compare(left, right)

    return metered


def _is_in(left: Any, right: Any) -> bool:
    if type(left) is not str:
        charge_weight(left)
    if isinstance(right, (Iterator, ValuesView, ItemsView)):
        right = _list(right)
    if type(right) is str:
        charge(len(right) >> _CHARACTERS_SHIFT)
    elif type(right) is not dict and type(right) is not _KEYS:
        charge_weight(right)
    return left in right


_KEYS: type = type({}.keys())


def _key(key: Any) -> Any:
    """A key to look up."""
    if type(key) is not str and type(key) is not int:
        charge_weight(key)
    return key


# --- filters ----------------------------------------------------------------------------------------------------------


def _of_text(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or method of a text that reads it once, and returns no longer one."""

    def metered(value: Any, *args: Any) -> Any:
        text = value if type(value) is str else to_text(value)
        if len(text) > _FREE_CHARACTERS:
            charge(len(text) >> _CHARACTERS_SHIFT)
        for arg in args:
            if type(arg) is not str or len(arg) > _FREE_CHARACTERS:
                charge_weight(arg)
        return function(text, *args)

    return metered


def _strip(function: Callable[..., str]) -> Callable[..., str]:
    def metered(value: Any, chars: str | None = None) -> str:
        text = value if type(value) is str else to_text(value)
        if chars is not None and type(chars) is not str:
            raise NotQuick
        if (n := len(text) * len(chars or "x")) > _FREE_CHARACTERS:
            charge(n >> _CHARACTERS_SHIFT)
        return function(text, chars)

    return metered


def _split(text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    charge(1 + (len(text) >> _CHARACTERS_SHIFT))
    charge(text.count(sep) if sep else len(text) >> 1)
    return text.split(sep, maxsplit)


def _splitlines(text: str, keepends: bool = False) -> list[str]:
    charge(1 + len(text))
    return text.splitlines(keepends)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = to_text(value), to_text(old), to_text(new)
    charge(1 + (len(text) >> _CHARACTERS_SHIFT))
    charge(text.count(old) * (1 + len(new)) >> _CHARACTERS_SHIFT)
    return text.replace(old, new, -1 if count is None else count)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = to_text(value)
    if not isinstance(width, int) or width > _MAX_INDENT:
        raise NotQuick
    charge((len(text) >> _CHARACTERS_SHIFT) + 4 * len(text.splitlines()))
    return jinja2.filters.do_indent(text, width, first, blank)


def _list(value: Iterable[Any]) -> list[Any]:
    return list(_each(value))


def _join(value: Iterable[Any], separator: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        raise NotQuick
    texts = [to_text(item) for item in _each(value)]
    separator = to_text(separator)
    charge((sum(map(len, texts)) + len(separator) * len(texts)) >> _CHARACTERS_SHIFT)
    joined: str = separator.join(texts)
    return joined


def _int(value: Any, default: int = 0, base: int = 10) -> int:
    if isinstance(value, str) and len(value) > 100:
        raise NotQuick
    return jinja2.filters.do_int(value, default, base)


def _dictsort(value: Any, *args: Any, **named: Any) -> list[Any]:
    if type(value) is not dict:
        raise NotQuick
    _charge_sort(value)
    return jinja2.filters.do_dictsort(value, *args, **named)


def _charge_sort(items: Any) -> None:
    for _ in range(len(items).bit_length() + 1):
        charge_weight(items)


def _compared(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that compares the items of a list with each other."""

    @jinja2.pass_environment
    def metered(environment: jinja2.Environment, value: Iterable[Any], *args: Any, **named: Any) -> Any:
        items = list(_each(value, _cost_of_names(*args, *named.values())))
        _charge_sort(items)
        return function(environment, items, *args, **named)

    return metered


def _lazy(function: Callable[..., Iterable[Any]]) -> Callable[..., Iterable[Any]]:
    """`map`, `select` and their kind. Their arguments are names, and values that items are compared with."""

    @jinja2.pass_context
    def metered(context: jinja2.runtime.Context, value: Iterable[Any], *args: Any, **named: Any) -> Iterable[Any]:
        given = [*args, *named.values()]
        charge_weight(given)
        return function(context, _each(value, _cost_of_names(*given)) if value else (), *args, **named)

    return metered


def _cost_of_names(*names: Any) -> int:
    """The units for each item: an attribute may be a path."""
    return 1 + sum(len(name) for name in names if isinstance(name, str)) // 4


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if separators is not None and (len(separators) != 2 or any(len(each) > _MAX_INDENT for each in separators)):
        raise NotQuick
    charge(1)
    if isinstance(value, Iterator):
        value = _list(value)
    charge_weight(value)
    if sort_keys:
        charge_weight(value)
    if indent is not None:  # each line has the indentation of its depth
        if not isinstance(indent, int) or indent > _MAX_INDENT:
            raise NotQuick
        charge(_weight(value, _MAX_BUDGET) * _depth(value) * max(indent, 0) >> _CHARACTERS_SHIFT)
    return tojson(value, ensure_ascii, indent, separators, sort_keys)


def _depth(value: Any) -> int:
    """How deeply its lists and dictionaries are nested. Their weight has been charged."""
    n, level = 0, [value]
    while level := [each for each in level if isinstance(each, (list, tuple, dict))]:
        n += 1
        level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
    return n


FILTERS: dict[str, Callable[..., Any]] = {
    "count": len,
    "d": jinja2.filters.do_default,
    "default": jinja2.filters.do_default,
    "dictsort": _dictsort,
    "first": jinja2.filters.sync_do_first,
    "indent": _indent,
    "int": _int,
    "items": jinja2.filters.do_items,
    "join": _join,
    "last": jinja2.filters.do_last,
    "length": len,
    "list": _list,
    "lower": _of_text(str.lower),
    "map": _lazy(jinja2.filters.sync_do_map),
    "max": _compared(jinja2.filters.do_max),
    "min": _compared(jinja2.filters.do_min),
    "reject": _lazy(jinja2.filters.sync_do_reject),
    "rejectattr": _lazy(jinja2.filters.sync_do_rejectattr),
    "replace": _replace,
    "safe": to_text,
    "select": _lazy(jinja2.filters.sync_do_select),
    "selectattr": _lazy(jinja2.filters.sync_do_selectattr),
    "sort": _compared(jinja2.filters.do_sort),
    "string": to_text,
    "tojson": _tojson,
    "trim": _strip(str.strip),
    "unique": _compared(jinja2.filters.sync_do_unique),
    "upper": _of_text(str.upper),
}
METHODS: dict[type, dict[str, Callable[..., Any]]] = {
    str: {
        **{name: _of_text(getattr(str, name)) for name in (
            "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower", "isnumeric",
            "isspace", "isupper", "lower", "partition", "removeprefix", "removesuffix", "startswith", "title", "upper",
        )},
        "join": lambda separator, items: _join(items, separator),
        "lstrip": _strip(str.lstrip),
        "replace": _replace,
        "rstrip": _strip(str.rstrip),
        "split": _split,
        "splitlines": _splitlines,
        "strip": _strip(str.strip),
    },
    list: {"append": list.append, "pop": list.pop},
    dict: {"get": lambda items, key, default=None: items.get(_key(key), default)}
    | {name: getattr(dict, name) for name in ("items", "keys", "values")},
}  # fmt: skip
OPERATORS: dict[str, Callable[..., Any]] = {
    "%": _modulo,
    "*": _times,
    "**": _power,
    "+": _add,
    "[:]": _slice,
    "each": _each,
    "enter": charge,
    "eq": _compared_by(operator.eq),
    "gt": _compared_by(operator.gt),
    "gteq": _compared_by(operator.ge),
    "in": _is_in,
    "key": _key,
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
