"""Prompts made of the columns of a table: `Classify: {text}`."""

from __future__ import annotations

import string
from collections.abc import Mapping

import msgspec

from cppbatch.errors import ConfigError


class MissingField(Exception):
    """A row has no value for a field of the template."""


class PromptTemplate:
    """A text with the names of columns in braces; `{{` and `}}` are braces. Raises `ConfigError` for anything else."""

    def __init__(self, source: str) -> None:
        try:
            self._parts = list(string.Formatter().parse(source))
        except ValueError as error:
            raise _invalid(source, str(error)) from None
        for _, name, spec, conversion in self._parts:
            if name == "":
                raise _invalid(source, "{} does not name a column")
            if spec or conversion:
                raise _invalid(source, f"{{{name}}} has a format specification, which is not supported")
        self.fields = tuple(dict.fromkeys(name for _, name, _, _ in self._parts if name is not None))
        """The columns that it names, in their order."""
        if not self.fields:
            raise _invalid(source, "it does not name a column")

    def render(self, values: Mapping[str, object]) -> str:
        """The prompt of a row. Raises `MissingField`."""
        return "".join(
            literal + ("" if name is None else self._text(name, values)) for literal, name, _, _ in self._parts
        )

    def _text(self, name: str, values: Mapping[str, object]) -> str:
        if (value := values.get(name)) is None:
            have = ", ".join(repr(column)[:40] for column in list(values)[:8])
            problem = "is null" if name in values else f"does not exist; available: {have}"
            raise MissingField(f"{name!r} {problem}")
        return field_text(value)


def field_text(value: object) -> str:
    """A value of a table as text: strings as they are, null as nothing, all others as JSON, or as Python shows them."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode().strip('"')
    except (TypeError, ValueError, OverflowError):
        return str(value)


def _invalid(source: str, problem: str) -> ConfigError:
    return ConfigError(
        f"--template is {source!r:.200}: {problem}. Write column names in braces, like {{text}}, and double all other "
        "braces"
    )
