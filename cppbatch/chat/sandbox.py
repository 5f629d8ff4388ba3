"""The Jinja of chat templates: a sandbox, with what the templates of the Hugging Face hub expect to find in it."""

from __future__ import annotations

import datetime
import io
import json
import time
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from cppbatch.errors import ConfigError

LONGEST_TEXT = 1 << 25
"""Characters that a template may write: more than any context holds."""
LONGEST_RUN = 5.0
"""Seconds that a template may write them in. 20 messages take less than a hundredth of one."""


def compile_template(source: str) -> jinja2.Template:
    """Raises `ConfigError` for what is not a Jinja template."""
    try:
        return _ENVIRONMENT.from_string(source)
    except Exception as error:  # what Jinja lets through, Python may still refuse to compile
        raise ConfigError(f"the chat template is broken: {error}") from error


def run(template: jinja2.Template, variables: dict[str, Any], *, seconds: float = LONGEST_RUN) -> str:
    """What the template writes. It is a program, so this raises anything.

    Limits are looked at between the pieces that it writes, so they stop a loop that writes for ever, but neither one
    that writes nothing nor a single huge expression; `range` is limited by the sandbox.
    """
    text, deadline = io.StringIO(), time.monotonic() + seconds
    for piece in template.generate(variables):
        text.write(piece)
        if text.tell() > LONGEST_TEXT:
            raise jinja2.TemplateError(f"stopped: it writes more than {LONGEST_TEXT} characters")
        if time.monotonic() > deadline:
            raise jinja2.TemplateError(f"stopped: it writes for more than {seconds:g} seconds")
    return text.getvalue()


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model is trained on. Here it is only a block."""

    tags = {"generation"}  # noqa: RUF012 (so it is declared in Jinja)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, but names with an underscore in front, behind which Python keeps its own things, cannot be set."""

    def __init__(*args: Any, **names: Any) -> None:  # as Jinja's: `self` may be one of the names
        self, *given = args
        attributes = dict(*given, **names)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict` in a template: what it makes, not the type itself."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
        "dict": _Dict(),
    }
    return environment


_ENVIRONMENT = _environment()
