"""SQLite files that survive a power loss, in the hands of one process at a time."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cppbatch.errors import DiskFull, InUse, StorageError

_LEAST_ROOM = 1 << 16  # bytes on the disk, of which SQLite needs some for every change
_WAIT_S = 2.0  # for a process that is just going down

Migration = Sequence[str]
"""The statements that lead from one version of a file to the next."""

_IN_USE = "is in use by another cppbatch: end that one, or use another folder or output"
_REASONS = {
    "full": "cannot grow, the disk is full: free some space and start again; nothing that was written is lost",
    "readonly": "is read-only: make it and its folder writable",
    "read-only": "is read-only: make it and its folder writable",
    "unable to open": "cannot be opened: its folder must be there and be writable",
    "malformed": "is broken: move it away to begin anew",
    "not a database": "is no database of ours: move it away to begin anew",
}
"""What SQLite's messages come to, by a word that is in them."""


class Database:
    """One SQLite file: WAL, each commit on the disk before it returns, locked for as long as it is open.

    For one thread at a time. Raises `StorageError`, also when it is opened.
    """

    def __init__(self, path: Path, migrations: Sequence[Migration]) -> None:
        """Opens or makes the file, and brings it to the version that the last of the migrations leads to."""
        self.path = path
        with self._explained():
            self._db = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
        try:
            with self._explained():
                self._db.execute("PRAGMA locking_mode = EXCLUSIVE")  # also keeps a second process out
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
                self._check()
            self._migrate(migrations)
        except BaseException:
            self._db.close()
            raise

    def _check(self) -> None:
        ((verdict,),) = self._db.execute("PRAGMA quick_check(1)")
        if verdict != "ok":
            raise StorageError(f"{self.path} {_REASONS['malformed']} ({verdict})")

    def _migrate(self, migrations: Sequence[Migration]) -> None:
        ((version,),) = self.execute("PRAGMA user_version")
        if version > len(migrations):
            raise StorageError(
                f"{self.path} was written by a newer cppbatch (version {version}; this one knows {len(migrations)}): "
                "update this one, or move the file away"
            )
        for number, statements in enumerate(migrations[version:], version + 1):
            with self.transaction():
                for statement in statements:
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {number}")
        with self.transaction():  # takes the lock, even when there was nothing to do
            self._db.execute(f"PRAGMA user_version = {len(migrations)}")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it is on the disk when this ends without an exception, else none of it."""
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # a full disk has rolled it back already
                    self._db.execute("ROLLBACK")
                raise

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Runs one statement; its rows."""
        with self._explained():
            return self._db.execute(statement, values).fetchall()

    def each(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        """Runs one statement for each of these rows of values."""
        with self._explained():
            self._db.executemany(statement, rows)

    def close(self) -> None:
        """Ends it; another process may open the file."""
        self._db.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            text = str(error)
            if "locked" in text:
                raise InUse(f"{self.path} {_IN_USE}") from error
            reason = next((reason for word, reason in _REASONS.items() if word in text), "failed")
            kind = DiskFull if "full" in text or self._is_disk_full(text) else StorageError
            raise kind(f"{self.path} {reason} (SQLite: {text})") from error

    def _is_disk_full(self, text: str) -> bool:
        """SQLite calls it an I/O error where a file of its own cannot grow, as the log of a database."""
        try:
            return "disk I/O error" in text and shutil.disk_usage(self.path.parent).free < _LEAST_ROOM
        except OSError:
            return False
