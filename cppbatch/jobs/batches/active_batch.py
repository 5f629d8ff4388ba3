"""A batch of the API from its creation to its final status."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cppbatch.errors import ConfigError, EngineClosed, InputChanged, LedgerLost, NotJsonLines, StorageError
from cppbatch.jobs.batches.data_folder import RESULT_NAMES, DataFolder
from cppbatch.jobs.batches.records import (
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
    ResultsSoFar,
)
from cppbatch.jobs.batches.store import BatchStore
from cppbatch.jobs.durable_files import move_into_place
from cppbatch.jobs.input.format import Endpoint, InputFormat
from cppbatch.jobs.input.reader import InputReader
from cppbatch.jobs.job_request import JobRequest, RejectedLine, RequestHandler
from cppbatch.jobs.job_runner import JobRunner, RequestSlots, reject_unanswered
from cppbatch.jobs.journal import Journal
from cppbatch.jobs.ledger import Ledger
from cppbatch.jobs.request_order import chunks
from cppbatch.retries import Pauses

T = TypeVar("T")

log = logging.getLogger("cppbatch.jobs")

RETRIES = Pauses(30.0, 600.0)
_MODEL_CHECK_S = 5.0  # whether a server with several models has got the model of a batch
_EXPIRED = "This request could not be executed before the completion window expired."


class BatchResources(msgspec.Struct, frozen=True):
    """The resources that all batches of a server share."""

    serves: Callable[[str], bool]
    """Whether this server has the model of a batch."""
    execution: Callable[[BatchRecord], tuple[RequestHandler, RequestSlots]]
    """The handler of a batch's requests, and the slots of which each running request holds one."""
    # a running batch has a thread and open files
    running_slots: asyncio.Semaphore = msgspec.field(default_factory=lambda: asyncio.Semaphore(8))
    """One per batch with running requests."""
    validation_slots: asyncio.Semaphore = msgspec.field(default_factory=lambda: asyncio.Semaphore(1))
    """One per batch in validation."""


class ActiveBatch:
    """A batch that has not ended. Its record and journal are durable: after a restart `run` continues from them.

    Status: validating -> in_progress -> finalizing -> completed, failed or expired; or cancelling -> cancelled.
    """

    def __init__(self, record: BatchRecord, data: DataFolder, urls: Collection[str]) -> None:
        """`urls`: the endpoints that batches support."""
        self.record = record
        self._data = data
        self._urls = urls
        self._folder = data.batch(record.batch.id)
        self._thread = _new_thread()
        self._journal: Journal | None = None
        self._result_bytes = (0, 0)  # when the journal was closed
        self._cancelled = asyncio.Event()
        if record.batch.status == "cancelling":
            self._cancelled.set()
        if record.final_status is None and (record.is_begun or self._folder.exists()):
            self._load_progress()

    def _load_progress(self) -> None:
        """Reads the counts stored before the restart."""
        try:
            journal = self._open_journal()
        except StorageError as error:  # `run` also reports it while it persists
            log.error("%s: cannot read its results so far: %s", self.record.batch.id, error)
            return
        journal.close()
        self._forget(journal)

    @property
    def batch(self) -> Batch:
        """The batch with its current counts, and its results so far until it has ended."""
        batch, journal = self.record.batch, self._journal
        if batch.has_ended:
            return batch
        output_bytes, error_bytes = self._committed_bytes
        so_far = ResultsSoFar(
            output_file_id=self.record.output_file_id,
            output_bytes=output_bytes,
            error_file_id=self.record.error_file_id,
            error_bytes=error_bytes,
        )
        return msgspec.structs.replace(batch, results_so_far=so_far, **(_progress(batch, journal) if journal else {}))

    @property
    def _committed_bytes(self) -> tuple[int, int]:
        return self._journal.committed_bytes if self._journal else self._result_bytes

    def results_so_far(self, file_id: str) -> tuple[File, tuple[Path, Path]] | None:
        """The output or error file with the results so far, and its contents; None if it is another file.

        The contents are in the first of the two paths that exists. Data beyond `File.bytes` may be incomplete.
        """
        if file_id not in (self.record.output_file_id, self.record.error_file_id):
            return None
        place = int(file_id == self.record.error_file_id)
        file = self._result_files(*self._committed_bytes)[place]
        return file, (self._result_paths()[place], self._data.content(file_id))  # `_finalize` moves them

    async def cancel(self) -> None:
        """Starts cancelling the batch. Keeps the results so far."""
        self._update("cancelling", cancelling_at=_now())
        self._cancelled.set()
        await self.save()

    async def save(self) -> None:
        """Stores the record."""
        await self._data.query(BatchStore.update_batch, self.record)

    def _update(self, status: BatchStatus | None = None, **fields: Any) -> None:
        """Changes fields of the batch in memory; the caller saves the record."""
        if status:
            fields["status"] = status
        self.record = msgspec.structs.replace(self.record, batch=msgspec.structs.replace(self.record.batch, **fields))

    # --- the life cycle -----------------------------------------------------------------------------------------

    async def run(self, resources: BatchResources) -> None:
        """Returns when the batch has its final status. If the server stops earlier, its next start continues."""
        try:
            if self.record.final_status is None:
                final_status = await self._until_cancelled_or_expired(self._work(resources))
                if self._cancelled.is_set():  # the client may have cancelled while the last results were recorded
                    final_status = "cancelled"
                else:  # from here on, the batch cannot be cancelled
                    self._update("finalizing", finalizing_at=_now() if final_status != "failed" else None)
                await self._with_retry(partial(self._finish_results, final_status))
            await self._with_retry(self._finalize)
        finally:
            self._thread.shutdown(wait=False)

    async def _until_cancelled_or_expired(self, work: Coroutine[Any, Any, FinalStatus]) -> FinalStatus:
        """Runs `work` until it returns, or the batch is cancelled or expires. Returns the final status."""
        working, cancelled = asyncio.create_task(work), asyncio.create_task(self._cancelled.wait())
        try:
            while not self._cancelled.is_set():
                seconds_left = self.record.batch.expires_at - time.time()
                if seconds_left <= 0:
                    return "expired"
                await asyncio.wait(
                    {working, cancelled},
                    timeout=min(seconds_left, 60.0),  # the clock jumps when a machine wakes from sleep
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if working.done():
                    return working.result()
            return "cancelled"
        finally:
            for task in (working, cancelled):
                task.cancel()
            await asyncio.gather(working, cancelled, return_exceptions=True)

    async def _work(self, resources: BatchResources) -> FinalStatus:
        try:
            if self.record.batch.in_progress_at is None and not await self._validate(resources):
                return "failed"
            self._thread.shutdown(wait=False)  # thousands of batches may wait for a slot or for their model
            self._thread = _new_thread()
            if not resources.serves(self.record.batch.model):
                names = (self.record.batch.id, self.record.batch.model)
                log.warning("%s is waiting for its model %r, which this server does not serve", *names)
                while not resources.serves(self.record.batch.model):  # noqa: ASYNC110  # models may appear in a folder
                    await asyncio.sleep(_MODEL_CHECK_S)
            await self._with_retry(partial(self._run_requests, resources))
        except ConfigError as error:
            log.error("%s failed: its input file %s", self.record.batch.id, error)
            self._add_input_error(error)
            return "failed"
        return "completed"

    async def _check_input(self) -> None:
        """Raises `InputChanged`, and `ConfigError` if the input cannot be read."""
        await self._data.check_upload(self.record.batch.input_file_id, self._thread)

    def _add_input_error(self, error: ConfigError) -> None:
        """Inserts an error of the input file before those of its lines."""
        if isinstance(error, InputChanged):
            code, message = "input_file_changed", f"the input file in the server's data folder {error}"
        elif isinstance(error, NotJsonLines):
            code, message = "invalid_json", f"the input file {error.reason}"
        else:
            code, message = "input_file_gone", "the input file cannot be read"
        found = self.record.batch.errors
        of_lines = [each for each in found.data if each.line is not None] if found else []
        first = BatchError(code=code, message=message, param="input_file_id")
        self._update(errors=BatchErrors(data=[first, *of_lines]))

    async def _with_retry(self, step: Callable[[], Awaitable[T]]) -> T:
        """Runs `step`, and retries with backoff on any error except `ConfigError`, such as a full disk or a closed
        engine, which may restart."""
        pauses = iter(RETRIES)
        while True:
            try:
                return await step()
            except ConfigError:
                raise
            except Exception as error:
                unexpected = None if isinstance(error, StorageError | EngineClosed) else error
                pause = next(pauses)
                log.error("%s is paused; retrying in %g s: %s", self.record.batch.id, pause, error, exc_info=unexpected)
            await asyncio.sleep(pause)

    # --- validating ---------------------------------------------------------------------------------------------

    async def _validate(self, resources: BatchResources) -> bool:
        """Reads the input once. Returns whether it contains any valid request."""
        stop = threading.Event()
        async with resources.validation_slots:
            try:
                await self._with_retry(self._check_input)
                result = await self._on_thread(lambda: validate_input(self._input(), stop))
            finally:
                stop.set()
        if self._cancelled.is_set():
            return True  # the result may be incomplete; the caller checks for cancellation
        errors = result.errors
        if not result.n_lines:
            errors = [BatchError(code="empty_file", message="the input file has no lines", param="input_file_id")]
        self._update(
            "in_progress" if result.n_valid else None,
            in_progress_at=_now() if result.n_valid else None,
            errors=BatchErrors(data=errors) if errors else None,
            request_counts=RequestCounts(total=result.n_lines),
        )
        if result.n_valid:
            await self._with_retry(self.save)
        return bool(result.n_valid)

    # --- in progress --------------------------------------------------------------------------------------------

    async def _run_requests(self, resources: BatchResources) -> None:
        async with resources.running_slots:
            await self._check_input()
            try:
                journal = await self._on_thread(self._open_journal)
                if not self.record.is_begun:
                    self.record = msgspec.structs.replace(self.record, is_begun=True)
                    await self.save()
                await JobRunner(self._chunks(), journal, *resources.execution(self.record)).run()
            finally:
                await self._close_journal()
            await self._check_input()  # it may have been shortened or changed while it was read

    def _input(self) -> Iterator[JobRequest | RejectedLine]:
        batch = self.record.batch
        return read_batch_input(self._data.content(batch.input_file_id), batch.endpoint, self._urls)

    def _chunks(self) -> Iterator[Sequence[JobRequest | RejectedLine]]:
        return chunks(self._input())

    def _open_journal(self) -> Journal:
        try:
            self._journal = self._try_to_open_journal(is_begun=self.record.is_begun)
        except LedgerLost as error:
            log.error("%s starts over: %s", self.record.batch.id, error)
            results = map(self._data.content, (self.record.output_file_id, self.record.error_file_id))
            left = [self._folder] if self._folder.exists() and any(self._folder.iterdir()) else []
            self._data.set_aside([*left, *results], f"are leftover results of {self.record.batch.id}")
            self._journal = self._try_to_open_journal(is_begun=False)
        return self._journal

    def _try_to_open_journal(self, *, is_begun: bool) -> Journal:
        """`is_begun`: whether there must be a ledger. Raises `LedgerLost`."""
        path = self._folder / "ledger.sqlite3"
        if is_begun and not path.exists():
            raise LedgerLost(f"{path} is missing")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        ledger = Ledger(path)
        try:
            if is_begun and not ledger.is_begun:
                raise LedgerLost(f"{path} was replaced by a new file")
            return Journal(ledger, *self._result_paths())
        except BaseException:
            ledger.close()
            raise

    def _result_paths(self) -> tuple[Path, Path]:
        output, errors = (self._folder / name for name in RESULT_NAMES)
        return output, errors

    async def _close_journal(self) -> None:
        """Also closes a journal whose opening was cancelled: the thread runs one call after another."""
        if journal := await self._on_thread(self._close_open_journal):
            self._forget(journal)

    def _forget(self, journal: Journal) -> None:
        """Drops a closed journal and keeps its counts."""
        self._update(**_progress(self.record.batch, journal))
        self._result_bytes = journal.committed_bytes
        self._journal = None

    def _close_open_journal(self) -> Journal | None:
        """Closes the journal if it is open, and returns it."""
        if self._journal:
            self._journal.close()
        return self._journal

    async def _on_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    # --- finalizing ---------------------------------------------------------------------------------------------

    async def _finish_results(self, final_status: FinalStatus) -> None:
        """Writes the last results and stores the final status. No results are written after that."""
        if final_status == "expired":  # unanswered lines get an error, so the input is read again
            try:
                await self._check_input()
            except ConfigError as error:
                log.error("%s failed: its input file %s", self.record.batch.id, error)
                self._add_input_error(error)
                final_status = "failed"
        if final_status == "expired" or self._folder.exists():
            stop = threading.Event()
            try:
                await self._on_thread(partial(self._write_last_results, final_status, stop))
            finally:
                stop.set()
                await self._close_journal()
        self.record = msgspec.structs.replace(self.record, final_status=final_status)
        await self.save()

    def _write_last_results(self, final_status: FinalStatus, stop: threading.Event) -> None:
        journal = self._open_journal()
        if final_status == "expired":
            try:
                until_stopped = takewhile(lambda _: not stop.is_set(), self._chunks())
                reject_unanswered(until_stopped, journal, "batch_expired", _EXPIRED)
            except ConfigError as error:
                log.error(
                    "%s: could not write the unanswered requests to the error file: %s", self.record.batch.id, error
                )

    async def _finalize(self) -> None:
        final_status = self.record.final_status
        assert final_status  # set by _finish_results
        files = await self._on_thread(self._move_results)
        ids = {file.id for file in files}
        batch = msgspec.structs.replace(
            self.record.batch,
            status=final_status,
            output_file_id=self.record.output_file_id if self.record.output_file_id in ids else None,
            error_file_id=self.record.error_file_id if self.record.error_file_id in ids else None,
            **{f"{final_status}_at": _now()},
        )
        record = msgspec.structs.replace(self.record, batch=batch)
        await self._data.query(BatchStore.update_batch, record, files)
        self.record = record
        # On failure the next start deletes the folder.
        await self._on_thread(partial(shutil.rmtree, self._folder, ignore_errors=True))

    def _move_results(self) -> list[File]:
        """Moves the result files into place unless they are already there, and returns them. May be repeated."""
        files = []
        for path, file in zip(self._result_paths(), self._result_files(0, 0), strict=True):
            content = self._data.content(file.id)
            if path.is_file() and path.stat().st_size:
                move_into_place(path, content)
            if content.is_file():
                files.append(msgspec.structs.replace(file, bytes=content.stat().st_size))
        return files

    def _result_files(self, *sizes: int) -> list[File]:
        """The output file and the error file with these sizes."""
        record, now = self.record, _now()
        ids = (record.output_file_id, record.error_file_id)
        return [
            File(
                id=file_id,
                bytes=n_bytes,
                created_at=now,
                expires_at=now + record.output_lifetime_s if record.output_lifetime_s else None,
                filename=f"{record.batch.id}_{kind}.jsonl",
                purpose="batch_output",
            )
            for file_id, kind, n_bytes in zip(ids, ("output", "error"), sizes, strict=True)
        ]


def _progress(batch: Batch, journal: Journal) -> dict[str, Any]:
    """The batch's fields with counts of lines and tokens."""
    completed, failed, tokens = journal.n_completed, journal.n_failed, journal.tokens
    total = max(batch.request_counts.total, completed + failed)
    input_tokens, output_tokens = tokens["prompt_tokens"], tokens["completion_tokens"]
    return {
        "request_counts": RequestCounts(total=total, completed=completed, failed=failed),
        "usage": BatchUsage(
            input_tokens=input_tokens,
            input_tokens_details=InputDetails(cached_tokens=tokens["cached_tokens"]),
            output_tokens=output_tokens,
            total_tokens=input_tokens + output_tokens,
        ),
    }


def _new_thread() -> ThreadPoolExecutor:
    """A thread for one batch, which starts on the first call."""
    return ThreadPoolExecutor(1, "cppbatch-batch")


def _now() -> int:
    return int(time.time())


_PROMPT_ENDPOINTS: dict[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/embeddings": "embeddings"}
_LINES_PER_PAUSE, _PAUSE_S = 256, 0.0002


class ValidationResult(msgspec.Struct):
    """Counts and first errors of an input."""

    n_lines: int = 0
    n_valid: int = 0
    errors: list[BatchError] = msgspec.field(default_factory=list)


def read_batch_input(path: Path, endpoint: str, urls: Collection[str]) -> Iterator[JobRequest | RejectedLine]:
    """The entries of a batch's input. Rejects requests to other endpoints than the batch's.

    `urls`: the endpoints that batches support. Raises `ConfigError` if the file cannot be read.
    """
    input_format = InputFormat(path=path, kind="jsonl", endpoint=_PROMPT_ENDPOINTS.get(endpoint, "completions"))
    with InputReader(input_format, urls) as reader:
        for entry in reader:
            if isinstance(entry, JobRequest) and entry.url != endpoint:
                message = f"url: is {entry.url}; it must be the endpoint of the batch, {endpoint}"
                yield entry.rejected("mismatched_endpoint", message)
            else:
                yield entry


def validate_input(entries: Iterable[JobRequest | RejectedLine], stop: threading.Event) -> ValidationResult:
    """Counts the entries and collects the first errors. Returns an incomplete result after `stop` is set."""
    result = ValidationResult()
    for entry in entries:
        result.n_lines += 1
        if isinstance(entry, JobRequest):
            result.n_valid += 1
        elif len(result.errors) < 100:  # in the batch object; the error file contains all errors
            result.errors.append(BatchError(code=entry.code, message=entry.message, line=entry.line))
        if result.n_lines % _LINES_PER_PAUSE == 0:
            if stop.is_set():
                break
            time.sleep(_PAUSE_S)  # lets the event loop acquire the GIL
    return result
