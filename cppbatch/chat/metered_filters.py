"""The filters and methods of a template that renders in this process, each charged as in `metered_operations.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
import jinja2.filters
import jinja2.runtime

from cppbatch.chat.metered_operations import as_list, each_item, lookup_key, to_text
from cppbatch.chat.render_budget import (
    CHARACTERS_SHIFT,
    FREE_CHARACTERS,
    MAX_BUDGET,
    NotQuick,
    charge,
    charge_weight,
    weight_of,
)
from cppbatch.chat.sandbox import tojson

_MAX_INDENT = 16


def _of_text(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or method of a text that reads it once, and returns no longer one."""

    def metered(value: Any, *args: Any) -> Any:
        text = value if type(value) is str else to_text(value)
        if len(text) > FREE_CHARACTERS:
            charge(len(text) >> CHARACTERS_SHIFT)
        for arg in args:
            if type(arg) is not str or len(arg) > FREE_CHARACTERS:
                charge_weight(arg)
        return function(text, *args)

    return metered


def _strip(function: Callable[..., str]) -> Callable[..., str]:
    def metered(value: Any, chars: str | None = None) -> str:
        text = value if type(value) is str else to_text(value)
        if chars is not None and type(chars) is not str:
            raise NotQuick
        if (n := len(text) * len(chars or "x")) > FREE_CHARACTERS:
            charge(n >> CHARACTERS_SHIFT)
        return function(text, chars)

    return metered


def _split(text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    charge(1 + (len(text) >> CHARACTERS_SHIFT))
    charge(text.count(sep) if sep else len(text) >> 1)
    return text.split(sep, maxsplit)


def _splitlines(text: str, keepends: bool = False) -> list[str]:
    charge(1 + len(text))
    return text.splitlines(keepends)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = to_text(value), to_text(old), to_text(new)
    charge(1 + (len(text) >> CHARACTERS_SHIFT))
    charge(text.count(old) * (1 + len(new)) >> CHARACTERS_SHIFT)
    return text.replace(old, new, -1 if count is None else count)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = to_text(value)
    if not isinstance(width, int) or width > _MAX_INDENT:
        raise NotQuick
    charge((len(text) >> CHARACTERS_SHIFT) + 4 * len(text.splitlines()))
    return jinja2.filters.do_indent(text, width, first, blank)


def _join(value: Iterable[Any], separator: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        raise NotQuick
    texts = [to_text(item) for item in each_item(value)]
    separator = to_text(separator)
    charge((sum(map(len, texts)) + len(separator) * len(texts)) >> CHARACTERS_SHIFT)
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
        items = list(each_item(value, _cost_of_names(*args, *named.values())))
        _charge_sort(items)
        return function(environment, items, *args, **named)

    return metered


def _lazy(function: Callable[..., Iterable[Any]]) -> Callable[..., Iterable[Any]]:
    """`map`, `select` and their kind. Their arguments are names, and values that items are compared with."""

    @jinja2.pass_context
    def metered(context: jinja2.runtime.Context, value: Iterable[Any], *args: Any, **named: Any) -> Iterable[Any]:
        given = [*args, *named.values()]
        charge_weight(given)
        return function(context, each_item(value, _cost_of_names(*given)) if value else (), *args, **named)

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
        value = as_list(value)
    charge_weight(value)
    if sort_keys:
        charge_weight(value)
    if indent is not None:  # each line has the indentation of its depth
        if not isinstance(indent, int) or indent > _MAX_INDENT:
            raise NotQuick
        charge(weight_of(value, MAX_BUDGET) * _depth(value) * max(indent, 0) >> CHARACTERS_SHIFT)
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
    "list": as_list,
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
    dict: {"get": lambda items, key, default=None: items.get(lookup_key(key), default)}
    | {name: getattr(dict, name) for name in ("items", "keys", "values")},
}  # fmt: skip
