"""Decoded JSON and TOML as typed structs, and errors that name the invalid field."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from cppbatch.errors import InvalidRequest

Kind = TypeVar("Kind")


def convert(value: Any, kind: type[Kind], field: str = "", *, from_text: bool = False) -> Kind:
    """Decoded JSON as a struct. Raises `InvalidRequest` naming the invalid field (within `field`).

    `from_text`: the value is from a query string or a form, where numbers are strings.
    """
    try:
        return msgspec.convert(value, kind, strict=not from_text)
    except msgspec.ValidationError as error:
        invalid = invalid_field(error)
        inner = "" if invalid.field == "body" else invalid.field
        dot = "" if not field or not inner or inner.startswith("[") else "."
        raise InvalidRequest(f"{field}{dot}{inner}" or "body", invalid.message) from error


_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}


def encode_line(value: Any) -> bytes:
    """JSON without any character that may end a line, for streams and files that are read line by line.

    `str.splitlines` and httpx's `iter_lines` also split at U+0085, U+2028 and U+2029, which JSON allows in strings.
    """
    encoded = msgspec.json.encode(value)
    for end, escaped in _LINE_ENDS.items():
        if end in encoded:
            encoded = encoded.replace(end, escaped)
    return encoded


def decode_toml(text: str | bytes, kind: type[Kind]) -> Kind:
    """Raises `msgspec.DecodeError`, also for nesting too deep for Python's parser."""
    try:
        return msgspec.toml.decode(text, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("its tables or lists are nested too deeply") from None


def invalid_field(error: msgspec.ValidationError) -> InvalidRequest:
    """The error for msgspec's "Expected `float`, got `str` - at `$.temperature`", with the field separated."""
    message, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").removeprefix(".")
    if not field and (missing := re.search(r"missing required field `(\w+)`", message)):
        return InvalidRequest(missing[1], "is required")
    return InvalidRequest(field or "body", message[:1].lower() + message[1:])
