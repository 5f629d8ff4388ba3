"""`GET /live`: the live state of the server, as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Annotated, Generic, TypeVar

import msgspec
from aiohttp import web

from cppbatch.engine.observe.live_state import LiveSequence
from cppbatch.jobs.batches.store import Batch
from cppbatch.server.admission import IN_FLIGHT
from cppbatch.server.auth.keys import viewer_of
from cppbatch.server.http.connections import connection_of
from cppbatch.server.http.endpoint import QUERY_ERRORS, TEXT, Routes
from cppbatch.server.http.event_stream import STREAM_HEADERS
from cppbatch.server.models.served import MODELS
from cppbatch.server.observe.live import LiveBatch, LiveIntervals, LiveSnapshot, LiveTimes, LiveWorker
from cppbatch.server.observe.metrics import METRICS
from cppbatch.server.storage import STORAGE
from cppbatch.typed_json import convert

# --- live feed -------------------------------------------------------------------------------------------------------
# Snapshots for `GET /live`: created by one task while there are readers, and shared by all of them.


log = logging.getLogger("cppbatch.server")

INTERVAL_S = 0.2
HEARTBEAT_S = 15.0

Snapshot = TypeVar("Snapshot")


class LiveFeed(Generic[Snapshot]):
    """Calls `make` every 200 ms while there is a reader. A slow reader skips to the latest snapshot."""

    def __init__(
        self,
        make: Callable[[], Awaitable[tuple[Snapshot, bool]]],
        *,
        on_stop: Callable[[], object] = lambda: None,
        interval: float = INTERVAL_S,
        heartbeat: float = HEARTBEAT_S,
    ) -> None:
        """`make` returns a snapshot, and whether it contains changes: otherwise only new readers get it. `on_stop` is
        called when the last reader has left."""
        self._make, self._on_stop = make, on_stop
        self._interval, self._heartbeat = interval, heartbeat
        self._latest: Snapshot | None = None
        self._n_changes = 0
        self._changed: asyncio.Future[None] | None = None  # replaced by a new one with every change
        self._n_readers = 0
        self._task: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[object]] = set()
        self._closed = False

    async def snapshots(self) -> AsyncGenerator[Snapshot | None, None]:
        """The latest snapshot immediately, then each new one. None: no change for 15 seconds. Ends when the feed is
        closed."""
        self._n_readers += 1
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
        try:
            seen = -1
            while not self._closed:
                if self._latest is not None and self._n_changes != seen:
                    seen = self._n_changes
                    yield self._latest
                    continue
                if self._changed is None:
                    self._changed = asyncio.get_running_loop().create_future()
                has_changed, _ = await asyncio.wait([self._changed], timeout=self._heartbeat)
                if not has_changed:
                    yield None
        finally:
            self._n_readers -= 1
            if self._n_readers == 0:
                self._stop()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                self._latest, is_new = await self._make()
            except Exception:  # a bug: readers keep the last snapshot, and the next one may succeed
                log.exception("failed to create a snapshot for /live")
            else:
                if is_new:
                    self._wake()
            await asyncio.sleep(max(self._interval / 4, began + self._interval - loop.time()))

    def _wake(self) -> None:
        self._n_changes += 1
        if self._changed:
            self._changed.set_result(None)
            self._changed = None

    def _stop(self) -> None:
        if self._task:
            self._task.cancel()
            self._task = None
            self._latest = None
            self._on_stop()

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Wraps sending a snapshot to a reader: `close` cancels it, because its client may never read."""
        task = asyncio.current_task()
        assert task
        self._sending.add(task)
        try:
            yield
        finally:
            self._sending.discard(task)

    def close(self) -> None:
        """Ends all readers immediately."""
        self._closed = True
        self._wake()
        for task in self._sending:
            task.cancel()


# --- live endpoint ---------------------------------------------------------------------------------------------------


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
