"""The streams that a replica has open for one front. One of them carries the events of all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from cppbatch.cluster.worker_link import Refused
from cppbatch.engine.request import GenerationEvent
from cppbatch.errors import EngineClosed
from cppbatch.ray.ray_messages import GroupEvents, NotRun, StreamOpened, encode


class _Stream:
    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.ended = False


class StreamGroup:
    """Batches the events of a step: the oldest open stream, the carrier, yields one message with the events of all
    requests since the last message; the other streams only end. When the carrier's request has ended, the next stream
    carries. Used on one event loop.
    """

    def __init__(self, replica: str, front: str) -> None:
        self._opened = encode(StreamOpened(replica, f"{replica}/{front}"))
        self._streams: list[_Stream] = []  # the oldest first
        self._n_sent = 0
        self._closed_because: str | None = None
        self._events: list[GenerationEvent] = []
        self._not_valid: list[Refused] = []
        self._not_run: list[NotRun] = []

    @property
    def is_idle(self) -> bool:
        """Whether no stream is open."""
        return not self._streams

    def put(self, item: GenerationEvent | Refused | NotRun) -> None:
        """Adds something to the next message."""
        if isinstance(item, GenerationEvent):
            self._events.append(item)
        elif isinstance(item, Refused):
            self._not_valid.append(item)
        else:
            self._not_run.append(item)
        self._wake_carrier()

    def close(self, why: str) -> None:
        """Ends all streams and their requests. The streams raise `EngineClosed`."""
        self._closed_because = why
        for stream in self._streams:
            stream.wake.set()

    def _wake_carrier(self) -> None:
        if self._streams:
            self._streams[0].wake.set()

    async def stream(self, run: Callable[[], Coroutine[Any, Any, None]]) -> AsyncGenerator[bytes, None]:
        """Runs a request, which puts its events into this group. Yields messages while this stream is the carrier.

        Ends when the request has ended. Closing it early cancels `run`. Raises `EngineClosed` after `close`.
        """
        stream = _Stream()
        self._streams.append(stream)
        running = asyncio.ensure_future(run())

        def end(_: object) -> None:
            stream.ended = True
            stream.wake.set()

        running.add_done_callback(end)
        try:
            yield self._opened
            while True:
                await stream.wake.wait()
                stream.wake.clear()
                if self._closed_because:
                    raise EngineClosed(self._closed_because)
                while self._streams[0] is stream and self._has_items():
                    yield self._take()
                if stream.ended:
                    running.result()
                    return
        finally:
            self._streams.remove(stream)
            running.cancel()
            if self._has_items():
                self._wake_carrier()

    def _has_items(self) -> bool:
        return bool(self._events or self._not_valid or self._not_run)

    def _take(self) -> bytes:
        message = encode(GroupEvents(self._n_sent, self._events, self._not_valid, self._not_run))
        self._n_sent += 1
        self._events, self._not_valid, self._not_run = [], [], []
        return message
