"""`GET /live`: the live state of the server, as server-sent events."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import msgspec
from aiohttp import web

from cppbatch.engine.observe.live_state import LiveSequence
from cppbatch.jobs.batches.records import Batch
from cppbatch.server.api.live_feed import LiveFeed
from cppbatch.server.auth.keys import viewer_of
from cppbatch.server.http.connections import connection_of
from cppbatch.server.http.endpoint import QUERY_ERRORS, TEXT, Routes
from cppbatch.server.http.event_stream import STREAM_HEADERS
from cppbatch.server.models.served import MODELS
from cppbatch.server.observe.live import LiveBatch, LiveIntervals, LiveSnapshot, LiveTimes, LiveWorker
from cppbatch.server.observe.metrics import METRICS
from cppbatch.server.request_checks import IN_FLIGHT
from cppbatch.server.storage import STORAGE
from cppbatch.typed_json import convert

routes = Routes()

_KEEP_ALIVE = b": nothing has changed\n\n"


class LiveQuery(msgspec.Struct, kw_only=True):
    """The query string."""

    events: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """End the stream after this many events; None: no limit."""


class _Made:
    """A snapshot with all batches, and the events sent to readers."""

    def __init__(self, snapshot: LiveSnapshot, batch_owners: list[str]) -> None:
        self.snapshot = snapshot
        self._owners = batch_owners
        self._events: dict[str | None, bytes] = {}

    def event(self, viewer: str | None) -> bytes:
        """The server-sent event for an owner of keys; None: no keys required. Encoded once per owner."""
        if viewer not in self._events:
            data = msgspec.json.encode(self.snapshot if viewer is None else self._seen_by(viewer))
            self._events[viewer] = b"data: " + data + b"\n\n"
        return self._events[viewer]

    def _seen_by(self, viewer: str) -> LiveSnapshot:
        owned = zip(self.snapshot.batches, self._owners, strict=True)
        batches = [batch for batch, owner in owned if owner in ("", viewer)]
        workers = [_without_priorities(worker) for worker in self.snapshot.workers]
        return msgspec.structs.replace(self.snapshot, batches=batches, workers=workers)

    def is_as(self, before: _Made) -> bool:
        """Whether only times and ages differ."""
        return _timeless(self.snapshot) == _timeless(before.snapshot)


def _without_priorities(worker: LiveWorker) -> LiveWorker:
    """Hides priorities, so that a key learns neither other keys' priorities nor the owner of a sequence."""
    if worker.engine is None:
        return worker
    hidden = msgspec.structs.replace(worker.engine, rows=_hide(worker.engine.rows), queue=_hide(worker.engine.queue))
    return msgspec.structs.replace(worker, engine=hidden)


def _hide(sequences: list[LiveSequence]) -> list[LiveSequence]:
    return [msgspec.structs.replace(each, priority=None, rank=None) for each in sequences]


def _timeless(snapshot: LiveSnapshot) -> LiveSnapshot:
    workers = [msgspec.structs.replace(worker, age=None) for worker in snapshot.workers]
    return msgspec.structs.replace(snapshot, time=0.0, workers=workers)


class _Snapshots:
    """Creates the snapshots of one application."""

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self.reset()

    def reset(self) -> None:
        """Without readers, nothing is collected or stored."""
        self._app[METRICS].live = None
        self._intervals = LiveIntervals()
        self._before: _Made | None = None

    async def make(self) -> tuple[_Made, bool]:
        """The live state of the server, and whether it has changed."""
        models, metrics = self._app[MODELS], self._app[METRICS]
        times = metrics.live = metrics.live or LiveTimes()
        workers = self._intervals.add(await models.live())
        intervals = [worker.interval for worker in workers if worker.interval]
        batches = self._app[STORAGE].open_batches()
        snapshot = LiveSnapshot(
            time=round(time.time(), 3),
            model=models.shown_name,
            health=models.health(),
            draining=self._app[IN_FLIGHT].draining,
            scaling=models.scaling(),
            batches=[_live_batch(record.batch) for record in batches],
            tokens_per_second=round(sum(interval.tokens_per_second for interval in intervals), 1),
            prompt_tokens_per_second=round(sum(interval.prompt_tokens_per_second for interval in intervals), 1),
            first_token_seconds=times.first_token(),
            inter_token_seconds=times.inter_token(),
            workers=workers,
        )
        made, before = _Made(snapshot, [record.owner for record in batches]), self._before
        self._before = made
        is_busy = any(worker.in_flight for worker in workers)
        return made, is_busy or before is None or not made.is_as(before)


def _live_batch(batch: Batch) -> LiveBatch:
    counts = batch.request_counts
    return LiveBatch(
        id=batch.id,
        status=batch.status,
        total=counts.total,
        completed=counts.completed,
        failed=counts.failed,
        created_at=batch.created_at,
    )


LIVE = web.AppKey("live", LiveFeed[_Made])


def add_live(app: web.Application) -> None:
    """Adds the feed to an application that has its client, metrics and storage."""
    snapshots = _Snapshots(app)
    app[LIVE] = LiveFeed(snapshots.make, on_stop=snapshots.reset)
    app.on_shutdown.append(_end_streams)


async def _end_streams(app: web.Application) -> None:
    app[LIVE].close()


_EVENT = {
    "type": "object",
    "description": "A server-sent event. Its data is a LiveSnapshot in JSON",
    "properties": {"data": TEXT},
    "required": ["data"],
}


@routes.get(
    "/live",
    {"text/event-stream": _EVENT},
    (400, *QUERY_ERRORS),
    types=(LiveSnapshot,),
    query=LiveQuery,
    options={"allow_head": False},
)
async def live(request: web.Request) -> web.StreamResponse:
    """Live state of the server, 5 times per second: sequences, queue, KV cells, workers.

    While the server is idle, only when something changes. If there are too many connections, these may be closed in
    favour of new ones.
    """
    query, viewer, feed = convert(dict(request.query), LiveQuery, from_text=True), viewer_of(request), request.app[LIVE]
    if connection := connection_of(request):
        connection.give_way()
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    n_sent = 0
    async with contextlib.aclosing(feed.snapshots()) as snapshots:
        async for made in snapshots:
            with feed.sending():
                await response.write(made.event(viewer) if made else _KEEP_ALIVE)
                await request.writer.drain()  # a stalled client gets the latest snapshot when it reads again
            n_sent += made is not None
            if n_sent == query.events:
                break
    return response
