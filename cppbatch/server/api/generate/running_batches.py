"""The running batches of `/generate/batch`, and `POST /generate/batch/cancel`: cancels one item of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated

import msgspec
from aiohttp import web

from cppbatch.errors import InvalidRequest, NotFound
from cppbatch.server.auth.keys import viewer_of
from cppbatch.server.fields.parse import read_json
from cppbatch.server.http.api_errors import json_response
from cppbatch.server.http.endpoint import Routes

routes = Routes()


Cancel = Callable[[str], Awaitable[None]]


class RunningBatch:
    """The ids of a running batch's engine requests, by item. Invalid items have none."""

    def __init__(self, ids: dict[int, str], n_items: int, cancel: Cancel) -> None:
        """`cancel`: ends an engine request by its id."""
        self.n_items = n_items
        self.cancelled: set[str] = set()
        """The ids of engine requests cancelled by the client."""
        self._ids, self._cancel = ids, cancel

    def has_cancelled(self, index: int) -> bool:
        """Whether the client has cancelled the item."""
        return self._ids.get(index) in self.cancelled

    async def cancel(self, index: int) -> None:
        """Ends an item within a step, or prevents its start. Finished items are unaffected."""
        if request_id := self._ids.get(index):
            self.cancelled.add(request_id)
            await self._cancel(request_id)


class RunningBatches:
    """The running batches with a `request_id`. Each API key only sees its own."""

    def __init__(self) -> None:
        self._batches: dict[tuple[str | None, str], RunningBatch] = {}

    @contextlib.contextmanager
    def one(self, owner: str | None, request_id: str | None, batch: RunningBatch) -> Iterator[None]:
        """Registers the batch for the duration of the context, if it has an id. Raises `InvalidRequest` if the id is in
        use."""
        if request_id is None:
            yield
            return
        key = owner, request_id
        if key in self._batches:
            raise InvalidRequest(
                "request_id", f"{request_id!r:.140} is already the id of a running batch; choose another"
            )
        self._batches[key] = batch
        try:
            yield
        finally:
            del self._batches[key]

    def get(self, owner: str | None, request_id: str) -> RunningBatch:
        """The running batch with this id. Raises `NotFound`."""
        if batch := self._batches.get((owner, request_id)):
            return batch
        raise NotFound("request_id", f"{request_id!r:.140} is not the id of a running batch")


RUNNING_BATCHES = web.AppKey("running_batches", RunningBatches)


class CancelItemRequest(msgspec.Struct):
    """The body of `POST /generate/batch/cancel`."""

    request_id: str
    """The `request_id` of the batch."""
    index: Annotated[int, msgspec.Meta(ge=0)]
    """The index of the item."""


class CancelItemResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /generate/batch/cancel`."""

    request_id: str
    index: int


@routes.post("/generate/batch/cancel", CancelItemResponse, CancelItemRequest)
async def cancel_item(request: web.Request) -> web.Response:
    """Cancel one item of a running batch; the others continue."""
    body = await read_json(request, CancelItemRequest)
    batch = request.app[RUNNING_BATCHES].get(viewer_of(request), body.request_id)
    if body.index >= batch.n_items:
        raise InvalidRequest("index", f"is {body.index}; the batch has {batch.n_items} items, numbered from 0")
    await batch.cancel(body.index)
    return json_response(CancelItemResponse(request_id=body.request_id, index=body.index))
