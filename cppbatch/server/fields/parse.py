"""Request bodies: from JSON to typed structs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from cppbatch.errors import InvalidRequest
from cppbatch.json_bounds import excess
from cppbatch.server.fields.unknown import IGNORED, refuse_unknown, with_unknown
from cppbatch.typed_json import invalid_field

Body = TypeVar("Body", bound=msgspec.Struct)
Parsed = TypeVar("Parsed")

_LARGE = 1 << 18  # bytes; larger bodies are parsed on another thread


async def read_json(request: web.Request, kind: type[Body]) -> Body:
    """A request's body as a struct. A large body is parsed on another thread, so that other requests do not wait.

    Unknown fields are refused or reported (`refuse_unknown`). Raises `InvalidRequest` naming the invalid field.
    """
    body = await request.read()
    read = asyncio.to_thread(read_body, body, kind) if len(body) > _LARGE else None
    struct, request[IGNORED] = await read if read else read_body(body, kind)
    return struct


def read_body(body: bytes, kind: type[Body]) -> tuple[Body, tuple[str, ...]]:
    """The struct, and the names of the fields that have no effect. Raises `InvalidRequest` as `read_json`."""
    _check_bounds(body)
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(body, type=_without_unknown(kind)), ()
    try:  # it has unknown fields, or is invalid
        struct = _decode(body, kind)
    except InvalidRequest as error:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            if better := with_unknown(error, _raw_fields(body), kind):
                raise better from error
        raise
    try:  # names and values of unknown fields are only decoded here
        return struct, refuse_unknown(_raw_fields(body), kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(body, error) from error


@functools.cache
def _without_unknown(kind: type[Body]) -> type[Body]:
    """The type for bodies in which every field is known."""
    made: Any = msgspec.defstruct(kind.__name__, [], bases=(kind,), module=__name__, forbid_unknown_fields=True)
    return made  # type: ignore[no-any-return]


def _raw_fields(body: bytes) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(body, type=dict[str, msgspec.Raw])


def parse(body: bytes, kind: type[Parsed]) -> Parsed:
    """Parses JSON. Raises `InvalidRequest` naming the invalid field, also for JSON that is too deep or has too many
    values (`json_bounds`)."""
    _check_bounds(body)
    return _decode(body, kind)


def _check_bounds(body: bytes) -> None:
    if too_much := excess(body):
        raise InvalidRequest("body", too_much)


def _decode(body: bytes, kind: type[Parsed]) -> Parsed:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(body, error) from error


def _not_json(body: bytes, error: Exception) -> InvalidRequest:
    """Names the value that Python's json reads and writes, although it is not valid JSON."""
    with contextlib.suppress(ValueError):  # otherwise invalid JSON
        if len(body) <= _LARGE and (invalid := _invalid_value(json.loads(body))):
            return invalid
    return InvalidRequest("body", f"is not valid JSON: {error}")


_SURROGATE = re.compile("[\ud800-\udfff]")


def _invalid_value(body: Any) -> InvalidRequest | None:
    """The error for the first NaN, Infinity, or text with half of a surrogate pair."""
    halved = "contains an unpaired surrogate, as when a text is cut within an emoji; cut it between characters"
    waiting: list[tuple[str, Any]] = [("", body)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            if any(map(_SURROGATE.search, value)):
                return InvalidRequest(path or "body", f"has a name that {halved}")
            inner = [(f"{path}.{name}" if path else name, each) for name, each in value.items()]
            waiting += reversed(inner)
        elif isinstance(value, list):
            waiting += reversed([(f"{path}[{i}]", each) for i, each in enumerate(value)])
        elif isinstance(value, str) and _SURROGATE.search(value):
            return InvalidRequest(path, halved)
        elif isinstance(value, float) and not math.isfinite(value):
            return InvalidRequest(path, f"is {value}; it must be a finite number")
    return None
