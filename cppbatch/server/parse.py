"""Request bodies: from JSON to typed structs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from typing import TypeVar

import msgspec
from aiohttp import web

from cppbatch.errors import InvalidRequest
from cppbatch.json_bounds import excess
from cppbatch.server.unknown_fields import IGNORED, refuse_unknown
from cppbatch.typed_json import invalid_field

Body = TypeVar("Body", bound=msgspec.Struct)
Parsed = TypeVar("Parsed")

_LARGE = 1 << 18  # bytes; larger bodies are parsed on another thread


async def read_json(request: web.Request, kind: type[Body]) -> Body:
    """A request's body as a struct. A large body is parsed on another thread, so that other requests need not wait.

    Fields that the struct does not have are refused or reported (`unknown_fields`). Raises `InvalidRequest` naming the
    field at fault.
    """
    body = await request.read()
    read = asyncio.to_thread(_read, body, kind) if len(body) > _LARGE else None
    struct, request[IGNORED] = await read if read else _read(body, kind)
    return struct


def _read(body: bytes, kind: type[Body]) -> tuple[Body, tuple[str, ...]]:
    """The struct, and the names of the fields that have no effect."""
    struct = parse(body, kind)
    try:  # the names and values of unknown fields are decoded here only
        return struct, refuse_unknown(msgspec.json.decode(body, type=dict[str, msgspec.Raw]), kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(body, error) from error


def parse(body: bytes, kind: type[Parsed]) -> Parsed:
    """Parses JSON. Raises `InvalidRequest` naming the field at fault, also for JSON that is too deep or has too many
    values (`json_bounds`)."""
    if too_much := excess(body):
        raise InvalidRequest("body", too_much)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(body, error) from error


def _not_json(body: bytes, error: Exception) -> InvalidRequest:
    """Names the field that is NaN or Infinity, which Python's json writes although JSON has neither."""
    with contextlib.suppress(ValueError):  # not JSON in other ways too
        fields = json.loads(body) if len(body) <= _LARGE else None
        for name, value in fields.items() if isinstance(fields, dict) else ():
            if isinstance(value, float) and not math.isfinite(value):
                return InvalidRequest(name, f"is {value}; it must be a finite number")
    return InvalidRequest("body", f"is not valid JSON: {error}")
