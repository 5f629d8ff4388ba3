"""One batch from its making to its end."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

import msgspec

from cppbatch.errors import ConfigError, EngineClosed, StorageError
from cppbatch.jobs.batch_records import (
    Batch,
    BatchError,
    BatchErrors,
    BatchRecord,
    BatchStatus,
    BatchUsage,
    File,
    FinalStatus,
    InputDetails,
    RequestCounts,
)  # fmt: skip
from cppbatch.jobs.batch_store import BatchStore
from cppbatch.jobs.batch_validation import read_batch_input, validate_input
from cppbatch.jobs.data_folder import DataFolder
from cppbatch.jobs.durable_files import move_into_place
from cppbatch.jobs.job_request import JobRequest, RejectedLine, RequestHandler
from cppbatch.jobs.job_runner import JobRunner, reject_unanswered
from cppbatch.jobs.journal import Journal
from cppbatch.jobs.ledger import Ledger
from cppbatch.jobs.request_order import chunks

T = TypeVar("T")

log = logging.getLogger("cppbatch.jobs")

FIRST_PAUSE_S = 30.0
_LONGEST_PAUSE_S = 600.0
_LOOK_AT_CLOCK_S = 60.0  # a machine that slept has a clock that jumped
_AT_ONCE = 8  # batches that run; each has a thread and open files
_TIME_IS_UP = "This request could not be answered before the completion window ended."


@dataclass(frozen=True)
class BatchResources:
    """What batches are answered with."""

    model: str
    work: RequestHandler
    places: asyncio.Semaphore
    """For each item that is at work, of all batches."""
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))
    """For each batch that is."""
    validating: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """For that which is read for the first time."""


class ActiveBatch:
    """A batch that has not ended. What is written of it survives anything; `live` goes on from there."""

    def __init__(self, record: BatchRecord, data: DataFolder, urls: Collection[str]) -> None:
        self.record = record
        self._data = data
        self._urls = urls
        self._folder = data.batch(record.shown.id)
        self._thread = _thread()
        self._journal: Journal | None = None
        self._cancelled = asyncio.Event()
        if record.shown.status == "cancelling":
            self._cancelled.set()

    @property
    def shown(self) -> Batch:
        """The batch as it is just now."""
        shown, journal = self.record.shown, self._journal
        return msgspec.structs.replace(shown, **_progress(shown, journal)) if journal else shown

    async def cancel(self) -> None:
        """Ends it before its time; what is answered already stays."""
        self._change("cancelling", cancelling_at=_now())
        self._cancelled.set()
        await self.save()

    async def save(self) -> None:
        """Writes down how it is."""
        await self._data.ask(BatchStore.update_batch, self.record)

    def _change(self, status: BatchStatus | None = None, **others: Any) -> None:
        """Remembers this; who calls it has it saved."""
        if status:
            others["status"] = status
        self.record = msgspec.structs.replace(self.record, shown=msgspec.structs.replace(self.record.shown, **others))

    # --- its life -----------------------------------------------------------------------------------------------

    async def live(self, workplace: BatchResources) -> None:
        """Returns when it has ended. When this is cancelled, the rest is left for the next start."""
        try:
            if self.record.ending is None:
                ending = await self._unless_over(self._work(workplace))
                if self._cancelled.is_set():  # perhaps while the last of it was put away
                    ending = "cancelled"
                else:  # from now on it cannot be cancelled
                    self._change("finalizing", finalizing_at=_now() if ending != "failed" else None)
                await self._patiently(partial(self._settle, ending))
            await self._patiently(self._end)
        finally:
            self._thread.shutdown(wait=False)

    async def _unless_over(self, work: Coroutine[Any, Any, FinalStatus]) -> FinalStatus:
        """Does the work until it is done, the batch is cancelled, or its time is up: what it ends as."""
        working, cancelled = asyncio.create_task(work), asyncio.create_task(self._cancelled.wait())
        try:
            while not self._cancelled.is_set():
                left = self.record.shown.expires_at - time.time()
                if left <= 0:
                    return "expired"
                await asyncio.wait(
                    {working, cancelled}, timeout=min(left, _LOOK_AT_CLOCK_S), return_when=asyncio.FIRST_COMPLETED
                )
                if working.done():
                    return working.result()
            return "cancelled"
        finally:
            for task in (working, cancelled):
                task.cancel()
            await asyncio.gather(working, cancelled, return_exceptions=True)

    async def _work(self, workplace: BatchResources) -> FinalStatus:
        try:
            if self.record.shown.in_progress_at is None and not await self._validated(workplace):
                return "failed"
            if self._folder.exists():
                await self._patiently(self._look)
            self._thread.shutdown(wait=False)  # thousands may wait for their turn, or for their model
            self._thread = _thread()
            if self.record.shown.model != workplace.model:
                names = (self.record.shown.id, self.record.shown.model, workplace.model)
                log.warning("%s waits for the model %r, for which it was made; %r is loaded", *names)
                await _for_ever()
            await self._patiently(partial(self._answer, workplace))
        except ConfigError as error:
            log.error("%s has failed: %s", self.record.shown.id, error)
            gone = BatchError(code="input_file_gone", message="the input file cannot be read", param="input_file_id")
            self._change(errors=BatchErrors(data=[gone]))
            return "failed"
        return "completed"

    async def _patiently(self, step: Callable[[], Awaitable[T]]) -> T:
        """Does a step of it, again and again while the disk is full, or the engine gone, which may come back."""
        pause = FIRST_PAUSE_S
        while True:
            try:
                return await step()
            except ConfigError:
                raise
            except Exception as error:
                unexpected = None if isinstance(error, StorageError | EngineClosed) else error
                log.error(
                    "%s stands still, and is tried again in %g s: %s",
                    self.record.shown.id, pause, error, exc_info=unexpected,
                )  # fmt: skip
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    # --- validating ---------------------------------------------------------------------------------------------

    async def _validated(self, workplace: BatchResources) -> bool:
        """Reads the input once. Whether there is anything in it to answer."""
        stop = threading.Event()
        async with workplace.validating:
            try:
                found = await self._on_thread(lambda: validate_input(self._input(), stop))
            finally:
                stop.set()
        if self._cancelled.is_set():
            return True  # whoever waits for this knows
        errors = found.errors
        if not found.n_lines:
            errors = [BatchError(code="empty_file", message="the input file has no lines", param="input_file_id")]
        self._change(
            "in_progress" if found.n_good else None,
            in_progress_at=_now() if found.n_good else None,
            errors=BatchErrors(data=errors) if errors else None,
            request_counts=RequestCounts(total=found.n_lines),
        )
        if found.n_good:
            await self._patiently(self.save)
        return bool(found.n_good)

    # --- in progress --------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Counts what was done before the last start."""
        try:
            await self._on_thread(self._open_journal)
        finally:
            await self._close_journal()

    async def _answer(self, workplace: BatchResources) -> None:
        async with workplace.turns:
            try:
                journal = await self._on_thread(self._open_journal)
                await JobRunner(self._windows(), journal, workplace.work, workplace.places).run()
            finally:
                await self._close_journal()

    def _input(self) -> Iterator[JobRequest | RejectedLine]:
        shown = self.record.shown
        return read_batch_input(self._data.content(shown.input_file_id), shown.endpoint, self._urls)

    def _windows(self) -> Iterator[Sequence[JobRequest | RejectedLine]]:
        return chunks(self._input())

    def _open_journal(self) -> Journal:
        self._folder.mkdir(exist_ok=True)
        ledger = Ledger(self._folder / "ledger.sqlite3")
        try:
            self._journal = Journal(ledger, *self._results())
        except BaseException:
            ledger.close()
            raise
        return self._journal

    def _results(self) -> tuple[Any, Any]:
        return self._folder / "output.jsonl", self._folder / "errors.jsonl"

    async def _close_journal(self) -> None:
        """Also one that is being opened just now, though nobody waits for that any more: the thread is the same."""
        if journal := await self._on_thread(self._closed_journal):
            self._change(**_progress(self.record.shown, journal))
            self._journal = None

    def _closed_journal(self) -> Journal | None:
        if self._journal:
            self._journal.close()
        return self._journal

    async def _on_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    # --- the end ------------------------------------------------------------------------------------------------

    async def _settle(self, ending: FinalStatus) -> None:
        """What is in its files now stays so, and how it ends is decided."""
        if ending == "expired" or self._folder.exists():
            stop = threading.Event()
            try:
                await self._on_thread(partial(self._write_last, ending, stop))
            finally:
                stop.set()
                await self._close_journal()
        self.record = msgspec.structs.replace(self.record, ending=ending)
        await self.save()

    def _write_last(self, ending: FinalStatus, stop: threading.Event) -> None:
        journal = self._open_journal()
        if ending == "expired":
            try:
                rest = takewhile(lambda _: not stop.is_set(), self._windows())
                reject_unanswered(rest, journal, "batch_expired", _TIME_IS_UP)
            except ConfigError as error:
                log.error("%s: what it has not answered is not in its error file: %s", self.record.shown.id, error)

    async def _end(self) -> None:
        ending = self.record.ending
        assert ending  # settled
        files = await self._on_thread(self._move_results)
        ids = {file.id for file in files}
        ended = msgspec.structs.replace(
            self.record.shown,
            status=ending,
            output_file_id=self.record.output_id if self.record.output_id in ids else None,
            error_file_id=self.record.errors_id if self.record.errors_id in ids else None,
            **{f"{ending}_at": _now()},
        )
        record = msgspec.structs.replace(self.record, shown=ended)
        await self._data.ask(BatchStore.update_batch, record, files)
        self.record = record
        await self._on_thread(partial(shutil.rmtree, self._folder, ignore_errors=True))  # or at the next start

    def _move_results(self) -> list[File]:
        """Puts its files in place, those that are not there yet."""
        record, now = self.record, _now()
        ids = (record.output_id, record.errors_id)
        files = []
        for path, file_id, kind in zip(self._results(), ids, ("output", "error"), strict=True):
            content = self._data.content(file_id)
            if path.exists() and path.stat().st_size:
                move_into_place(path, content)
            if content.exists():
                files.append(
                    File(
                        id=file_id,
                        bytes=content.stat().st_size,
                        created_at=now,
                        expires_at=now + record.output_life if record.output_life else None,
                        filename=f"{record.shown.id}_{kind}.jsonl",
                        purpose="batch_output",
                    )
                )
        return files


def _progress(shown: Batch, journal: Journal) -> dict[str, Any]:
    """How many lines are done, and what they took."""
    done, failed, tokens = journal.n_done, journal.n_failed, journal.tokens
    total = max(shown.request_counts.total, done + failed)
    prompt, completion = tokens["prompt_tokens"], tokens["completion_tokens"]
    return {
        "request_counts": RequestCounts(total=total, completed=done, failed=failed),
        "usage": BatchUsage(
            input_tokens=prompt,
            input_tokens_details=InputDetails(cached_tokens=tokens["cached_tokens"]),
            output_tokens=completion,
            total_tokens=prompt + completion,
        ),
    }


def _thread() -> ThreadPoolExecutor:
    """For one batch; there is none before it has something to do."""
    return ThreadPoolExecutor(1, "cppbatch-batch")


def _now() -> int:
    return int(time.time())


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()
