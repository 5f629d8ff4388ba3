"""Works through a job: reads its input, has the items answered side by side, records the results as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from cppbatch.errors import StorageError
from cppbatch.jobs.job_request import JobRequest, RejectedLine, RequestHandler
from cppbatch.jobs.journal import Journal
from cppbatch.jobs.request_order import order_requests
from cppbatch.jobs.results import ResultLine, response_line

T = TypeVar("T")


class JobRunner:
    """One job at work. What is read, and what is recorded, is done on a thread of its own, in turn.

    `places`: an item runs for as long as it holds one of them; several jobs may share them, and then take turns.
    """

    def __init__(
        self,
        windows: Iterator[Sequence[JobRequest | RejectedLine]],
        journal: Journal,
        work: RequestHandler,
        places: asyncio.Semaphore,
        *,
        longest_first: bool = False,
    ) -> None:
        """`windows`: the input, as much at a time as is ordered together (`cppbatch.jobs.request_order`)."""
        self._windows = windows
        self._journal = journal
        self._work = work
        self._places = places
        self._longest_first = longest_first
        self._thread = ThreadPoolExecutor(1, "cppbatch-job")
        self._items: set[asyncio.Task[None]] = set()
        self._results: list[ResultLine] = []  # not recorded yet
        self._news = asyncio.Event()
        self._is_fed = False
        self._is_over = False
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Returns when every line has been dealt with.

        Raises what ended it before: `StorageError`, `ConfigError` for an input that cannot be read, or what `work`
        raised. Then, and when this is cancelled, what was answered is recorded, and the rest is left for another run.
        """
        parts = [asyncio.create_task(self._or_fail(part())) for part in (self._feed, self._record)]
        try:
            await self._end
        finally:
            self._is_over = True
            tasks = [*parts, *self._items]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._leave()

    async def _leave(self) -> None:
        """Records what is left, unless that is what has failed, when the thread is done with what it has to do."""
        can_record = self._end.cancelled() or not isinstance(self._end.exception(), StorageError)
        results = self._results if can_record else []
        try:
            await self._on_thread(lambda: self._journal.record(results) if results else None)
        finally:
            self._thread.shutdown()

    async def _or_fail(self, part: Awaitable[None]) -> None:
        try:
            await part
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    async def _on_thread(self, function: Callable[[], T]) -> T:
        # Shielded: what was handed over is done, though nobody waits for it any more.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, function))

    # --- from the input to the items at work --------------------------------------------------------------------

    async def _feed(self) -> None:
        while window := await self._on_thread(self._next_window):
            for item in window:
                await self._places.acquire()
                task = asyncio.create_task(self._answer(item))
                self._items.add(task)
                task.add_done_callback(self._left)
        if self._items:
            await asyncio.wait(self._items)
        self._is_fed = True
        self._news.set()

    def _left(self, task: asyncio.Task[None]) -> None:
        self._items.discard(task)
        self._places.release()

    def _next_window(self) -> list[JobRequest]:
        """The next items that are still to be answered; none at the end of the input."""
        for entries in self._windows:
            if self._is_over:  # nobody waits for these any more
                break
            if entries and (items := self._journal.register(entries)):
                return order_requests(items, longest_first=self._longest_first)
        return []

    async def _answer(self, item: JobRequest) -> None:
        try:
            result = response_line(item, await self._work(item))
        except Exception as error:
            self._fail(error)
            return
        self._results.append(result)
        self._news.set()

    # --- from the answers to the disk ---------------------------------------------------------------------------

    async def _record(self) -> None:
        """Records what has come since the last time: the slower the disk, the more at once."""
        while True:
            await self._news.wait()
            self._news.clear()
            is_fed = self._is_fed
            if results := self._results:
                self._results = []
                await self._on_thread(partial(self._journal.record, results))
            if is_fed and not self._results:
                break
        self._end.set_result(None)


def reject_unanswered(
    windows: Iterator[Sequence[JobRequest | RejectedLine]], journal: Journal, code: str, message: str
) -> None:
    """Writes an error for each item that has not been answered: there is no time for it any more."""
    for entries in windows:
        items = journal.register(entries) if entries else []
        lost = [
            RejectedLine(line=item.line, code=code, message=message, custom_id=item.custom_id, content=item.content)
            for item in items
        ]
        journal.refuse(lost)
