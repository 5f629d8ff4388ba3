"""`/v1/batches`: create, list, get and cancel batches, as in OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from aiohttp import web

from cppbatch.jobs.batch_records import Batch
from cppbatch.jobs.batch_store import Page
from cppbatch.server.api_errors import json_response
from cppbatch.server.endpoint import Routes
from cppbatch.server.files.file_upload import ExpiresAfter
from cppbatch.server.keys import KEY, viewer_of
from cppbatch.server.parse import read_json
from cppbatch.server.served_models import MODELS
from cppbatch.server.storage import batches_of
from cppbatch.typed_json import convert

routes = Routes()

_WRITE_ERRORS = (401, 403, 413, 429, 503, 507)


class CreateBatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/batches`."""

    input_file_id: str
    """A file that was uploaded with the purpose `batch`, with a request on each line."""
    endpoint: str
    """The endpoint of all requests."""
    completion_window: str
    """The time limit: a whole number with s, m, h or d, for example 24h."""
    metadata: dict[str, str] | None = None
    """For the client's own use: up to 16 pairs."""
    output_expires_after: ExpiresAfter | None = None
    """How long the results are kept; None: until they are deleted."""


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
    """`GET /v1/batches`: a page of batches, the newest first."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


@routes.post("/v1/batches", Batch, CreateBatchRequest, (400, *_WRITE_ERRORS))
async def create_batch(request: web.Request) -> web.Response:
    """Create a batch, which runs every request in a file.

    Once this responds, the batch survives a restart.
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
