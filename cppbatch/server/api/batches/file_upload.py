"""Receives a multipart form with a file, and writes the file to disk as it arrives."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, get_args

import msgspec
from aiohttp import hdrs, web
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from cppbatch.errors import InvalidRequest
from cppbatch.jobs.durable_files import storage_error
from cppbatch.typed_json import convert

UploadPurpose = Literal["batch", "assistants", "fine-tune", "vision", "user_data", "evals"]

_MIN_LIFETIME_S, _MAX_LIFETIME_S = 3600, 2592000
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("purpose", _ANCHOR, _SECONDS)

_MAX_PARTS, _MAX_HEADERS, _MAX_HEADER_BYTES = 16, 8, 4096
_MAX_OTHER_BYTES = 1 << 18  # of the body, besides the file
_MAX_FIELD_BYTES = 1024
_MAX_NAME_LENGTH = 255


class ExpiresAfter(msgspec.Struct, frozen=True, kw_only=True):
    """How long a file is kept."""

    anchor: Literal["created_at"]
    """The event from which the time counts."""
    seconds: Annotated[int, msgspec.Meta(ge=_MIN_LIFETIME_S, le=_MAX_LIFETIME_S)]


class UploadFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the form, except the file and `expires_after`."""

    purpose: UploadPurpose
    """Only files with purpose `batch` can be used, as batch inputs."""


BINARY = {"type": "string", "format": "binary"}
UPLOAD_FORM = {
    "type": "object",
    "properties": {
        "file": BINARY,
        "purpose": {"type": "string", "enum": list(get_args(UploadPurpose))},
        _ANCHOR: {"type": "string", "enum": ["created_at"]},
        _SECONDS: {"type": "integer", "minimum": _MIN_LIFETIME_S, "maximum": _MAX_LIFETIME_S},
    },
    "required": ["file", "purpose"],
}
"""The schema of the form."""


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """A received form."""

    filename: str
    n_bytes: int
    sha256: str
    """The file's hash, in hexadecimal."""
    purpose: UploadPurpose
    lifetime_s: int | None
    """Seconds until the file is deleted; None: never."""


async def receive_upload(request: web.Request, path: Path, max_mb: int) -> Upload:
    """Reads the body and writes the file to `path`, without fsync.

    Raises `InvalidRequest` naming the field, `StorageError`, and aiohttp's exceptions for oversized bodies.
    """
    if request.content_type != "multipart/form-data":
        raise InvalidRequest("body", f"is {request.content_type}; send the file as multipart/form-data")
    if request.content_length is not None and request.content_length > (max_mb << 20) + _MAX_OTHER_BYTES:
        raise _too_large(max_mb, request.content_length)
    form = _FormReceiver(path, max_mb)
    try:
        boundary = parse_options_header(request.headers[hdrs.CONTENT_TYPE])[1].get("boundary", "")
        parser = PushMultipartParser(
            boundary,
            max_segment_count=_MAX_PARTS,
            max_header_count=_MAX_HEADERS,
            max_header_size=_MAX_HEADER_BYTES,
        )
        n_read = 0
        while data := await request.content.readany():
            n_read += len(data)
            if n_read > (max_mb << 20) + _MAX_OTHER_BYTES:
                raise _too_large(max_mb, n_read)
            for event in parser.parse(data):
                await form.handle(event)
            await asyncio.sleep(0)  # readany does not yield to other tasks while data is buffered
        parser.close()
    except (MultipartError, UnicodeEncodeError, web.RequestPayloadError) as error:  # a boundary may be any bytes
        raise InvalidRequest("body", f"is not a complete multipart form: {_reason(error)}") from error
    finally:
        form.close()
    return form.upload()


class _FormReceiver:
    """Collects the fields of a form and writes its file."""

    def __init__(self, path: Path, max_mb: int) -> None:
        self._path, self._max_mb = path, max_mb
        self._fields: dict[str, str] = {}
        self._filename: str | None = None
        self._n_bytes = 0
        self._sha256 = hashlib.sha256()
        self._file: BinaryIO | None = None  # open while the file's part is received
        self._name, self._value = "", bytearray()  # of the field that is being received

    async def handle(self, event: MultipartSegment | bytes | bytearray | None) -> None:
        """Handles the start of a part, its data, or its end (None). Raises as `receive_upload` does."""
        if isinstance(event, MultipartSegment):
            await self._begin_part(event)
        elif event is not None:
            await self._add_data(event)
        elif self._file:
            self.close()
        elif self._name in _FIELDS:
            self._fields[self._name] = self._value.decode(errors="replace")
            _check_fields(self._fields)

    async def _begin_part(self, part: MultipartSegment) -> None:
        self._name, self._value = _clean_name(part.name or ""), bytearray()
        if self._name == "file":
            if self._filename is not None:
                raise InvalidRequest("file", "occurs twice; send one file per request")
            self._filename = _clean_name(part.filename or "file")
            self._file = await asyncio.to_thread(_open_for_writing, self._path)

    async def _add_data(self, data: bytes | bytearray) -> None:
        if self._file:
            self._n_bytes += len(data)
            if self._n_bytes > self._max_mb << 20:
                raise _too_large(self._max_mb, self._n_bytes)
            await asyncio.to_thread(self._write, self._file, data)
        else:
            self._value += data
            if len(self._value) > _MAX_FIELD_BYTES:
                raise InvalidRequest(self._name or "body", f"is longer than {_MAX_FIELD_BYTES} bytes")

    def _write(self, file: BinaryIO, data: bytes | bytearray) -> None:
        self._sha256.update(data)
        try:
            file.write(data)
            file.flush()
        except OSError as error:
            raise storage_error(self._path, error) from error

    def close(self) -> None:
        """Closes the file."""
        if self._file:
            with contextlib.suppress(OSError):  # each write was flushed, so errors were already raised
                self._file.close()
            self._file = None

    def upload(self) -> Upload:
        """The complete form. Raises `InvalidRequest` for missing fields."""
        if self._filename is None:
            raise InvalidRequest("file", "is required")
        fields = convert(self._fields, UploadFields)
        return Upload(
            filename=self._filename,
            n_bytes=self._n_bytes,
            sha256=self._sha256.hexdigest(),
            purpose=fields.purpose,
            lifetime_s=_lifetime_s(self._fields),
        )


def _check_fields(fields: dict[str, str]) -> None:
    """Raises `InvalidRequest` as soon as a field is wrong, possibly before a large file is received."""
    if "purpose" in fields:
        convert(fields, UploadFields)
    if _ANCHOR in fields and _SECONDS in fields:
        _lifetime_s(fields)


def _lifetime_s(fields: dict[str, str]) -> int | None:
    given = {name: fields[key] for name, key in (("anchor", _ANCHOR), ("seconds", _SECONDS)) if key in fields}
    return convert(given, ExpiresAfter, "expires_after", from_text=True).seconds if given else None


def _open_for_writing(path: Path) -> BinaryIO:
    try:
        return open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))
    except OSError as error:
        raise storage_error(path, error) from error


def _clean_name(name: str) -> str:
    return name.encode(errors="replace").decode()[:_MAX_NAME_LENGTH]


def _too_large(max_mb: int, n_bytes: int) -> web.HTTPRequestEntityTooLarge:
    text = f"the file exceeds {max_mb} MiB, the limit of this server (--max-file-mb)"
    return web.HTTPRequestEntityTooLarge(max_mb << 20, n_bytes, text=text)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:200]
