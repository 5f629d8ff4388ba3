"""The Jinja sandbox of chat templates, with the helpers that templates on the Hugging Face hub expect."""

from __future__ import annotations

import datetime
import io
import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

MAX_CHARACTERS = 1 << 25
"""Maximum characters that a template may write: more than any context holds."""
_MAX_EXPONENT = 1024


def render_template(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Returns the text that the template writes. A template is a program: this may raise anything, and has no time
    limit. Of single expressions that make a huge text, only products are refused. The sandbox limits `range`."""
    text = io.StringIO()
    for piece in template.generate(variables):
        text.write(piece)
        if text.tell() > MAX_CHARACTERS:
            raise jinja2.TemplateError(f"stopped: its output exceeds {MAX_CHARACTERS} characters")
    return text.getvalue()


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the text that a model is trained on. Here it is a block without effect."""

    tags = {"generation"}  # noqa: RUF012 (as declared in Jinja)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, which refuses names that start with an underscore, such as Python's special attributes."""

    def __init__(*args: Any, **names: Any) -> None:  # as in Jinja: a name may be `self`
        self, *given = args
        attributes = dict(*given, **names)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class MakeDict:
    """`dict` in a template: makes dictionaries without exposing the type."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes for HTML."""
    if indent is None and separators is None and not sort_keys:
        return _ENCODERS[bool(ensure_ascii)].encode(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_to_list
    )


def _to_list(value: Any) -> list[Any]:
    """What Jinja's `map` makes; anything else is refused as by `json`."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


_ENCODERS = [json.JSONEncoder(ensure_ascii=ascii_only, default=_to_list) for ascii_only in (False, True)]


def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def default_variables(tools: list[dict[str, Any]] | None, *, reasons: bool) -> dict[str, Any]:
    """llama-server's variables in addition to the conversation and special tokens, for requests that do not set them.

    `reasons`: whether the model is known to reason. The reasoning of earlier turns is kept in the prompt, for which
    several templates have their own variables.
    """
    now = datetime.datetime.now()
    return {
        "enable_thinking": reasons,
        "preserve_thinking": True,
        "clear_thinking": False,
        "truncate_history_thinking": False,
        "drop_thinking": False,
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y"),
        "functions": tojson(tools, indent=2) if tools else "",
        "documents": None,
    }


class HostFunction:
    """A function of this program that a template may call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


class GivenList(list[Any]):
    """A list of the request, which a template cannot change."""


class Missing(jinja2.Undefined):
    """A missing attribute of a tool or message. Command-R+ concatenates it with texts, and reads its attributes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._undefined_obj is jinja2.utils.missing:  # a variable that does not exist
            return super().__getattr__(name)
        return self

    def __getitem__(self, name: Any) -> Any:
        return self.__getattr__(name if isinstance(name, str) else "item")

    def __add__(self, other: Any) -> Any:
        if self._undefined_obj is jinja2.utils.missing:
            return super().__add__(other)
        return other

    __radd__ = __add__


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Kimi's templates keep the ids of calls in a list of their own."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Computes a binary operator, but refuses huge results: no other thread runs while Python computes them."""
        if operator == "*":
            is_huge = _repeats(left, right) > MAX_CHARACTERS
        else:
            is_huge = isinstance(right, int) and right > _MAX_EXPONENT
        if is_huge:
            raise jinja2.TemplateError(f"stopped: the result of {operator!r} is too large")
        return super().call_binop(context, operator, left, right)

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raises without the template's lines in the traceback: they take a second after a deep recursion."""
        if source is None:
            raise  # noqa: PLE0704 (called while an exception is handled)
        super().handle_exception(source)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether templates may read this attribute: also `append` and `pop` of lists."""
        if type(obj) is list and attr in ("append", "pop"):
            return True
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Returns an undefined value: unsafe attributes cannot be read further."""
        message = f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe."
        return jinja2.Undefined(message, obj=obj, name=attribute, exc=jinja2.exceptions.SecurityError)


def _repeats(left: Any, right: Any) -> int:
    """The length of a text or list times a number; 0 for a product of numbers."""
    items, n = (right, left) if isinstance(left, int) else (left, right)
    return len(items) * n if isinstance(items, (str, bytes, list, tuple)) and isinstance(n, int) else 0


AnySandbox = TypeVar("AnySandbox", bound=Sandbox)


def make_sandbox(kind: type[AnySandbox], **options: Any) -> AnySandbox:
    """An environment with the helpers of templates. `options`: Jinja's."""
    environment = kind(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        undefined=Missing,
        **options,
    )
    environment.filters |= {"tojson": tojson, "safe": str}  # nothing is escaped, so nothing is marked as safe
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "namespace": Namespace,
        "dict": MakeDict(),
    }
    return environment
