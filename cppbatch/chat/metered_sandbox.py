"""The sandbox of templates that are compiled and rendered in this process, in bounded time.

A template that is large, that does what is not known to be cheap, or that costs more than its budget
(`render_budget.py`), raises `NotQuick`, and a child process renders it instead (`template_program.py`).
"""

from __future__ import annotations

from types import BuiltinMethodType, CodeType, FunctionType
from typing import Any, NoReturn

import jinja2
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor
from jinja2 import nodes

from cppbatch.chat.metered_filters import FILTERS, METHODS
from cppbatch.chat.metered_operations import OPERATORS, TESTS, concat, to_text, write
from cppbatch.chat.render_budget import NotQuick, budget, charge, charge_weight
from cppbatch.chat.sandbox import (
    HostFunction,
    MakeDict,
    Missing,
    Namespace,
    Sandbox,
    make_sandbox,
    raise_exception,
    strftime_now,
)

_MAX_SOURCE = 32_000
"""Characters of a template that is compiled in this process. The largest that llama.cpp ships has 17,000."""
_MAX_PYTHON = 500_000
"""Characters of the Python code that Jinja makes of it."""


def compile_metered(source: str) -> jinja2.Template:
    """Raises `NotQuick` for a template that is large or not in the subset, and anything for one that is broken."""
    if len(source) > _MAX_SOURCE:
        raise NotQuick
    with budget({}):  # constants are computed
        return _ENVIRONMENT.from_string(source)


def render_metered(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Returns the text that the template writes. A template is a program: this may raise anything, and `NotQuick`."""
    with budget(variables):
        return concat(template.generate(variables))


_BASE = make_sandbox(Sandbox)
_MAKE_DICT = MakeDict()


class _Metering(jinja2.visitor.NodeTransformer):
    """Replaces operations by metered filters. Raises `NotQuick` for what is not known to be cheap."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if type(node) not in _NODES:
            raise NotQuick
        return super().generic_visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise NotQuick
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
        if node.dyn_args or node.dyn_kwargs or (node.name not in FILTERS and node.name in _BASE.filters):
            raise NotQuick
        if node.name == "map" and node.args and not _names(node.args[0], FILTERS):
            raise NotQuick
        if node.name in ("select", "reject") and not _names(*node.args[:1], TESTS):
            raise NotQuick
        if node.name in ("selectattr", "rejectattr") and not _names(*node.args[1:2], TESTS):
            raise NotQuick
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args or node.dyn_kwargs or (node.name not in TESTS and node.name in _BASE.tests):
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


def _filter(name: str, first: Any, *others: Any) -> nodes.Filter:
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
    concat = staticmethod(concat)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        if sum(1 for _ in source.find_all(nodes.Node)) > 10_000:
            raise NotQuick
        return super()._generate(_Metering().visit(source), *args, **kwargs)

    def _compile(self, source: str, filename: str) -> CodeType:
        if len(source) > _MAX_PYTHON:
            raise NotQuick
        return super()._compile(source, filename)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        kind = type(__obj)
        charge(1)
        if kind is BuiltinMethodType:
            kwargs.pop("_loop_vars", None)  # for functions that read Jinja's context
            kwargs.pop("_block_vars", None)
            receiver = __obj.__self__
            method = METHODS.get(type(receiver), {}).get(__obj.__name__)
            if method is None:
                raise NotQuick
            return method(receiver, *args, **kwargs)
        if kind is FunctionType and __obj.__name__ == "format":
            _charge_format(__obj.__wrapped__.__self__, [*args, *map(kwargs.get, kwargs.keys() - _CONTEXT)])
        elif kind in (HostFunction, MakeDict) or __obj is Namespace or __obj == _MAKE_DICT.fromkeys:
            charge_weight([*args])
        elif kind not in _CALLABLE and __obj not in _FUNCTIONS:
            raise NotQuick
        return super().call(__context, __obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Reads an attribute; faster than Jinja for what templates read most."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if kind in _OF_JINJA and not attribute.startswith("_"):  # no other attribute of these is unsafe
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


_CONTEXT = {"_loop_vars", "_block_vars"}
_OF_JINJA = (jinja2.runtime.LoopContext, Namespace)
_DICT_ATTRIBUTES = frozenset(dir(dict))
_CALLABLE = (jinja2.runtime.Macro, Missing, jinja2.Undefined)


def _charge_format(text: str, values: list[Any]) -> None:
    """Charges `text.format(...)`, without widths and conversions."""
    if ":" in text or "!" in text:
        raise NotQuick
    for _ in range(text.count("{") + 1):
        charge_weight(text, values)


def _raise_metered(message: Any) -> NoReturn:
    raise_exception(to_text(message))


def _strftime_metered(pattern: str) -> str:
    charge(len(pattern) * 16)
    return strftime_now(pattern)


_FUNCTIONS = (_raise_metered, _strftime_metered, jinja2.sandbox.safe_range)


def _metered_sandbox() -> _MeteredSandbox:
    environment = make_sandbox(_MeteredSandbox, finalize=write, optimized=False)
    environment.filters = FILTERS | OPERATORS
    environment.tests = dict(TESTS)
    environment.globals |= {"raise_exception": _raise_metered, "strftime_now": _strftime_metered, "dict": _MAKE_DICT}
    return environment


_ENVIRONMENT = _metered_sandbox()
