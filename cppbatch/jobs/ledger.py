"""The state of each line of a job's input, in a SQLite file, so that an interrupted job can resume."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cppbatch.errors import StorageError
from cppbatch.jobs.database import Database, Kind
from cppbatch.jobs.job_request import JobRequest, Json, RejectedLine, hash64

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
        message = f"line {line} has the same custom_id {request.custom_id!r}; each custom_id must be unique"
        return request.rejected("duplicate_id", message)

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
