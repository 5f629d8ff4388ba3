"""Runs a job: reads its input, runs its requests concurrently, and records results as they arrive."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import msgspec

from cppbatch.errors import StorageError
from cppbatch.jobs.job_request import JobRequest, Json, RejectedLine, RequestHandler
from cppbatch.jobs.journal import Journal, ResultLine, response_line
from cppbatch.models.attention_times import RequestSizes

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
        journal.reject(
            [
                RejectedLine(
                    line=request.line,
                    code=code,
                    message=message,
                    custom_id=request.custom_id,
                    content_hash=request.content_hash,
                )
                for request in requests
            ]
        )


# --- request order ---------------------------------------------------------------------------------------------------
# Splits a job's input into chunks, and orders the requests of a chunk for throughput.


_FIRST_CHUNK_REQUESTS = 64
"""Small, so that the first results arrive soon. Each following chunk has twice as many requests."""
_PREFIX_CHARS = 256
"""Requests are grouped if their prompts share a prefix of this many characters."""
_CHARS_PER_TOKEN = 4
_PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "prompt", "input")
"""The prompt fields of all endpoints, in the order in which they appear in a prompt."""
_MAX_TOKENS_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_SIZED_REQUESTS, _MAX_OUTPUT_TOKENS = 256, 1 << 20
_DEFAULT_OUTPUT_TOKENS = 256
"""The estimated output length of a request that does not limit it."""


def chunks(
    entries: Iterable[JobRequest | RejectedLine], *, max_requests: int = 2048, max_bytes: int = 32 << 20
) -> Iterator[list[JobRequest | RejectedLine]]:
    """Splits an input into non-empty lists, in order.

    A chunk ends when it has its number of requests, at most `max_requests`, or its entries take `max_bytes` of memory.
    """
    chunk: list[JobRequest | RejectedLine] = []
    n_bytes, n_requests = 0, min(_FIRST_CHUNK_REQUESTS, max_requests)
    for entry in entries:
        chunk.append(entry)
        n_bytes += _memory_bytes(entry)
        if len(chunk) >= n_requests or n_bytes >= max_bytes:
            yield chunk
            chunk = []
            n_bytes, n_requests = 0, min(2 * n_requests, max_requests)
    if chunk:
        yield chunk


def order_requests(requests: list[JobRequest], *, longest_first: bool) -> list[JobRequest]:
    """The requests in the order in which to submit them.

    Requests whose prompts share a prefix are adjacent, so that the prefix is computed once and then found in the prefix
    cache. Otherwise the order is that of the file, or with `longest_first` by estimated tokens to compute, descending,
    so that no long request remains at the end when all others are done.
    """
    groups: dict[tuple[str, str] | int, list[tuple[int, JobRequest]]] = {}
    for index, request in enumerate(requests):
        prefix, n_chars = _prompt_prefix(request)
        group_key = (request.url, prefix) if n_chars >= _PREFIX_CHARS else index
        n_tokens = n_chars // _CHARS_PER_TOKEN + _output_tokens(request)
        groups.setdefault(group_key, []).append((n_tokens, request))
    if not longest_first:
        return [request for group in groups.values() for _, request in group]
    for group in groups.values():
        group.sort(key=itemgetter(0), reverse=True)
    by_longest = sorted(groups.values(), key=lambda group: group[0][0], reverse=True)
    return [request for group in by_longest for _, request in group]


def estimate_sizes(lines: Iterable[JobRequest | RejectedLine], defaults: Json) -> RequestSizes | None:
    """The estimated sizes of a job's first requests, with answers as long as allowed; None without requests.

    `defaults`: body fields for requests that do not set them.
    """
    first = [line for line in islice(lines, _SIZED_REQUESTS) if isinstance(line, JobRequest)]
    requests = [msgspec.structs.replace(request, body=defaults | request.body) for request in first]
    if not requests:
        return None
    prompt_tokens = sum(_prompt_prefix(request)[1] for request in requests) / _CHARS_PER_TOKEN
    output_tokens = sum(min(max(_output_tokens(request), 1), _MAX_OUTPUT_TOKENS) for request in requests)
    return RequestSizes(len(requests), prompt_tokens, prompt_tokens, output_tokens)


def _prompt_prefix(request: JobRequest) -> tuple[str, int]:
    """The first `_PREFIX_CHARS` characters of the prompt (fewer if it is shorter), and the prompt's total length."""
    prefix, n_chars = "", 0
    for field in _PROMPT_FIELDS:
        for text in _texts(request.body.get(field)):
            n_chars += len(text)
            if len(prefix) < _PREFIX_CHARS:
                prefix = (prefix + text[:_PREFIX_CHARS])[:_PREFIX_CHARS]
    return prefix, n_chars


def _texts(value: object) -> Iterator[str]:
    """All strings in a JSON value, in order. A token ID counts as four characters, the average length of a token."""
    if isinstance(value, str):
        yield value[:_PREFIX_CHARS] if value.startswith("data:") else value  # a file is not text
    elif isinstance(value, int):
        yield f"{value:04x}"
    elif isinstance(value, (list, dict)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _texts(child)


def _output_tokens(request: JobRequest) -> int:
    for field in _MAX_TOKENS_FIELDS:
        value = request.body.get(field)
        if isinstance(value, int):
            return value
    return _DEFAULT_OUTPUT_TOKENS


def _memory_bytes(entry: JobRequest | RejectedLine) -> int:
    """The approximate memory of an entry."""
    if isinstance(entry, RejectedLine):
        return sys.getsizeof(entry.message)
    size, left = 0, [entry.custom_id, entry.body]
    while left:
        value: Any = left.pop()
        size += sys.getsizeof(value)
        if isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
    return size
