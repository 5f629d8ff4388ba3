"""Reads a form with a file, which goes to the disk as it comes."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import BinaryIO

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from cppbatch.errors import InvalidRequest
from cppbatch.jobs.outputs import storage_error
from cppbatch.server.files.schemas import ExpiresAfter, Upload, UploadPurpose
from cppbatch.server.parse import convert

_CHUNK = 1 << 18
_LONGEST_FIELD = 1024
_LONGEST_NAME = 255
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("purpose", _ANCHOR, _SECONDS)


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A form that was read."""

    filename: str
    n_bytes: int
    purpose: UploadPurpose
    life: int | None
    """Seconds for which the file is kept; None: for ever."""


async def receive(request: web.Request, path: Path, most_mb: int) -> Received:
    """Reads the whole body; the file is in `path` then, though not yet for good.

    Raises `InvalidRequest` naming the field, `StorageError`, and what aiohttp raises for bodies that are too large.
    """
    if request.content_type != "multipart/form-data":
        raise InvalidRequest("body", f"is {request.content_type}; a file comes as multipart/form-data")
    if request.content_length is not None and request.content_length > (most_mb << 20) + _CHUNK:
        raise _too_large(most_mb, request.content_length)
    fields: dict[str, str] = {}
    filename, n_bytes = None, 0
    try:
        form = await request.multipart()
        while (part := await form.next()) is not None:
            if not isinstance(part, BodyPartReader):
                raise InvalidRequest("body", "has a form within the form")
            if part.name == "file":
                if filename is not None:
                    raise InvalidRequest("file", "is there twice; send one file at a time")
                filename = _clean(part.filename or "file")
                n_bytes = await _write_part(part, path, most_mb)
            else:
                text = await _read_field(part)
                if part.name in _FIELDS:
                    fields[part.name] = text
                    _check(fields)
    except (ValueError, AssertionError, HttpProcessingError, web.RequestPayloadError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest("body", f"is no form that can be read to its end: {_reason(error)}") from error
    if filename is None:
        raise InvalidRequest("file", "is required")
    upload = convert(fields, Upload)
    return Received(filename=filename, n_bytes=n_bytes, purpose=upload.purpose, life=_life(fields))


def _check(fields: dict[str, str]) -> None:
    """As soon as may be: a file of a gigabyte need not come first."""
    if "purpose" in fields:
        convert(fields, Upload)
    if _ANCHOR in fields and _SECONDS in fields:
        _life(fields)


def _life(fields: dict[str, str]) -> int | None:
    given = {name: fields[key] for name, key in (("anchor", _ANCHOR), ("seconds", _SECONDS)) if key in fields}
    return convert(given, ExpiresAfter, "expires_after", from_text=True).seconds if given else None


async def _write_part(part: BodyPartReader, path: Path, most_mb: int) -> int:
    n_bytes = 0
    file = await asyncio.to_thread(_opened, path)
    try:
        while not part.at_eof():
            chunk = await part.read_chunk(_CHUNK)
            n_bytes += len(chunk)
            if n_bytes > most_mb << 20:
                raise _too_large(most_mb, n_bytes)
            await asyncio.to_thread(_write, file, path, chunk)
    finally:
        with contextlib.suppress(OSError):  # each chunk was flushed, or has failed
            file.close()
    return n_bytes


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise storage_error(path, error) from error


def _write(file: BinaryIO, path: Path, data: bytes) -> None:
    try:
        file.write(data)
        file.flush()
    except OSError as error:
        raise storage_error(path, error) from error


async def _read_field(part: BodyPartReader) -> str:
    data = bytearray()
    while not part.at_eof():
        data += await part.read_chunk(_LONGEST_FIELD)
        if len(data) > _LONGEST_FIELD:
            raise InvalidRequest(_clean(part.name or "body"), f"is longer than {_LONGEST_FIELD} bytes")
    return data.decode(errors="replace")


def _clean(name: str) -> str:
    return name.encode(errors="replace").decode()[:_LONGEST_NAME]


def _too_large(most_mb: int, n_bytes: int) -> web.HTTPRequestEntityTooLarge:
    text = f"the file is larger than {most_mb} MiB, the most that this server takes (--max-file-mb)"
    return web.HTTPRequestEntityTooLarge(most_mb << 20, n_bytes, text=text)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:200]
