"""OpenAI's routes of batches."""

from __future__ import annotations

from aiohttp import web

from cppbatch.server.api_errors import json_response
from cppbatch.server.batches.schemas import BatchQuery, NewBatch
from cppbatch.server.batches.shapes import BatchList
from cppbatch.server.parse import convert, read_json
from cppbatch.server.serving import SERVING
from cppbatch.server.storage import batches_of

routes = web.RouteTableDef()


@routes.post("/v1/batches")
async def create_batch(request: web.Request) -> web.Response:
    """A new one; it survives this process from now on."""
    body = await read_json(request, NewBatch)
    batch = await batches_of(request).create(
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        model=request.app[SERVING].info.name,
        metadata=body.metadata,
        output_lifetime_s=body.output_expires_after.seconds if body.output_expires_after else None,
    )
    return json_response(batch)


@routes.get("/v1/batches")
async def list_batches(request: web.Request) -> web.Response:
    """A page of them."""
    query = convert(dict(request.query), BatchQuery, from_text=True)
    batches, has_more = await batches_of(request).page(query.page)
    first, last = (batches[0].id, batches[-1].id) if batches else (None, None)
    return json_response(BatchList(data=batches, first_id=first, last_id=last, has_more=has_more))


@routes.get("/v1/batches/{id}")
async def get_batch(request: web.Request) -> web.Response:
    """One of them."""
    return json_response(await batches_of(request).get(request.match_info["id"]))


@routes.post("/v1/batches/{id}/cancel")
async def cancel_batch(request: web.Request) -> web.Response:
    """Ends one before its time."""
    return json_response(await batches_of(request).cancel(request.match_info["id"]))
