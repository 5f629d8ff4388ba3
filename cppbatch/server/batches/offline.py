"""Batch jobs without a server: an engine is started for one file, and ended with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from itertools import chain, takewhile
from typing import Any

from cppbatch.cluster.deployment import Deployment
from cppbatch.cluster.engine_client import EngineClient
from cppbatch.config import EngineConfig
from cppbatch.errors import EngineClosed
from cppbatch.jobs.file_job import FileJob
from cppbatch.jobs.input_reader import InputReader
from cppbatch.jobs.job_request import JobRequest, RejectedLine
from cppbatch.jobs.job_runner import JobRunner
from cppbatch.jobs.journal import Journal
from cppbatch.jobs.request_order import chunks
from cppbatch.server.batches.work import BatchWork
from cppbatch.server.run_requests import Event, target_concurrency
from cppbatch.server.serving import Serving
from cppbatch.server.settings import ServerSettings
from cppbatch.server.signals import set_on_signals

_LOOK_S = 0.5

Window = Sequence[JobRequest | RejectedLine]


class OfflineJob:
    """A job at work, for those who watch it."""

    def __init__(self, job: FileJob, journal: Journal, reader: InputReader) -> None:
        self.job, self.journal = job, journal
        self.n_tokens = 0
        """That were generated, as they come."""
        self.n_running = 0
        """Sequences that share the engine's steps now."""
        self._reader = reader
        self._n_read = 0

    @property
    def n_lines(self) -> int:
        """Lines of the input that hold something: an estimate until all of them were read."""
        return max(self._n_read, round(self._n_read / max(self._reader.fraction, 1e-9)))

    def chunks(self) -> Iterator[Window]:
        """The input, counted as it is read."""
        for window in chunks(self._reader):
            self._n_read += len(window)
            yield window

    async def look(self, client: EngineClient) -> None:
        """Asks the engine again and again."""
        while True:
            try:
                self.n_running = (await client.stats()).running
            except EngineClosed:  # a worker starts anew; the job waits for it
                self.n_running = 0
            await asyncio.sleep(_LOOK_S)

    async def watch(self, events: AsyncGenerator[Event, None], _n: int) -> AsyncGenerator[Event, None]:
        """Counts tokens."""
        async with contextlib.aclosing(events):
            async for index, event in events:
                self.n_tokens += len(event.tokens)
                yield index, event


async def run_offline(
    config: EngineConfig, deployment: Deployment, offline: OfflineJob, *, started: Callable[[], None]
) -> bool:
    """Works until every line is dealt with, or a signal comes: whether all are. No model is loaded for nothing.

    `started` is called when the model is there. Raises `StorageError` and `ConfigError` for files, `EngineClosed` and
    whatever loading raises; what was answered until then is on the disk.
    """
    stop = asyncio.Event()
    set_on_signals(stop)
    input_windows = offline.chunks()
    until_stop = takewhile(lambda _: not stop.is_set(), input_windows)
    first = await asyncio.to_thread(_first_open, until_stop, offline.journal)  # a signal is heard meanwhile
    if not first:
        return not stop.is_set()
    engine = deployment.start(config)
    try:
        if not await _before(stop, engine.loaded()):
            return False
        started()
        job, places = offline.job, asyncio.Semaphore(await target_concurrency(engine))
        serving = Serving(engine, ServerSettings(chat_template=job.chat_template))
        work = BatchWork(serving, defaults=job.defaults, any_model=True, watch=offline.watch)
        lines = chain([first], input_windows)
        run = JobRunner(lines, offline.journal, work, places, longest_first=job.longest_first)
        looking = asyncio.create_task(offline.look(engine))
        try:
            return await _before(stop, run.run())
        finally:
            looking.cancel()
    finally:
        await engine.close()


def _first_open(input_windows: Iterator[Window], journal: Journal) -> Window | None:
    """The first part of the input in which there is something to answer."""
    for window in input_windows:
        if journal.register(window):
            return window
    return None


async def _before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Does the work unless a signal comes first: whether it was done. Raises what it raises."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
        return False
    working.result()
    return True
