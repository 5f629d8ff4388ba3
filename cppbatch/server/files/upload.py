"""Reads a form with a file, which goes to the disk as it comes."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import BinaryIO

import msgspec
from aiohttp import hdrs, web
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from cppbatch.errors import InvalidRequest
from cppbatch.jobs.durable_files import storage_error
from cppbatch.server.files.schemas import ExpiresAfter, Upload, UploadPurpose
from cppbatch.server.parse import convert

_MOST_PARTS, _MOST_HEADERS, _LONGEST_HEADER = 16, 8, 4096
_LARGEST_REST = 1 << 18  # bytes of a body beside the file itself
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
    if request.content_length is not None and request.content_length > (most_mb << 20) + _LARGEST_REST:
        raise _too_large(most_mb, request.content_length)
    form = _Form(path, most_mb)
    try:
        boundary = parse_options_header(request.headers[hdrs.CONTENT_TYPE])[1].get("boundary", "")
        parser = PushMultipartParser(
            boundary,
            max_segment_count=_MOST_PARTS,
            max_header_count=_MOST_HEADERS,
            max_header_size=_LONGEST_HEADER,
        )
        n_read = 0
        while data := await request.content.readany():
            n_read += len(data)
            if n_read > (most_mb << 20) + _LARGEST_REST:
                raise _too_large(most_mb, n_read)
            for event in parser.parse(data):
                await form.take(event)
            await asyncio.sleep(0)  # reading does not wait as long as something has come already
        parser.close()
    except (MultipartError, web.RequestPayloadError) as error:
        raise InvalidRequest("body", f"is no form that can be read to its end: {_reason(error)}") from error
    finally:
        form.close()
    return form.received()


class _Form:
    """What has come of a form: a file on the disk, and its fields."""

    def __init__(self, path: Path, most_mb: int) -> None:
        self._path, self._most_mb = path, most_mb
        self._fields: dict[str, str] = {}
        self._filename: str | None = None
        self._n_bytes = 0
        self._file: BinaryIO | None = None  # while its part comes
        self._name, self._value = "", bytearray()  # of the field whose part comes

    async def take(self, event: MultipartSegment | bytes | bytearray | None) -> None:
        """A part begins, goes on, or ends. Raises as `receive` does."""
        if isinstance(event, MultipartSegment):
            await self._begin(event)
        elif event is not None:
            await self._add(event)
        elif self._file:
            self.close()
        elif self._name in _FIELDS:
            self._fields[self._name] = self._value.decode(errors="replace")
            _check(self._fields)

    async def _begin(self, part: MultipartSegment) -> None:
        self._name, self._value = _clean(part.name or ""), bytearray()
        if self._name == "file":
            if self._filename is not None:
                raise InvalidRequest("file", "is there twice; send one file at a time")
            self._filename = _clean(part.filename or "file")
            self._file = await asyncio.to_thread(_opened, self._path)

    async def _add(self, data: bytes | bytearray) -> None:
        if self._file:
            self._n_bytes += len(data)
            if self._n_bytes > self._most_mb << 20:
                raise _too_large(self._most_mb, self._n_bytes)
            await asyncio.to_thread(_write, self._file, self._path, data)
        else:
            self._value += data
            if len(self._value) > _LONGEST_FIELD:
                raise InvalidRequest(self._name or "body", f"is longer than {_LONGEST_FIELD} bytes")

    def close(self) -> None:
        """Nothing more of the file comes."""
        if self._file:
            with contextlib.suppress(OSError):  # each chunk was flushed, or has failed
                self._file.close()
            self._file = None

    def received(self) -> Received:
        """The whole form. Raises `InvalidRequest` for fields that are missing."""
        if self._filename is None:
            raise InvalidRequest("file", "is required")
        upload = convert(self._fields, Upload)
        return Received(
            filename=self._filename, n_bytes=self._n_bytes, purpose=upload.purpose, life=_life(self._fields)
        )


def _check(fields: dict[str, str]) -> None:
    """As soon as may be: a file of a gigabyte need not come first."""
    if "purpose" in fields:
        convert(fields, Upload)
    if _ANCHOR in fields and _SECONDS in fields:
        _life(fields)


def _life(fields: dict[str, str]) -> int | None:
    given = {name: fields[key] for name, key in (("anchor", _ANCHOR), ("seconds", _SECONDS)) if key in fields}
    return convert(given, ExpiresAfter, "expires_after", from_text=True).seconds if given else None


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise storage_error(path, error) from error


def _write(file: BinaryIO, path: Path, data: bytes | bytearray) -> None:
    try:
        file.write(data)
        file.flush()
    except OSError as error:
        raise storage_error(path, error) from error


def _clean(name: str) -> str:
    return name.encode(errors="replace").decode()[:_LONGEST_NAME]


def _too_large(most_mb: int, n_bytes: int) -> web.HTTPRequestEntityTooLarge:
    text = f"the file is larger than {most_mb} MiB, the most that this server takes (--max-file-mb)"
    return web.HTTPRequestEntityTooLarge(most_mb << 20, n_bytes, text=text)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:200]
