"""The sandbox for templates that render in this process: every operation is charged before it runs.

Python cannot interrupt `x == y`, `x | sort` or `x.replace(y, z)`, and no other thread runs meanwhile. So each operation
whose cost depends on its operands is charged here; a rendering that uses up its budget, or an operation that is not in
the lists below, raises `NotQuick`, and a child process renders the template instead (`template_program.py`). A template
that is not in the subset compiles there too.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce
from types import BuiltinMethodType, CodeType, FunctionType
from typing import Any, NoReturn

import jinja2
import jinja2.filters
import jinja2.runtime
import jinja2.sandbox
import jinja2.tests
import jinja2.visitor
from jinja2 import nodes

from cppbatch.chat.sandbox import (
    HostFunction,
    MakeDict,
    Missing,
    Namespace,
    Sandbox,
    make_sandbox,
    raise_exception,
    strftime_now,
    tojson,
)

MAX_SOURCE = 32_000
"""Characters of a template that is compiled in this process. The largest that llama.cpp ships has 17,000."""
_MAX_NODES = 10_000
_MAX_PYTHON = 500_000
"""Characters of the Python code that Jinja makes of it."""
_BUDGET = 20_000
"""What a rendering may cost, in units of about half a microsecond; 20 messages cost about 2,000."""
_BUDGET_PER_WEIGHT = 32
_MAX_BUDGET = 500_000
_SHORT = 256
"""Texts up to this length cost nothing: the size of a loop's body or a macro covers them."""
_LARGE = 100_000
"""The weight from which a conversation is large: with it, any template may exceed its budget."""
_CHARACTERS = 4  # 16 characters of a text cost one unit
_MAX_INTEGER_BITS = 4096
_MAX_INDENT = 16
_MAX_DIGITS = 100
_MAX_ITEMS = 8  # of a sum that is charged after it was computed


class NotQuick(Exception):
    """This template does not certainly render quickly. `is_large`: because of the conversation, not of the template."""

    def __init__(self, *, is_large: bool = False) -> None:
        super().__init__("the template is rendered in a child process")
        self.is_large = is_large


class _Meter(threading.local):
    """The budget of the rendering on this thread."""

    left = 0
    variables: dict[str, Any] | None = None
    """Those of the rendering, until the budget was raised for their size."""
    weight = 0


_METER = _Meter()


def render_metered(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Returns the text that the template writes. A template is a program: this may raise anything, and `NotQuick`."""
    _METER.left, _METER.variables, _METER.weight = _BUDGET, variables, 0
    try:
        return _concat(template.generate(variables))
    finally:
        _METER.variables = None


def _charge(n: int) -> None:
    _METER.left -= n
    if _METER.left < 0:
        _raise_budget()


def _raise_budget() -> None:
    """Raises the budget once by the size of the conversation, or raises `NotQuick`."""
    if _METER.variables is not None:
        given = [value for value in _METER.variables.values() if type(value) is not HostFunction]
        _METER.weight = _weight(given, _MAX_BUDGET)
        _METER.left += min(_BUDGET_PER_WEIGHT * _METER.weight, _MAX_BUDGET)
        _METER.variables = None
    if _METER.left < 0:
        raise NotQuick(is_large=_METER.weight > _LARGE)


def _weight(value: Any, most: int) -> int:
    """The number of values within this one, each with its characters; more than `most` if it has more. What a
    comparison, a hash, JSON or text of it costs. Raises `NotQuick` for objects of other kinds."""
    n, rest = 1, [value]
    while rest and n <= most:
        each = rest.pop()
        if type(each) is str:
            n += len(each) >> _CHARACTERS
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


def _charge_weight(*values: Any) -> None:
    """Charges what it costs to read these values to their depths. Raises `NotQuick` for objects of other kinds."""
    for value in values:
        kind = type(value)
        if kind is str:
            _charge(len(value) >> _CHARACTERS)
        elif kind is dict or isinstance(value, (list, tuple)):
            _charge(_weight(value, _METER.left + _MAX_BUDGET))
        elif kind not in _SCALARS:
            raise NotQuick


_SCALARS = {int, float, bool, type(None), Missing, jinja2.Undefined}


# --- operations -------------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    """As `str`."""
    if type(value) is not str:
        _charge_weight(value)
        value = str(value)
    text: str = value
    return text


def _concat(pieces: Iterable[str]) -> str:
    """As `"".join`, for the output of macros and of the whole template."""
    texts = list(pieces)
    _charge(sum(map(len, texts)) >> _CHARACTERS)
    return "".join(texts)


def _write(value: Any) -> Any:
    """`{{ value }}`."""
    return value if type(value) is str else _text(value)


def _each(items: Iterable[Any], n: int = 1) -> Iterator[Any]:
    """The items of a loop whose body has the size `n`."""
    for item in items:
        _charge(n)
        yield item


def _add(*items: Any) -> Any:
    """`a + b + ...`"""
    if len(items) > _MAX_ITEMS:
        return reduce(_plus, items)
    try:
        text = "".join(items)
    except TypeError:
        return reduce(_plus, items)
    if len(text) > _SHORT:
        _charge(len(text) >> _CHARACTERS)
    return text


def _plus(left: Any, right: Any) -> Any:
    for item in (left, right):
        if type(item) is str:
            _charge(len(item) >> _CHARACTERS)
        elif isinstance(item, (list, tuple)):
            _charge(len(item))
    return left + right


def _tilde(*items: Any) -> str:
    """`a ~ b ~ ...`"""
    texts = [item if type(item) is str else _text(item) for item in items]
    _charge(sum(map(len, texts)) >> _CHARACTERS)
    return "".join(texts)


def _times(left: Any, right: Any) -> Any:
    items, n = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(items, int) and isinstance(n, int):
        if items.bit_length() + n.bit_length() > _MAX_INTEGER_BITS:
            raise NotQuick
    elif isinstance(items, (str, list, tuple)) and isinstance(n, int):
        _charge(len(items) * max(n, 0) >> (_CHARACTERS if isinstance(items, str) else 0))
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
        _charge(len(value) >> _CHARACTERS)
    return value[start:stop:step]


def _compare(compare: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    if type(left) not in _SCALARS and type(right) not in _SCALARS:
        _charge_weight(left, right)
    return compare(left, right)


def _is_in(left: Any, right: Any) -> bool:
    if type(left) is not str:
        _charge_weight(left)
    if type(right) is str:
        _charge(len(right) >> _CHARACTERS)
    elif type(right) is not dict and type(right) is not _KEYS:
        _charge_weight(right)
    return left in right


_KEYS = type({}.keys())


def _key(key: Any) -> Any:
    """A key to look up."""
    if type(key) is not str and type(key) is not int:
        _charge_weight(key)
    return key


# --- filters ----------------------------------------------------------------------------------------------------------


def _of_text(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or method of a text that reads it once, and returns no longer one."""

    def metered(value: Any, *args: Any) -> Any:
        text = value if type(value) is str else _text(value)
        if len(text) > _SHORT:
            _charge(len(text) >> _CHARACTERS)
        for arg in args:
            if type(arg) is not str or len(arg) > _SHORT:
                _charge_weight(arg)
        return function(text, *args)

    return metered


def _strip(function: Callable[..., str]) -> Callable[..., str]:
    def metered(value: Any, chars: str | None = None) -> str:
        text = value if type(value) is str else _text(value)
        if chars is not None and type(chars) is not str:
            raise NotQuick
        if (n := len(text) * len(chars or "x")) > _SHORT:
            _charge(n >> _CHARACTERS)
        return function(text, chars)

    return metered


def _split(text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    _charge(1 + (len(text) >> _CHARACTERS))
    _charge(text.count(sep) if sep else len(text) >> 1)
    return text.split(sep, maxsplit)


def _splitlines(text: str) -> list[str]:
    _charge(1 + len(text))
    return text.splitlines()


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = _text(value), _text(old), _text(new)
    _charge(1 + (len(text) >> _CHARACTERS))
    _charge(text.count(old) * (1 + len(new)) >> _CHARACTERS)
    return text.replace(old, new, -1 if count is None else count)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = _text(value)
    if not isinstance(width, int) or width > _MAX_INDENT:
        raise NotQuick
    _charge((len(text) >> _CHARACTERS) + 4 * len(text.splitlines()))
    return jinja2.filters.do_indent(text, width, first, blank)


def _list(value: Iterable[Any]) -> list[Any]:
    return list(_each(value))


def _join(value: Iterable[Any], separator: Any = "") -> str:
    texts = [_text(item) for item in _each(value)]
    separator = _text(separator)
    _charge((sum(map(len, texts)) + len(separator) * len(texts)) >> _CHARACTERS)
    joined: str = separator.join(texts)
    return joined


def _int(value: Any, default: int = 0) -> int:
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise NotQuick
    return jinja2.filters.do_int(value, default)


def _dictsort(value: Any) -> list[Any]:
    if type(value) is not dict:
        raise NotQuick
    _charge_weight([*value, *value])
    return jinja2.filters.do_dictsort(value)


def _compared(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that compares the items of a list with each other."""

    @jinja2.pass_environment
    def metered(environment: jinja2.Environment, value: Iterable[Any], attribute: str | None = None) -> Any:
        items = list(_each(value, _cost_of_names(attribute)))
        for _ in range(len(items).bit_length() + 1):
            _charge_weight(items)
        return function(environment, items, attribute=attribute)

    return metered


def _lazy(function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """`map`, `select` and their kind. Their arguments are names, and values that items are compared with."""

    @jinja2.pass_context
    def metered(context: jinja2.runtime.Context, value: Iterable[Any], *args: Any, **named: Any) -> Iterator[Any]:
        given = [*args, *named.values()]
        _charge_weight(given)
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
    _charge(1)
    if isinstance(value, Iterator):
        value = _list(value)
    _charge_weight(value)
    if sort_keys:
        _charge_weight(value)
    if indent is not None:  # each line has the indentation of its depth
        if not isinstance(indent, int) or indent > _MAX_INDENT:
            raise NotQuick
        _charge(_weight(value, _MAX_BUDGET) * _depth(value) * max(indent, 0) >> _CHARACTERS)
    return tojson(value, ensure_ascii, indent, separators, sort_keys)


def _depth(value: Any) -> int:
    """How deeply its lists and dictionaries are nested. Their weight has been charged."""
    n, level = 0, [value]
    while level := [each for each in level if isinstance(each, (list, tuple, dict))]:
        n += 1
        level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
    return n


_FILTERS: dict[str, Callable[..., Any]] = {
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
    "safe": _text,
    "select": _lazy(jinja2.filters.sync_do_select),
    "selectattr": _lazy(jinja2.filters.sync_do_selectattr),
    "sort": _compared(jinja2.filters.do_sort),
    "string": _text,
    "tojson": _tojson,
    "trim": _strip(str.strip),
    "unique": _compared(jinja2.filters.sync_do_unique),
    "upper": _of_text(str.upper),
}
_METHODS: dict[type, dict[str, Callable[..., Any]]] = {
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
_OPERATORS: dict[str, Callable[..., Any]] = {
    name: partial(_compare, getattr(operator, function))
    for name, function in (("eq", "eq"), ("ne", "ne"), ("lt", "lt"), ("lteq", "le"), ("gt", "gt"), ("gteq", "ge"))
} | {"in": _is_in, "+": _add, "~": _tilde, "*": _times, "**": _power, "%": _modulo, "[:]": _slice} | {"each": _each, "enter": _charge, "key": _key}
"""Filters that the operations of a template become. No template can name them."""
_TESTS: dict[str, Callable[..., Any]] = {
    name: jinja2.tests.TESTS[name]
    for name in (
        "boolean", "defined", "false", "float", "integer", "iterable", "mapping", "none", "number", "sequence",
        "string", "true", "undefined",
    )
} | {
    name: partial(_compare, jinja2.tests.TESTS[name])
    for name in ("==", "!=", "eq", "equalto", "ne")
} | {"in": _is_in}  # fmt: skip


# --- compiling --------------------------------------------------------------------------------------------------------


class _Metering(jinja2.visitor.NodeTransformer):
    """Replaces operations by metered filters. Raises `NotQuick` for what is not known to be cheap."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if type(node) not in _NODES:
            raise NotQuick
        return super().generic_visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        size = _size(node)
        self.generic_visit(node)
        node.iter = _filter("each", node.iter, nodes.Const(size))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        size = _size(node)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filter("enter", nodes.Const(size)), lineno=node.lineno))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        (first, *others) = node.ops
        if others:
            raise NotQuick
        self.generic_visit(node)
        if _is_small(first.expr) or (first.op not in ("in", "notin") and _is_small(node.expr)):
            return node
        if first.op == "notin":
            return nodes.Not(_filter("in", node.expr, first.expr), lineno=node.lineno)
        return _filter(first.op, node.expr, first.expr)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        items: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            items.append(left.right)
            left = left.left
        first, *rest = (self.visit(item) for item in (left, *reversed(items)))
        return _filter("+", first, *rest)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter("~", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            if not isinstance(node.arg, nodes.Const):
                node.arg = _filter("key", node.arg)
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter("[:]", node.node, *(end or nodes.Const(None) for end in ends))

    def _visit_operator(self, node: nodes.BinExpr) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node.operator, node.left, node.right)

    visit_Mul = visit_Pow = visit_Mod = _visit_operator

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args or node.dyn_kwargs or (node.name not in _FILTERS and node.name in _BASE.filters):
            raise NotQuick
        if node.name == "map" and node.args and not _names(node.args[0], _FILTERS):
            raise NotQuick
        if node.name in ("select", "reject") and not _names(*node.args[:1], _TESTS):
            raise NotQuick
        if node.name in ("selectattr", "rejectattr") and not _names(*node.args[1:2], _TESTS):
            raise NotQuick
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args or node.dyn_kwargs or (node.name not in _TESTS and node.name in _BASE.tests):
            raise NotQuick
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args or node.dyn_kwargs:
            raise NotQuick
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            raise NotQuick
        return node


_NODES = {
    nodes.Add, nodes.And, nodes.Assign, nodes.AssignBlock, nodes.Break, nodes.Call, nodes.Compare, nodes.Concat,
    nodes.CondExpr, nodes.Const, nodes.Continue, nodes.Dict, nodes.Div, nodes.Filter, nodes.FilterBlock, nodes.FloorDiv,
    nodes.For, nodes.Getattr, nodes.Getitem, nodes.If, nodes.Keyword, nodes.List, nodes.Macro, nodes.Mod, nodes.Mul,
    nodes.NSRef, nodes.Name, nodes.Neg, nodes.Not, nodes.Operand, nodes.Or, nodes.Output, nodes.Pair, nodes.Pos,
    nodes.Pow, nodes.Scope, nodes.Slice, nodes.Sub, nodes.Template, nodes.TemplateData, nodes.Test, nodes.Tuple,
}  # fmt: skip


def _filter(name: str, first: nodes.Expr, *others: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(first, name, list(others), [], None, None, lineno=first.lineno)


def _size(node: nodes.Node) -> int:
    """The units for one round of a loop or one call of a macro, without the loops and macros in it."""
    n, rest = 0, list(node.iter_child_nodes())
    while rest:
        each = rest.pop()
        n += 1
        if not isinstance(each, (nodes.For, nodes.Macro)):
            rest += each.iter_child_nodes()
    return 1 + n // 8


def _is_small(node: nodes.Expr) -> bool:
    """Whether it is a constant, or a list of some."""
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(map(_is_small, node.items))
    return isinstance(node, nodes.Const)


def _names(*given: Any) -> bool:
    """Whether the constant is a name of this table; True without one."""
    *names, table = given
    return all(isinstance(name, nodes.Const) and name.value in table for name in names)


class _MeteredSandbox(Sandbox):
    """Renders the same as `Sandbox`, or raises `NotQuick`."""

    intercepted_binops = frozenset()
    concat = staticmethod(_concat)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        if sum(1 for _ in source.find_all(nodes.Node)) > _MAX_NODES:
            raise NotQuick
        return super()._generate(_Metering().visit(source), *args, **kwargs)

    def _compile(self, source: str, filename: str) -> CodeType:
        if len(source) > _MAX_PYTHON:
            raise NotQuick
        return super()._compile(source, filename)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        kind = type(__obj)
        _charge(1)
        if kind is BuiltinMethodType:
            kwargs.pop("_loop_vars", None)  # for functions that read Jinja's context
            kwargs.pop("_block_vars", None)
            receiver = __obj.__self__
            method = _METHODS.get(type(receiver), {}).get(__obj.__name__)
            if method is None:
                raise NotQuick
            return method(receiver, *args, **kwargs)
        if kind is FunctionType and __obj.__name__ == "format":
            _charge_format(__obj.__wrapped__.__self__, [*args, *map(kwargs.get, kwargs.keys() - _CONTEXT)])
        elif kind is HostFunction:
            _charge_weight([*args])
        elif __obj is Namespace or kind is MakeDict:
            if args:
                raise NotQuick
        elif kind not in _CALLABLE and __obj not in _FUNCTIONS:
            raise NotQuick
        return super().call(__context, __obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:  # the usual case, without exceptions
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


_CONTEXT = {"_loop_vars", "_block_vars"}
_DICT_ATTRIBUTES = frozenset(dir(dict))
_CALLABLE = (jinja2.runtime.Macro, jinja2.runtime.LoopContext, Missing, jinja2.Undefined)


def _charge_format(text: str, values: list[Any]) -> None:
    """Charges `text.format(...)`, without widths and conversions."""
    if ":" in text or "!" in text:
        raise NotQuick
    for _ in range(text.count("{") + 1):
        _charge_weight(text, values)


def _raise_metered(message: Any) -> NoReturn:
    raise_exception(_text(message))


def _strftime_metered(pattern: str) -> str:
    _charge(len(pattern) * 16)
    return strftime_now(pattern)


_FUNCTIONS = (_raise_metered, _strftime_metered, jinja2.sandbox.safe_range)


def _metered_sandbox() -> _MeteredSandbox:
    environment = make_sandbox(_MeteredSandbox, finalize=_write, optimized=False)
    environment.filters = _FILTERS | _OPERATORS
    environment.tests = dict(_TESTS)
    environment.globals |= {"raise_exception": _raise_metered, "strftime_now": _strftime_metered}
    return environment


_BASE = make_sandbox(Sandbox)
_ENVIRONMENT = _metered_sandbox()


def compile_metered(source: str) -> jinja2.Template:
    """Raises `NotQuick` for a template that is large or not in the subset, and anything for one that is broken."""
    if len(source) > MAX_SOURCE:
        raise NotQuick
    _METER.left, _METER.variables = _BUDGET, None
    return _ENVIRONMENT.from_string(source)
