"""SQLite databases that survive a power loss and are used by one process at a time."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cppbatch.errors import DiskFull, InUse, StorageError

_MIN_FREE_BYTES = 1 << 16  # SQLite needs some free disk space for every change
_LOCK_TIMEOUT_S = 2.0  # enough for a process that is shutting down

Migration = Sequence[str]
"""The SQL statements that upgrade a database by one version."""

_IN_USE = "is in use by another cppbatch: stop that process, or use another folder or output"
_REASONS = {
    "full": "cannot grow, the disk is full: free some space and start again; nothing that was written is lost",
    "readonly": "is read-only: make it and its folder writable",
    "read-only": "is read-only: make it and its folder writable",
    "unable to open": "cannot be opened: its folder must exist and be writable",
    "malformed": "is corrupt: move it away to start over",
    "not a database": "is not a database of cppbatch: move it away to start over",
}
"""Explanations by a part of SQLite's message."""


class Database:
    """One SQLite file: WAL mode, each commit fsynced, locked exclusively while it is open.

    Not thread-safe: one thread at a time. All methods raise `StorageError`.
    """

    def __init__(self, path: Path, migrations: Sequence[Migration]) -> None:
        """Opens or creates the file, and upgrades it to version `len(migrations)`."""
        self.path = path
        with self._storage_errors():
            self._db = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            with self._storage_errors():
                self._db.execute("PRAGMA locking_mode = EXCLUSIVE")  # keeps other processes out
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
        with self.transaction():  # acquires the lock even if there was nothing to upgrade
            self._db.execute(f"PRAGMA user_version = {len(migrations)}")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits on exit, durably; rolls back on an exception."""
        with self._storage_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # on a full disk SQLite has rolled back already
                    self._db.execute("ROLLBACK")
                raise

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Executes one statement and returns its rows."""
        with self._storage_errors():
            return self._db.execute(statement, values).fetchall()

    def execute_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        """Executes one statement for each row of values."""
        with self._storage_errors():
            self._db.executemany(statement, rows)

    def close(self) -> None:
        """Closes the database, so that another process can open it."""
        self._db.close()

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
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
        """SQLite reports an I/O error instead of a full disk if one of its own files, such as the WAL, cannot grow."""
        try:
            return "disk I/O error" in text and shutil.disk_usage(self.path.parent).free < _MIN_FREE_BYTES
        except OSError:
            return False
