"""Runs a file job without a server: starts an engine for the job and closes it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from cppbatch.cluster.deployment import Deployment
from cppbatch.cluster.engines.client import EngineClient
from cppbatch.config import SCALED_FILES, EngineConfig
from cppbatch.engine.request import GenerationEvent
from cppbatch.errors import EngineClosed
from cppbatch.jobs.file_job import FileJob, check_model
from cppbatch.jobs.input.reader import InputReader
from cppbatch.jobs.job_request import JobRequest, RejectedLine
from cppbatch.jobs.job_runner import JobRunner
from cppbatch.jobs.journal import Journal
from cppbatch.jobs.request_order import chunks
from cppbatch.models.digest import IsStopped, file_digest, model_digest
from cppbatch.server.api.batches.handler import BatchRequestHandler
from cppbatch.server.models.served import OneModel
from cppbatch.server.process import ShowLoading, hide_loading, set_on_signals
from cppbatch.server.run_requests import OnEvent, target_concurrency
from cppbatch.server.settings import ServerSettings

Chunk = Sequence[JobRequest | RejectedLine]


class OfflineJob:
    """A running file job, with its progress."""

    def __init__(self, job: FileJob, journal: Journal, reader: InputReader) -> None:
        self.job, self.journal = job, journal
        self.n_tokens = 0
        """Tokens generated so far."""
        self.n_running = 0
        """Sequences running in the engine."""
        self._reader = reader
        self._n_read = 0
        self._n_counted: int | None = None
        self._is_stopped = False

    @property
    def n_lines(self) -> int | None:
        """Non-blank lines of the input; None until they are counted."""
        return None if self._n_counted is None else max(self._n_counted, self._n_read)

    async def count_lines(self) -> None:
        """Counts the lines on another thread. Cancelling this ends the thread soon."""
        try:
            self._n_counted = await asyncio.to_thread(self._reader.count, lambda: self._is_stopped)
        finally:
            self._is_stopped = True

    def chunks(self) -> Iterator[Chunk]:
        """The chunks of the input. Counts their lines."""
        for chunk in chunks(self._reader):
            self._n_read += len(chunk)
            yield chunk

    async def poll_stats(self, client: EngineClient) -> None:
        """Updates `n_running` until cancelled."""
        while True:
            try:
                self.n_running = (await client.stats()).running
            except EngineClosed:  # a worker is restarting; the job waits for it
                self.n_running = 0
            await asyncio.sleep(0.5)

    def observe(self, _n_requests: int, _model: str) -> contextlib.AbstractContextManager[OnEvent]:
        """An `ObserveEvents` that counts tokens."""
        return contextlib.nullcontext(self._count_tokens)

    def _count_tokens(self, _index: int, event: GenerationEvent) -> None:
        self.n_tokens += len(event.tokens)


async def run_offline(
    config: EngineConfig,
    deployment: Deployment,
    offline: OfflineJob,
    settings: ServerSettings,
    *,
    started: Callable[[], None],
    show_loading: ShowLoading = hide_loading,
) -> bool:
    """Runs a job until every line is finished or the process gets a signal. Returns whether all lines are finished.

    `settings`: the chat template, and the allowed sources of images and audio. The model is only loaded if there is a
    request to run; `started` is called when it is loaded, and `show_loading` shows the progress until then. Raises
    `StorageError` and `ConfigError` for files, `EngineClosed`, and the errors of loading. Results so far are recorded
    in any case.
    """
    stop = asyncio.Event()
    set_on_signals(stop)
    input_chunks = offline.chunks()
    until_stop = takewhile(lambda _: not stop.is_set(), input_chunks)
    # On another thread, so that signals are handled meanwhile.
    first = await asyncio.to_thread(_first_open_chunk, until_stop, offline.journal)
    if not first:
        return not stop.is_set()
    counting = asyncio.create_task(offline.count_lines())
    engine = deployment.start(config)
    has_ended = False
    reading = asyncio.create_task(asyncio.to_thread(_digests, config, lambda: has_ended))

    async def loaded() -> None:
        await engine.loaded()
        check_model(offline.journal, config.model_path, *await reading)

    try:
        with show_loading(lambda: engine.health().progress):
            if not await _unless_stopped(stop, loaded()):
                return False
        started()
        job, request_slots = offline.job, asyncio.Semaphore(await target_concurrency(engine))
        handler = BatchRequestHandler(
            OneModel.of(engine, settings),
            defaults=job.defaults,
            plain_max_tokens=job.plain_max_tokens,
            observe=offline.observe,
        )
        runner = JobRunner(
            chain([first], input_chunks), offline.journal, handler, request_slots, longest_first=job.longest_first
        )
        polling = asyncio.create_task(offline.poll_stats(engine))
        try:
            return await _unless_stopped(stop, runner.run())
        finally:
            polling.cancel()
    finally:
        counting.cancel()
        has_ended = True
        await asyncio.gather(counting, reading, return_exceptions=True)
        await engine.close()


def _digests(config: EngineConfig, is_stopped: IsStopped) -> tuple[str, dict[str, str]]:
    """The digest of the model, and those of the other files that answers depend on."""
    others = [path for name in SCALED_FILES for path, _ in getattr(config, name)] + [config.mmproj] * bool(
        config.mmproj
    )
    return model_digest(Path(config.model_path), is_stopped), {
        path: file_digest(Path(path), is_stopped) for path in others
    }


def _first_open_chunk(input_chunks: Iterator[Chunk], journal: Journal) -> Chunk | None:
    """The first chunk of the input that has a request to run."""
    for chunk in input_chunks:
        if journal.register(chunk):
            return chunk
    return None


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Runs `work`, and cancels it once `stop` is set. Returns whether it finished; raises its exceptions."""
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
