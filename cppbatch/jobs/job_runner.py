"""Runs a job: reads its input, runs its requests concurrently, and records results as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from cppbatch.errors import StorageError
from cppbatch.jobs.job_request import JobRequest, RejectedLine, RequestHandler
from cppbatch.jobs.journal import Journal, ResultLine, response_line
from cppbatch.jobs.request_order import order_requests

T = TypeVar("T")


class RequestSlots(Protocol):
    """A limit on running requests, as `asyncio.Semaphore`."""

    async def acquire(self) -> object:
        """Waits for a slot and takes it."""

    def release(self) -> None:
        """Gives a slot back."""


class JobRunner:
    """One run of one job. Its own thread reads the input and writes the journal, one at a time.

    Each running request holds one of `request_slots`. Several jobs may share an `asyncio.Semaphore`, which is fair.
    """

    def __init__(
        self,
        chunks: Iterator[Sequence[JobRequest | RejectedLine]],
        journal: Journal,
        handler: RequestHandler,
        request_slots: RequestSlots,
        *,
        longest_first: bool = False,
    ) -> None:
        """`chunks`: the input. The requests of a chunk are ordered together (`chunks`, `order_requests`)."""
        self._chunks = chunks
        self._journal = journal
        self._handler = handler
        self._request_slots = request_slots
        self._longest_first = longest_first
        self._thread = ThreadPoolExecutor(1, "cppbatch-job")
        self._request_tasks: set[asyncio.Task[None]] = set()
        self._unrecorded: list[ResultLine] = []
        self._wake_recorder = asyncio.Event()
        self._all_responded = False
        self._is_stopped = False
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Returns when every line is finished.

        Raises `StorageError`, `ConfigError` if the input cannot be read, or any exception of the handler. In these
        cases, and if cancelled, it records the results so far and leaves the rest for another run.
        """
        parts = [asyncio.create_task(self._run_part(part())) for part in (self._submit_all, self._record_all)]
        try:
            await self._end
        finally:
            self._is_stopped = True
            tasks = [*parts, *self._request_tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._record_rest()

    async def _record_rest(self) -> None:
        """Waits until the thread finishes its call, then records the remaining results, unless recording failed."""
        can_record = self._end.cancelled() or not isinstance(self._end.exception(), StorageError)
        results = self._unrecorded if can_record else []
        try:
            await self._on_thread(lambda: self._journal.record(results) if results else None)
        finally:
            self._thread.shutdown()

    async def _run_part(self, part: Awaitable[None]) -> None:
        try:
            await part
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    async def _on_thread(self, function: Callable[[], T]) -> T:
        # Shielded: the thread finishes a call even if the task that waits for it is cancelled.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, function))

    # --- from the input to running requests ---------------------------------------------------------------------

    async def _submit_all(self) -> None:
        while requests := await self._on_thread(self._next_requests):
            for request in requests:
                await self._request_slots.acquire()
                task = asyncio.create_task(self._run_request(request))
                self._request_tasks.add(task)
                task.add_done_callback(self._request_done)
        if self._request_tasks:
            await asyncio.wait(self._request_tasks)
        self._all_responded = True
        self._wake_recorder.set()

    def _request_done(self, task: asyncio.Task[None]) -> None:
        self._request_tasks.discard(task)
        self._request_slots.release()

    def _next_requests(self) -> list[JobRequest]:
        """The requests to run from the next chunk that has any; empty at the end of the input."""
        for entries in self._chunks:
            if self._is_stopped:
                break
            if entries and (requests := self._journal.register(entries)):
                return order_requests(requests, longest_first=self._longest_first)
        return []

    async def _run_request(self, request: JobRequest) -> None:
        try:
            result = response_line(request, await self._handler(request))
        except Exception as error:
            self._fail(error)
            return
        self._unrecorded.append(result)
        self._wake_recorder.set()

    # --- from responses to the journal --------------------------------------------------------------------------

    async def _record_all(self) -> None:
        """Records all results since the last write in one write, so a slow disk gets larger writes."""
        while True:
            await self._wake_recorder.wait()
            self._wake_recorder.clear()
            all_responded = self._all_responded
            if results := self._unrecorded:
                self._unrecorded = []
                await self._on_thread(partial(self._journal.record, results))
            if all_responded and not self._unrecorded:
                break
        self._end.set_result(None)


def reject_unanswered(
    chunks: Iterator[Sequence[JobRequest | RejectedLine]], journal: Journal, code: str, message: str
) -> None:
    """Writes this error for each request without a result."""
    for entries in chunks:
        requests = journal.register(entries) if entries else []
        journal.reject([request.rejected(code, message) for request in requests])
