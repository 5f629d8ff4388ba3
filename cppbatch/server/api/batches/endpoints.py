"""`/v1/files` and `/v1/batches`, as in OpenAI's API."""

from __future__ import annotations

import asyncio
import io
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec
from aiohttp import hdrs, web

from cppbatch.errors import NotFound
from cppbatch.jobs.batches.manager import new_file_id
from cppbatch.jobs.batches.records import Batch, File
from cppbatch.jobs.batches.store import BatchStore, Page
from cppbatch.server.api.batches.file_upload import BINARY, UPLOAD_FORM, ExpiresAfter, receive_upload
from cppbatch.server.auth.keys import KEY, viewer_of
from cppbatch.server.fields.parse import read_json
from cppbatch.server.http.api_errors import json_response
from cppbatch.server.http.connections import reading
from cppbatch.server.http.endpoint import Routes
from cppbatch.server.models.served import MODELS
from cppbatch.server.storage import batches_of
from cppbatch.typed_json import convert

routes = Routes()


class FileQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query string of `GET /v1/files`."""

    after: str = ""
    """The id of the last file of the previous page."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=10000)] = 10000
    order: Literal["asc", "desc"] = "desc"
    """By creation time."""
    purpose: str = ""
    """Only list files with this purpose; empty: all."""

    @property
    def page(self) -> Page:
        """The page for `BatchStore`."""
        return Page(after=self.after or None, limit=self.limit, newest_first=self.order == "desc")


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/files`: a page of files."""

    object: Literal["list"] = "list"
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """`DELETE /v1/files/{id}`."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


@routes.post("/v1/files", File, None, (400, 401, 403, 413, 429, 503, 507), form=UPLOAD_FORM)
async def upload_file(request: web.Request) -> web.Response:
    """Upload a file.

    The file is stored durably before this responds. An incomplete upload is discarded.
    """
    data = batches_of(request).data
    file_id = new_file_id()
    path = data.incoming(file_id)
    try:
        with reading(request):
            upload = await receive_upload(request, path, request.app[MODELS].settings.limits.max_file_mb)
        now = int(time.time())
        file = File(
            id=file_id,
            bytes=upload.n_bytes,
            created_at=now,
            expires_at=now + upload.lifetime_s if upload.lifetime_s else None,
            filename=upload.filename,
            purpose=upload.purpose,
        )
        await data.add_file(file, viewer_of(request) or "", upload.sha256)
    finally:
        path.unlink(missing_ok=True)
    return json_response(file)


@routes.get("/v1/files", FileList, (400, 401, 503), query=FileQuery)
async def list_files(request: web.Request) -> web.Response:
    """List files."""
    query = convert(dict(request.query), FileQuery, from_text=True)
    files, has_more = await batches_of(request).data.query(
        BatchStore.files, query.page, query.purpose or None, viewer_of(request)
    )
    first, last = (files[0].id, files[-1].id) if files else (None, None)
    return json_response(FileList(data=files, first_id=first, last_id=last, has_more=has_more))


@routes.get("/v1/files/{id}", File, (401, 404, 503))
async def get_file(request: web.Request) -> web.Response:
    """Get a file object."""
    file, _ = await batches_of(request).file(request.match_info["id"], viewer_of(request))
    return json_response(file)


@routes.delete("/v1/files/{id}", FileDeleted, (401, 403, 404, 409, 429, 503, 507))
async def delete_file(request: web.Request) -> web.Response:
    """Delete a file, unless a batch is reading it."""
    file_id = request.match_info["id"]
    await batches_of(request).data.delete_file(file_id, viewer_of(request))
    return json_response(FileDeleted(id=file_id))


@routes.get(
    "/v1/files/{id}/content",
    {"application/octet-stream": BINARY, "application/jsonl": BINARY},
    (401, 404, 416, 503),
)
async def get_file_content(request: web.Request) -> web.StreamResponse:
    """Get the contents of a file; with a Range header, part of it (status 206).

    Does not use aiohttp's `FileResponse`: with it, the kernel sends the file, so a stalled client would go unnoticed.
    """
    file, paths = await batches_of(request).file(request.match_info["id"], viewer_of(request))
    part = _requested_part(request, file.bytes)
    kind = "application/jsonl" if file.filename.endswith(".jsonl") else "application/octet-stream"
    response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: kind, hdrs.ACCEPT_RANGES: "bytes"})
    if part is not None:
        response.set_status(206)
        response.headers[hdrs.CONTENT_RANGE] = f"bytes {part.start}-{part.stop - 1}/{file.bytes}"
    start, stop = (part.start, part.stop) if part is not None else (0, file.bytes)
    content = await asyncio.to_thread(_open_content, paths, start, file.bytes) if stop else io.BytesIO()
    try:
        response.content_length = n_left = stop - start
        await response.prepare(request)
        while request.method != hdrs.METH_HEAD and n_left:
            chunk = await asyncio.to_thread(content.read, min(n_left, 1 << 18))
            if not chunk:
                break
            n_left -= len(chunk)
            await response.write(chunk)
            await request.writer.drain()
        await response.write_eof()
        return response
    finally:
        content.close()


def _requested_part(request: web.Request, n_bytes: int) -> range | None:
    """The byte range in the `Range` header; None if it is absent or malformed, which HTTP ignores."""
    try:
        wanted = request.http_range
    except ValueError:
        return None
    if wanted.start is None and wanted.stop is None:
        return None
    part = range(n_bytes)[wanted]
    if not part:
        text = (
            f"Range: {request.headers[hdrs.RANGE][:80]!r} starts beyond the end of the file, which has {n_bytes} bytes"
        )
        raise web.HTTPRequestRangeNotSatisfiable(text=text)
    return part


def _open_content(paths: Sequence[Path], start: int, n_bytes: int) -> BinaryIO:
    """Opens the first path that exists. Raises `NotFound` if none does, or it has less than `n_bytes`."""
    for path in paths:
        if path.exists() and not path.is_file():  # opening a pipe would wait
            raise NotFound("id", f"{path.name} is damaged: it is not a regular file")
        try:
            content = path.open("rb")
        except FileNotFoundError:
            continue
        if (found := content.seek(0, os.SEEK_END)) < n_bytes:
            content.close()
            text = f"{paths[-1].name} is damaged: only {found} of {n_bytes} bytes are left"
            raise NotFound("id", text)
        content.seek(start)
        return content
    raise NotFound("id", f"{paths[-1].name} is missing from the server's data folder")


# --- /v1/batches -----------------------------------------------------------------------------------------------------
# `/v1/batches`: create, list, get and cancel batches, as in OpenAI's API.


_WRITE_ERRORS = (401, 403, 413, 429, 503, 507)


class CreateBatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/batches`."""

    input_file_id: str
    """A file uploaded with purpose `batch`, with one request per line."""
    endpoint: str
    """The endpoint of all requests."""
    completion_window: str
    """The time limit: a whole number with s, m, h or d, such as 24h."""
    metadata: dict[str, str] | None = None
    """For the client's own use; up to 16 pairs."""
    output_expires_after: ExpiresAfter | None = None
    """How long to keep the results; None: until deleted."""


class BatchQuery(msgspec.Struct, frozen=True, kw_only=True):
    """The query string of `GET /v1/batches`."""

    after: str = ""
    """The id of the last batch of the previous page."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20

    @property
    def page(self) -> Page:
        """The page for `BatchStore`."""
        return Page(after=self.after or None, limit=self.limit)


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/batches`: a page of batches, newest first."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


@routes.post("/v1/batches", Batch, CreateBatchRequest, (400, *_WRITE_ERRORS))
async def create_batch(request: web.Request) -> web.Response:
    """Create a batch, which runs every request in a file.

    Once this responds, the batch persists across restarts.
    """
    body = await read_json(request, CreateBatchRequest)
    batch = await batches_of(request).create(
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        model=request.app[MODELS].batch_model,
        metadata=body.metadata,
        output_lifetime_s=body.output_expires_after.seconds if body.output_expires_after else None,
        owner=viewer_of(request),
        key=msgspec.to_builtins(rules) if (rules := request.get(KEY)) else None,
    )
    return json_response(batch)


@routes.get("/v1/batches", BatchList, (400, 401, 503), query=BatchQuery)
async def list_batches(request: web.Request) -> web.Response:
    """List batches, newest first."""
    query = convert(dict(request.query), BatchQuery, from_text=True)
    batches, has_more = await batches_of(request).page(query.page, viewer_of(request))
    first, last = (batches[0].id, batches[-1].id) if batches else (None, None)
    return json_response(BatchList(data=batches, first_id=first, last_id=last, has_more=has_more))


@routes.get("/v1/batches/{id}", Batch, (401, 404, 503))
async def get_batch(request: web.Request) -> web.Response:
    """Get a batch with its current counts."""
    return json_response(await batches_of(request).get(request.match_info["id"], viewer_of(request)))


@routes.post("/v1/batches/{id}/cancel", Batch, None, (404, 409, *_WRITE_ERRORS))
async def cancel_batch(request: web.Request) -> web.Response:
    """Cancel a batch; results so far are kept. 409 if it has already ended."""
    return json_response(await batches_of(request).cancel(request.match_info["id"], viewer_of(request)))
