"""The requests of all fronts in one engine: the part of a replica that does not depend on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.cluster.link import Refused, refusal
from cppbatch.cluster.prefix_router import Prefix
from cppbatch.engine.request import GenerationEvent
from cppbatch.errors import CppBatchError, EngineClosed, InvalidRequest, QueueFull
from cppbatch.ray.messages import (
    GroupEvents,
    NotRun,
    ReplicaReport,
    StreamOpened,
    Submission,
    decode_question,
    decode_submission,
    encode,
)

log = logging.getLogger("cppbatch.ray")


class ReplicaEngine:
    """Runs the requests of all fronts in one engine. Its methods take and return MessagePack (`messages`), because Ray
    would pickle objects."""

    def __init__(self, engine: EngineProcess, name: str) -> None:
        self._engine = engine
        self._name = name
        self._groups: dict[tuple[str, int], StreamGroup] = {}  # by front and epoch, in LRU order

    async def run(self, prefixes: list[Prefix], message: bytes) -> AsyncGenerator[bytes, None]:
        """Runs a `Submission`. Yields a `StreamOpened`, then the messages of its stream group while it is the carrier.

        `prefixes` are for the request router (`PrefixRequestRouter`).
        """
        submission = decode_submission(message)
        group = self._group(submission.front, submission.epoch)
        async with contextlib.aclosing(group.stream(lambda: self._run(submission, group))) as messages:
            async for data in messages:
                yield data

    def _group(self, front: str, epoch: int) -> StreamGroup:
        key = front, epoch
        group = self._groups.pop(key, None) or StreamGroup(self._name, f"{front}.{epoch}")
        self._groups[key] = group
        # idle groups belong to fronts that have ended or have lost the group
        for idle in [key for key, other in self._groups.items() if other.is_idle][:-256]:
            del self._groups[idle]
        return group

    @property
    def fronts(self) -> set[str]:
        """The fronts with an open stream."""
        return {front for (front, _), group in self._groups.items() if not group.is_idle}

    def drop_front(self, front: str) -> None:
        """Ends the requests of a front that does not respond."""
        for key in [key for key in self._groups if key[0] == front]:
            self._groups.pop(key).close(f"the front {front} has not renewed its lease")

    async def _run(self, submission: Submission, group: StreamGroup) -> None:
        request = submission.request
        try:
            with self._engine.open(request, submission.resume) as outputs:
                while not outputs.finished:
                    group.put(await outputs.get())
        except InvalidRequest as error:
            group.put(refusal(request.id, error))
        except (EngineClosed, QueueFull) as error:
            group.put(NotRun(request.id, str(error)))
        except Exception as error:
            log.exception("failed to run a request")
            group.put(NotRun(request.id, f"{type(error).__name__}: {error}"))

    async def cancel(self, request_ids: list[str]) -> str:
        """Ends requests within a step; unknown ids are ignored. Returns the replica's name."""
        for request_id in request_ids:
            await self._engine.cancel(request_id)
        return self._name

    async def ask(self, message: bytes) -> bytes:
        """Answers a `Check`, `Tokenize` or `SlotAction` with `Checked`, `Tokenized` or `SlotDone`; or `Refused`."""
        question = decode_question(message)
        try:
            return encode(await self._engine.ask(question))
        except InvalidRequest as error:
            return encode(refusal(question.id, error))

    async def report(self) -> bytes:
        """A `ReplicaReport`."""
        workers = await self._engine.workers()
        return encode(ReplicaReport(replica=self._name, node=platform.node(), info=self._engine.info, workers=workers))

    async def live(self) -> bytes:
        """The `WorkerLive` of its worker, in a list."""
        return encode(await self._engine.live())

    async def check_health(self) -> None:
        """Called by Serve. Raises `CppBatchError` if the engine has failed: Serve then replaces the replica."""
        health = self._engine.health()
        if health.status in ("failed", "closed"):
            raise CppBatchError(f"the engine has {health.status}: {health.error}")


class _Stream:
    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.ended = False


class StreamGroup:
    """Batches the events of a step. The oldest open stream, the carrier, yields one message with the events of all
    requests since the last message; the other streams yield nothing. When the carrier's request has ended, the next
    stream becomes the carrier. Used on one event loop.
    """

    def __init__(self, replica: str, front: str) -> None:
        self._opened = encode(StreamOpened(replica, f"{replica}/{front}"))
        self._streams: list[_Stream] = []  # oldest first
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
        """Adds an item to the next message."""
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
