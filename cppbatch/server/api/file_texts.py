"""`POST /file-texts`: the texts of a PDF, or of the files in a zip file, as the web page attaches and sends them."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
from aiohttp import web

from cppbatch.errors import ConfigError, InvalidRequest, UnreadableFile
from cppbatch.jobs.input.files import FileSet, Skipped, file_text, find_files
from cppbatch.pdf_text import PDF_HEADER, pdf_text
from cppbatch.server.fields.documents import on_document_thread
from cppbatch.server.fields.parse import read_json
from cppbatch.server.http.api_errors import json_response
from cppbatch.server.http.endpoint import Routes

routes = Routes()

_MAX_CHARACTERS = 64 << 20
"""The limit for all texts of a response together."""


class FileTextsRequest(msgspec.Struct):
    """The body of `POST /file-texts`."""

    name: str
    """The name of the file; that of a zip file ends in `.zip`."""
    data: bytes
    """The file in base64."""


class FileText(msgspec.Struct, frozen=True, kw_only=True):
    """A file and its text."""

    file: str
    """The name; in a zip file with its folders."""
    text: str


class SkippedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file without a text."""

    file: str
    reason: str
    """Why: the predicate of a sentence about the file, or a word such as `hidden`."""


class FileTexts(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /file-texts`."""

    files: list[FileText]
    skipped: list[SkippedFile]


@routes.post("/file-texts", FileTexts, FileTextsRequest, (400, 401, 413, 415, 429, 503))
async def file_texts(request: web.Request) -> web.Response:
    """Read the text of a PDF, or of each file in a zip file.

    Needs pypdf for PDFs. A file that cannot be read is among the skipped ones, with the reason.
    """
    body = await read_json(request, FileTextsRequest)
    return json_response(await on_document_thread(_read, body))


def _read(body: FileTextsRequest) -> FileTexts:
    """Raises `InvalidRequest` for another type of file, and for more text than a response holds."""
    try:
        if body.data.startswith(PDF_HEADER):
            return FileTexts(files=[FileText(file=body.name, text=pdf_text(body.data))], skipped=[])
        if body.name.lower().endswith(".zip"):
            return _read_zip(body)
    except UnreadableFile as error:
        reason = str(error)
    except ConfigError as error:  # without pypdf, or of the zip file as a whole
        reason = f"cannot be read: {str(error).removeprefix(f'{Path(body.name)}: ')}"
    else:
        raise InvalidRequest("data", "is neither a PDF nor a zip file")
    return FileTexts(files=[], skipped=[SkippedFile(file=body.name, reason=reason)])


def _read_zip(body: FileTextsRequest) -> FileTexts:
    archive, found, size = FileSet(Path(body.name), io.BytesIO(body.data)), [], 0
    names, skipped = find_files(archive)
    for name in names:
        try:
            text, _ = file_text(archive, name)
        except UnreadableFile as error:
            skipped.append(Skipped(name, str(error)))
            continue
        size += len(text)
        if size > _MAX_CHARACTERS:
            limit = f"{_MAX_CHARACTERS >> 20} Mi characters"
            raise InvalidRequest("data", f"has more than {limit} of text; send its files in parts")
        found.append(FileText(file=name, text=text))
    return FileTexts(files=found, skipped=[SkippedFile(file=each.name, reason=each.reason) for each in skipped])
