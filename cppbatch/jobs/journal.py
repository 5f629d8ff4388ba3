"""A job's result files together with its ledger, and the JSON lines in these files."""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cppbatch.errors import LedgerLost, StorageError
from cppbatch.jobs.durable_files import Database, DurableFile, Kind, StreamFile
from cppbatch.jobs.job_request import JobRequest, JobResponse, Json, RejectedLine, hash64
from cppbatch.regular_files import is_stream
from cppbatch.typed_json import encode_line

_HELD_PER_WRITE = 256  # held results written together
_TOKEN_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")
_OPTIONAL_FIELDS = ("reasoning_content", "tool_calls", "logprobs")
"""Fields of a choice that the short form of a result contains if set."""


class ResultLine(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one input line."""

    line: int
    is_ok: bool
    """False for rejected lines and responses with an error status."""
    data: bytes
    """A line of JSON, with its line end."""
    tokens: dict[str, int] = {}
    """Token counts by name."""


class Journal:
    """Ensures that every line of the input gets exactly one result, even if the process dies at any moment.

    First, a result is appended to its file. Then one commit of the ledger records that the line is finished, and the
    new size of the file. When the journal is opened, data beyond the committed size is truncated.

    Not thread-safe: one thread at a time. Raises `StorageError`.
    """

    def __init__(
        self, ledger: Ledger, output: Path, errors: Path, *, ordered: bool = False, streams: bool = False
    ) -> None:
        """Opens `output` for responses and `errors` for errors. `errors` is created for the first error; if it is the
        same path, `output` has both.

        `ordered`: writes responses in the order of the input. The ledger holds those that arrive early. `streams`:
        whether pipes and devices are written to. Otherwise they are refused. Raises `LedgerLost`.
        """
        self._streams = [path for path in (output, errors) if streams and is_stream(path)]
        if not ledger.is_begun:
            for path in (output, errors):
                if path not in self._streams and path.exists() and (n_bytes := path.stat().st_size):
                    raise LedgerLost(
                        f"{ledger.path} has no record of {path.name}, which has {n_bytes} bytes: the ledger was lost "
                        "or replaced. Restore it from a backup, or start over with another output"
                    )
            ledger.begin()
        self.ledger = ledger
        self._ordered = ordered
        self._errors_path = errors
        self._output = self._open(output, ledger.number("output_bytes"))
        try:
            has_errors = errors != output and (errors in self._streams or errors.exists())
            self._errors = self._open(errors, ledger.number("error_bytes")) if has_errors else None
        except BaseException:
            self._output.close()
            raise
        self.tokens = Counter({name: ledger.number(name) for name in _TOKEN_COUNTS})
        self.committed_bytes = self._sizes
        """Sizes of the output and error files, without unfinished writes."""

    def _open(self, path: Path, size: int) -> DurableFile | StreamFile:
        return (StreamFile if path in self._streams else DurableFile)(path, size)

    @property
    def _sizes(self) -> tuple[int, int]:
        return self._output.size, self._errors.size if self._errors else 0

    @property
    def n_completed(self) -> int:
        """Lines with a successful response."""
        return self.ledger.n_completed

    @property
    def n_failed(self) -> int:
        """Rejected lines and lines with an error response."""
        return self.ledger.n_failed

    def register(self, entries: Sequence[JobRequest | RejectedLine]) -> list[JobRequest]:
        """Registers consecutive entries, writes the errors of rejected lines, and returns the requests to run."""
        to_run, to_reject = self.ledger.register(entries)
        self.reject(to_reject)
        if self._ordered:
            self._write_ready()
        return to_run

    def reject(self, lines: Sequence[RejectedLine]) -> None:
        """Writes the errors of these lines."""
        if lines:
            self.record([rejection_line(line) for line in lines])

    def record(self, results: Sequence[ResultLine]) -> None:
        """Writes these results durably."""
        has_one_file = self._errors_path == self._output.path
        ok = [result for result in results if result.is_ok or has_one_file]
        failed = [] if has_one_file else [result for result in results if not result.is_ok]
        if failed and not self._errors:
            self._errors = DurableFile(self._errors_path, 0)
        sizes: dict[str, int] = {}
        tokens = sum((Counter(result.tokens) for result in results), Counter(self.tokens))
        with self._sizes_restored_on_error():
            if ok and not self._ordered:
                self._output.append(b"".join(result.data for result in ok))
                sizes["output_bytes"] = self._output.size
            if failed and self._errors:
                self._errors.append(b"".join(result.data for result in failed))
                sizes["error_bytes"] = self._errors.size
            self.ledger.record(
                [
                    FinishedLine(result.line, LineState.COMPLETED if result.is_ok else LineState.FAILED)
                    for result in results
                ],
                sizes | tokens,
                [(result.line, result.data) for result in ok] if self._ordered else (),
            )
        self.tokens = tokens
        self.committed_bytes = self._sizes
        if self._ordered:
            self._write_ready()

    def _write_ready(self) -> None:
        while ready := self.ledger.ready(_HELD_PER_WRITE):
            with self._sizes_restored_on_error():
                self._output.append(b"".join(data for _, data in ready))
                self.ledger.release((line for line, _ in ready), {"output_bytes": self._output.size})
            self.committed_bytes = self._sizes

    @contextlib.contextmanager
    def _sizes_restored_on_error(self) -> Iterator[None]:
        """If the ledger's commit fails, makes the next append discard the appended data."""
        sizes = [(file, file.size) for file in (self._output, self._errors) if file]
        try:
            yield
        except BaseException:
            for file, size in sizes:
                file.size = size
            raise

    def close(self) -> None:
        """Closes all files."""
        with contextlib.closing(self.ledger), contextlib.closing(self._output):
            if self._errors:
                self._errors.close()


def response_line(request: JobRequest, response: JobResponse) -> ResultLine:
    """The result of a request with its endpoint's response, which may be an error.

    OpenAI's format, or the short form for a plain prompt: {"custom_id": "a", "line": 1, "text": "Hello", ...}.
    """
    is_short = request.is_plain and response.is_ok
    content = _short_form(request, response) if is_short else _openai_form(request, response)
    tokens = {
        "prompt_tokens": response.prompt_tokens,
        "cached_tokens": response.cached_tokens,
        "completion_tokens": response.completion_tokens,
    }
    return ResultLine(line=request.line, is_ok=response.is_ok, data=_encode_line(content), tokens=tokens)


def rejection_line(line: RejectedLine) -> ResultLine:
    """The result of a line that was not sent to an endpoint."""
    content = {
        "id": _result_id(),
        "custom_id": line.custom_id,
        "line": line.line,
        "response": None,
        "error": {"code": line.code, "message": line.message, "line": line.line},
    }
    return ResultLine(line=line.line, is_ok=False, data=_encode_line(content))


def _openai_form(request: JobRequest, response: JobResponse) -> Json:
    line = {} if response.is_ok else {"line": request.line}
    return {
        "id": _result_id(),
        "custom_id": request.custom_id,
        **line,
        "response": {"status_code": response.status, "request_id": response.request_id, "body": response.body},
        "error": None,
    }


def _short_form(request: JobRequest, response: JobResponse) -> Json:
    body: Json = msgspec.to_builtins(response.body)
    content: Json = {"custom_id": request.custom_id, "line": request.line}
    if "choices" in body:
        choices = [_short_choice(choice) for choice in body["choices"]]
        content |= choices[0] if len(choices) == 1 else {"choices": choices}
    else:
        embeddings = [each["embedding"] for each in body["data"]]
        content |= {"embedding": embeddings[0]} if len(embeddings) == 1 else {"embeddings": embeddings}
    return content | {"usage": body["usage"]}


def _short_choice(choice: Json) -> Json:
    message: dict[str, Any] = choice.get("message") or {"content": choice.get("text")}
    fields = {**message, "logprobs": choice.get("logprobs")}
    optional = {name: fields[name] for name in _OPTIONAL_FIELDS if fields.get(name)}
    return {"text": message["content"], "finish_reason": choice["finish_reason"], **optional}


def _result_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def _encode_line(content: Json) -> bytes:
    return encode_line(content) + b"\n"


# --- ledger ----------------------------------------------------------------------------------------------------------
# The state of each line of a job's input, in a SQLite file, so that an interrupted job can resume.


_MIGRATIONS = (
    (
        """CREATE TABLE items (
            line INTEGER PRIMARY KEY,
            id INTEGER UNIQUE,          -- hash of the custom_id; NULL: none, or used by an earlier line
            content INTEGER NOT NULL,   -- hash of the line
            state INTEGER NOT NULL
        )""",
        "CREATE INDEX open_items ON items (line) WHERE state = 0",
        "CREATE TABLE held (line INTEGER PRIMARY KEY, result BLOB NOT NULL)",
        "CREATE TABLE numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
        "CREATE TABLE notes (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    ),
    (  # new ledgers set it before the first result is written
        "INSERT OR IGNORE INTO numbers SELECT 'output_bytes', 0 FROM items",
    ),
)
# The lines of the last second may be lost with the WAL, but `DurableFile` keeps them. A checkpoint takes four times as
# long as a commit.
_KIND = Kind(0x63706C67, _MIGRATIONS, check="quick_check", checkpoint_s=1)
_COUNTS = {
    "n_completed": "SELECT count(*) FROM items WHERE state = 1",
    "n_failed": "SELECT count(*) FROM items WHERE state = 2",
    "n_held": "SELECT count(*) FROM held",
}


class LineState(IntEnum):
    """The state of a line, as stored."""

    OPEN = 0
    COMPLETED = 1
    FAILED = 2


class FinishedLine(NamedTuple):
    """A line and its final state."""

    line: int
    state: LineState


class Ledger:
    """The lines of one job. Not thread-safe: one thread at a time. Raises `StorageError`.

    Opening a ledger deletes its open lines: the input may have been edited since, so its lines and custom IDs are
    registered again as it is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = Database(path, _KIND)
        try:
            with self._db.transaction():
                self._db.execute("DELETE FROM items WHERE state = 0")
            self.n_completed, self.n_failed, self._n_held = (self._check_count(name) for name in _COUNTS)
        except BaseException:
            self._db.close()
            raise
        self._last_registered = 0

    def _check_count(self, name: str) -> int:
        """A count of rows, checked against the number stored with the file sizes on another page. In a copy made during
        a write, the two can differ, and a line may then lack its result."""
        ((n,),) = self._db.execute(_COUNTS[name])
        if self._has_number(name) and self.number(name) != n:
            raise self._corrupt(f"{name} is {self.number(name)}, but there are {n} rows")
        return int(n)

    def _corrupt(self, reason: str) -> StorageError:
        return StorageError(
            f"{self._db.path} is corrupt: restore it from a backup, or move it away to start over ({reason})"
        )

    def close(self) -> None:
        """Closes the file, so that another process can open it."""
        self._db.close()

    # --- lines --------------------------------------------------------------------------------------------------

    def register(self, entries: Sequence[JobRequest | RejectedLine]) -> tuple[list[JobRequest], list[RejectedLine]]:
        """Registers consecutive entries of the input. Returns (requests to run, lines to reject), without finished
        lines. Requests with the custom ID of an earlier line are among the lines to reject.

        Raises `StorageError` if a completed line has changed.
        """
        rows = [(entry.line, _id_hash(entry), entry.content_hash) for entry in entries]
        first, last = rows[0][0], rows[-1][0]
        with self._db.transaction():
            self._db.execute("DELETE FROM items WHERE state = 0 AND line BETWEEN ? AND ?", (first, last))
            self._db.execute_many("INSERT OR IGNORE INTO items VALUES (?, ?, ?, 0)", rows)
            known = self._read_states(first, last)
            # Rows ignored because another line has the same custom ID.
            duplicates = {line: content for line, _, content in rows if line not in known}
            self._db.execute_many("INSERT INTO items VALUES (?, NULL, ?, 0)", duplicates.items())
        self._last_registered = max(self._last_registered, last)
        to_run: list[JobRequest] = []
        to_reject: list[RejectedLine] = []
        for entry in entries:
            content_hash, state = known.get(entry.line, (entry.content_hash, LineState.OPEN))
            if state == LineState.COMPLETED and content_hash != entry.content_hash:
                raise StorageError(
                    f"line {entry.line} of the input has changed since its result was written: choose another output "
                    "file for the new input"
                )
            if state != LineState.OPEN:
                continue
            if isinstance(entry, RejectedLine):
                to_reject.append(entry)
            elif entry.line in duplicates:
                to_reject.append(self._duplicate(entry))
            else:
                to_run.append(entry)
        return to_run, to_reject

    def _read_states(self, first: int, last: int) -> dict[int, tuple[int, int]]:
        """The content hash and state of each line from `first` to `last`."""
        rows = self._db.execute("SELECT line, content, state FROM items WHERE line BETWEEN ? AND ?", (first, last))
        return {line: (content, state) for line, content, state in rows}

    def _duplicate(self, request: JobRequest) -> RejectedLine:
        ((line,),) = self._db.execute("SELECT line FROM items WHERE id = ?", (hash64(request.custom_id.encode()),))
        return RejectedLine(
            line=request.line,
            code="duplicate_id",
            message=f"line {line} has the same custom_id {request.custom_id!r}; each custom_id must be unique",
            custom_id=request.custom_id,
            content_hash=request.content_hash,
        )

    def record(
        self, finished: Iterable[FinishedLine], numbers: dict[str, int], held: Iterable[tuple[int, bytes]] = ()
    ) -> None:
        """Stores the states of finished lines, new values of these numbers, and results to hold (line, data), in one
        commit."""
        finished = list(finished)
        with self._db.transaction():
            n_completed = self.n_completed + self._finish(finished, LineState.COMPLETED)
            n_failed = self.n_failed + self._finish(finished, LineState.FAILED)
            n_held = self._n_held + self._db.execute_many("INSERT INTO held VALUES (?, ?)", held)
            self._set(numbers | {"n_completed": n_completed, "n_failed": n_failed, "n_held": n_held})
        self.n_completed, self.n_failed, self._n_held = n_completed, n_failed, n_held

    def _finish(self, lines: Iterable[FinishedLine], state: LineState) -> int:
        rows = [(state, each.line) for each in lines if each.state == state]
        return self._db.execute_many("UPDATE items SET state = ? WHERE line = ? AND state = 0", rows)

    def reopen_failed(self) -> None:
        """Deletes all failed lines, so that they are run again, and the committed size of the error file."""
        with self._db.transaction():
            self._db.execute("DELETE FROM items WHERE state = ?", (LineState.FAILED,))
            self._set({"error_bytes": 0, "n_failed": 0})
        self.n_failed = 0

    # --- results held until all earlier lines are finished ------------------------------------------------------

    def ready(self, limit: int) -> list[tuple[int, bytes]]:
        """The first held results, (line, data) in order, that are not preceded by open or unregistered lines."""
        return self._db.execute(
            "SELECT line, result FROM held "
            "WHERE line <= ? AND line < ifnull((SELECT min(line) FROM items WHERE state = 0), ? + 1) "
            "ORDER BY line LIMIT ?",
            (self._last_registered, self._last_registered, limit),
        )

    def release(self, lines: Iterable[int], numbers: dict[str, int]) -> None:
        """Deletes the held results of these lines and stores new values of these numbers, in one commit."""
        with self._db.transaction():
            n_held = self._n_held - self._db.execute_many(
                "DELETE FROM held WHERE line = ?", [(line,) for line in lines]
            )
            self._set(numbers | {"n_held": n_held})
        self._n_held = n_held

    # --- numbers and notes --------------------------------------------------------------------------------------

    def number(self, name: str) -> int:
        """A stored number; 0 if it was never set."""
        rows = self._db.execute("SELECT value FROM numbers WHERE name = ?", (name,))
        value = rows[0][0] if rows else 0
        if not isinstance(value, int):
            raise self._corrupt(f"{name} is {value!r:.80}")
        return value

    @property
    def is_begun(self) -> bool:
        """Whether `begin` was called. If not, existing results do not belong to this ledger."""
        return self._has_number("output_bytes")

    def begin(self) -> None:
        """Durably records that results may follow."""
        with self._db.transaction():
            self._set({"output_bytes": 0})

    def _has_number(self, name: str) -> bool:
        return bool(self._db.execute("SELECT value FROM numbers WHERE name = ?", (name,)))

    def _set(self, numbers: dict[str, int]) -> None:
        self._db.execute_many("INSERT OR REPLACE INTO numbers VALUES (?, ?)", numbers.items())

    def note(self, name: str) -> Json | None:
        """A stored JSON object; None if it was never set."""
        rows = self._db.execute("SELECT value FROM notes WHERE name = ?", (name,))
        try:
            return msgspec.json.decode(rows[0][0], type=dict[str, Any]) if rows else None
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
            raise self._corrupt(f"{name}: {error}") from error

    def set_note(self, name: str, value: Json) -> None:
        """Stores a JSON object."""
        with self._db.transaction():
            self._db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, msgspec.json.encode(value)))


def _id_hash(entry: JobRequest | RejectedLine) -> int | None:
    return hash64(entry.custom_id.encode()) if isinstance(entry, JobRequest) else None
