"""What has become of each line of a job's input: on disk, so that a job goes on where it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from cppbatch.errors import StorageError
from cppbatch.jobs.database import Database
from cppbatch.jobs.hashing import hash64
from cppbatch.jobs.job_request import JobRequest, Json, RejectedLine

_MIGRATIONS = (
    (
        """CREATE TABLE items (
            line INTEGER PRIMARY KEY,
            id INTEGER UNIQUE,          -- hash of the custom_id; NULL: none, or that of an earlier line
            content INTEGER NOT NULL,   -- hash of what stood there
            state INTEGER NOT NULL
        )""",
        "CREATE INDEX open_items ON items (line) WHERE state = 0",
        "CREATE TABLE held (line INTEGER PRIMARY KEY, result BLOB NOT NULL)",
        "CREATE TABLE numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
        "CREATE TABLE notes (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    ),
)


class LineState(IntEnum):
    """Of a line."""

    OPEN = 0
    DONE = 1
    FAILED = 2


class FinishedLine(NamedTuple):
    """A line that has been dealt with."""

    line: int
    state: LineState


class Ledger:
    """One job's lines. For one thread at a time. Raises `StorageError`.

    Lines that were left open are forgotten when it is opened: the input may have been edited since, and tells anew
    which there are, and what they are called.
    """

    def __init__(self, path: Path) -> None:
        self._db = Database(path, _MIGRATIONS)
        with self._db.transaction():
            self._db.execute("DELETE FROM items WHERE state = 0")
        self._n_known = 0  # up to this one, lines were registered
        self.n_done, self.n_failed = self._count(LineState.DONE), self._count(LineState.FAILED)

    def _count(self, state: LineState) -> int:
        ((n,),) = self._db.execute("SELECT count(*) FROM items WHERE state = ?", (state,))
        return int(n)

    def close(self) -> None:
        """Lets others have it."""
        self._db.close()

    # --- lines --------------------------------------------------------------------------------------------------

    def register(self, entries: Sequence[JobRequest | RejectedLine]) -> tuple[list[JobRequest], list[RejectedLine]]:
        """Notes lines, which follow each other in the input, and says which of them are still to be answered, and
        which to be refused: also those whose id an earlier line has. Lines that have been dealt with are neither.

        Raises `StorageError` when a line is not what it was when its result was written.
        """
        rows = [(entry.line, _id_of(entry), entry.content) for entry in entries]
        first, last = rows[0][0], rows[-1][0]
        with self._db.transaction():
            self._db.execute("DELETE FROM items WHERE state = 0 AND line BETWEEN ? AND ?", (first, last))
            self._db.each("INSERT OR IGNORE INTO items VALUES (?, ?, ?, 0)", rows)
            known = self._known(first, last)
            twice = {line: content for line, _, content in rows if line not in known}  # another line has its id
            self._db.each("INSERT INTO items VALUES (?, NULL, ?, 0)", twice.items())
        self._n_known = max(self._n_known, last)
        to_answer: list[JobRequest] = []
        to_refuse: list[RejectedLine] = []
        for entry in entries:
            content, state = known.get(entry.line, (entry.content, LineState.OPEN))
            if state == LineState.DONE and content != entry.content:
                raise StorageError(
                    f"line {entry.line} of the input has changed since its result was written: "
                    "write the results of the new input to another file"
                )
            if state != LineState.OPEN:
                continue
            if isinstance(entry, RejectedLine):
                to_refuse.append(entry)
            elif entry.line in twice:
                to_refuse.append(self._refused_twice(entry))
            else:
                to_answer.append(entry)
        return to_answer, to_refuse

    def _known(self, first: int, last: int) -> dict[int, tuple[int, int]]:
        """The hash of each line's content, and its state."""
        rows = self._db.execute("SELECT line, content, state FROM items WHERE line BETWEEN ? AND ?", (first, last))
        return {line: (content, state) for line, content, state in rows}

    def _refused_twice(self, item: JobRequest) -> RejectedLine:
        ((line,),) = self._db.execute("SELECT line FROM items WHERE id = ?", (hash64(item.custom_id.encode()),))
        message = f"the custom_id {item.custom_id!r} is that of line {line} already; each line needs its own"
        return RejectedLine(
            line=item.line, code="duplicate_id", message=message, custom_id=item.custom_id, content=item.content
        )

    def record(
        self, ended: Iterable[FinishedLine], numbers: dict[str, int], held: Iterable[tuple[int, bytes]] = ()
    ) -> None:
        """Notes lines that have been dealt with, and these numbers' new values, in one commit."""
        ended = list(ended)
        with self._db.transaction():
            self._db.each("UPDATE items SET state = ? WHERE line = ?", [(state, line) for line, state in ended])
            self._db.each("INSERT INTO held VALUES (?, ?)", held)
            self._set(numbers)
        self.n_done += sum(state == LineState.DONE for _, state in ended)
        self.n_failed += sum(state == LineState.FAILED for _, state in ended)

    def reopen_failed(self) -> None:
        """The failed lines are to be answered again, and what was written of them does not count any more."""
        with self._db.transaction():
            self._db.execute("DELETE FROM items WHERE state = ?", (LineState.FAILED,))
            self._set({"error_bytes": 0})
        self.n_failed = 0

    # --- results that wait for those of earlier lines -----------------------------------------------------------

    def ready(self, most: int) -> list[tuple[int, bytes]]:
        """Of the held results, those before every line that is still open or was not registered yet, in order."""
        return self._db.execute(
            "SELECT line, result FROM held "
            "WHERE line <= ?1 AND line < ifnull((SELECT min(line) FROM items WHERE state = 0), ?1 + 1) "
            "ORDER BY line LIMIT ?2",
            (self._n_known, most),
        )

    def let_go(self, lines: Iterable[int], numbers: dict[str, int]) -> None:
        """These results are held no more."""
        with self._db.transaction():
            self._db.each("DELETE FROM held WHERE line = ?", [(line,) for line in lines])
            self._set(numbers)

    # --- numbers and notes --------------------------------------------------------------------------------------

    def number(self, name: str) -> int:
        """A number; 0 if it was never set."""
        rows = self._db.execute("SELECT value FROM numbers WHERE name = ?", (name,))
        return int(rows[0][0]) if rows else 0

    def _set(self, numbers: dict[str, int]) -> None:
        self._db.each("INSERT OR REPLACE INTO numbers VALUES (?, ?)", numbers.items())

    def note(self, name: str) -> Json | None:
        """A note; None if there is none."""
        rows = self._db.execute("SELECT value FROM notes WHERE name = ?", (name,))
        return msgspec.json.decode(rows[0][0]) if rows else None

    def set_note(self, name: str, value: Json) -> None:
        """Keeps a note."""
        with self._db.transaction():
            self._db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, msgspec.json.encode(value)))


def _id_of(entry: JobRequest | RejectedLine) -> int | None:
    return hash64(entry.custom_id.encode()) if isinstance(entry, JobRequest) else None
