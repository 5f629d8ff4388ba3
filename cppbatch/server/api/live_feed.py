"""Snapshots for `GET /live`: created by one task while there are readers, and shared by all of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Generic, TypeVar

log = logging.getLogger("cppbatch.server")

INTERVAL_S = 0.2

Snapshot = TypeVar("Snapshot")


class LiveFeed(Generic[Snapshot]):
    """Calls `make` every 200 ms while there is a reader. A slow reader skips to the latest snapshot."""

    def __init__(
        self,
        make: Callable[[], Awaitable[tuple[Snapshot, bool]]],
        *,
        on_stop: Callable[[], object] = lambda: None,
        interval: float = INTERVAL_S,
        heartbeat: float = 15.0,
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
