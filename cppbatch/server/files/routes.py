"""OpenAI's routes of files."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import BinaryIO

from aiohttp import hdrs, web

from cppbatch.errors import NotFound
from cppbatch.jobs.batch_manager import new_file_id
from cppbatch.jobs.batch_records import File
from cppbatch.jobs.batch_store import BatchStore
from cppbatch.server.api_errors import json_response
from cppbatch.server.connections import reading
from cppbatch.server.files.schemas import FileQuery
from cppbatch.server.files.shapes import FileDeleted, FileList
from cppbatch.server.files.upload import receive
from cppbatch.server.parse import convert
from cppbatch.server.serving import SERVING
from cppbatch.server.storage import batches_of

routes = web.RouteTableDef()

_CHUNK = 1 << 18


@routes.post("/v1/files")
async def upload(request: web.Request) -> web.Response:
    """Keeps a file: it is on the disk when this is answered. What is cut off leaves nothing."""
    data = batches_of(request).data
    file_id = new_file_id()
    path = data.incoming(file_id)
    try:
        with reading(request):
            received = await receive(request, path, request.app[SERVING].limits.max_file_mb)
        now = int(time.time())
        file = File(
            id=file_id,
            bytes=received.n_bytes,
            created_at=now,
            expires_at=now + received.life if received.life else None,
            filename=received.filename,
            purpose=received.purpose,
        )
        await data.add_file(file)
    finally:
        path.unlink(missing_ok=True)
    return json_response(file)


@routes.get("/v1/files")
async def list_files(request: web.Request) -> web.Response:
    """A page of them."""
    query = convert(dict(request.query), FileQuery, from_text=True)
    files, has_more = await batches_of(request).data.query(BatchStore.files, query.page, query.purpose or None)
    first, last = (files[0].id, files[-1].id) if files else (None, None)
    return json_response(FileList(data=files, first_id=first, last_id=last, has_more=has_more))


@routes.get("/v1/files/{id}")
async def get_file(request: web.Request) -> web.Response:
    """One of them."""
    return json_response(await batches_of(request).data.query(BatchStore.file, request.match_info["id"]))


@routes.delete("/v1/files/{id}")
async def delete_file(request: web.Request) -> web.Response:
    """Forgets one."""
    file_id = request.match_info["id"]
    await batches_of(request).data.delete_file(file_id)
    return json_response(FileDeleted(id=file_id))


@routes.get("/v1/files/{id}/content")
async def get_content(request: web.Request) -> web.StreamResponse:
    """What is in it.

    Not as aiohttp's `FileResponse`: the kernel would send the file by itself, and nobody would see that a client does
    not read.
    """
    data = batches_of(request).data
    file = await data.query(BatchStore.file, request.match_info["id"])
    content = await asyncio.to_thread(_opened, data.content(file.id))
    try:
        kind = "application/jsonl" if file.filename.endswith(".jsonl") else "application/octet-stream"
        response = web.StreamResponse(headers={hdrs.CONTENT_TYPE: kind})
        response.content_length = file.bytes
        await response.prepare(request)
        while request.method != hdrs.METH_HEAD and (chunk := await asyncio.to_thread(content.read, _CHUNK)):
            await response.write(chunk)
            await request.writer.drain()
        await response.write_eof()
        return response
    finally:
        content.close()


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise NotFound("id", f"the contents of {path.name} are gone from the server's data folder") from None
