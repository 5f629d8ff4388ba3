"""SQLite databases that are durable across power loss and used by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cppbatch.errors import DiskFull, InUse, StorageError
from cppbatch.jobs.durable_files import beside, fsync_folder, make_private, storage_errors
from cppbatch.regular_files import refuse_special

if sys.platform != "win32":
    import fcntl

log = logging.getLogger("cppbatch.jobs")

IN_MEMORY = Path(":memory:")
"""The path of a database that is not kept, as SQLite has it."""

_LOCK_TIMEOUT_S = 2.0  # enough for a process that is shutting down
_PRIVATE_FILE = 0o600  # databases name files, and have prompts of ordered jobs; a reader's lock would keep others out
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

Migration = Sequence[str]
"""The SQL statements that upgrade a database by one version."""


class Kind(NamedTuple):
    """The schema and maintenance settings of a database."""

    application_id: int
    """In the file header. Databases of 0.1.0 do not have one (0); they are recognised by their tables."""
    migrations: Sequence[Migration]
    check: str
    """The check when the database is opened: integrity_check, or quick_check, which skips the indices and is about ten
    times as fast."""
    checkpoint_s: float
    """Seconds between checkpoints while there are commits; 0: after each commit."""


_NO_LOCKS = "cannot be locked, because its file system has no working locks: use a folder on a local disk"
_IN_USE = "is in use by another cppbatch: stop that process, or use another folder or output"
_CORRUPT = "is corrupt: restore it from a backup, or move it away to start over"
_REASONS = {
    "full": "cannot grow because the disk is full: free some space and restart; no data was lost",
    "readonly": "is read-only: make it and its folder writable",
    "read-only": "is read-only: make it and its folder writable",
    "unable to open": "cannot be opened: its folder must exist and be writable",
    "malformed": _CORRUPT,
    "decode": _CORRUPT,
    "not a database": "is not a database of cppbatch: move it away to start over, or restore it from a backup",
}
"""Explanations, by a substring of SQLite's message."""


class Database:
    """One SQLite file: WAL mode, each commit fsynced, locked exclusively while it is open, readable by its owner only.

    A checkpoint moves the WAL's pages to the file and empties the WAL. SQLite does not make automatic checkpoints, so
    the file always has a complete state, and if any part of the WAL is lost, the rest is a state that was committed.

    Not thread-safe: one thread at a time. All methods raise `StorageError`.
    """

    def __init__(self, path: Path, kind: Kind, *, must_exist: bool = False) -> None:
        """Opens or creates the file, and upgrades it to the newest version.

        `must_exist`: raises `StorageError` if the database is new or has no tables.
        """
        self.path, self._kind = path, kind
        self._next_checkpoint = time.monotonic() + kind.checkpoint_s
        with storage_errors(path):
            refuse_special(path)
        with self._storage_errors():
            self._check_with_wal()
            if path != IN_MEMORY:
                with contextlib.suppress(OSError):  # it exists, or SQLite says why it cannot
                    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _PRIVATE_FILE))
            self._db = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            with self._storage_errors():
                self._db.execute("PRAGMA locking_mode = EXCLUSIVE")  # keeps other processes out
                version = self._check_version(self._db)  # before any write, in case the file is another program's
                if must_exist and not version:
                    raise StorageError(
                        f"{path} has no tables, but its data exists: restore it from a backup, or use another folder"
                    )
                self._check_integrity(self._db)
                for suffix in ("", "-wal", "-shm"):
                    make_private(path.with_name(path.name + suffix), _PRIVATE_FILE)
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.execute("PRAGMA wal_autocheckpoint = 0")
            self._migrate(version)
            if version == 0:
                fsync_folder(path.parent)
        except BaseException:
            self._db.close()
            raise

    def _check_with_wal(self) -> None:
        """Checks a database with a WAL through a read-only connection. A writable connection would copy the WAL into
        the file on close, even if the WAL is damaged or belongs to another database."""
        wal, shm = (beside(self.path, suffix) for suffix in ("-wal", "-shm"))
        if not self.path.exists() or not wal.exists() or not wal.stat().st_size:
            return
        has_shm = shm.exists()
        uri = f"{self.path.absolute().as_uri()}?mode=ro"
        try:
            with contextlib.closing(sqlite3.connect(uri, timeout=_LOCK_TIMEOUT_S, uri=True)) as db:
                self._check_version(db)
                self._check_integrity(db)
        finally:
            if not has_shm:
                shm.unlink(missing_ok=True)

    def _check_version(self, db: sqlite3.Connection) -> int:
        """Returns the version of the database; 0 if it is new. Raises `StorageError` if it is of another kind."""
        application_id, migrations = self._kind.application_id, self._kind.migrations
        ((found_id,),) = db.execute("PRAGMA application_id")
        ((version,),) = db.execute("PRAGMA user_version")
        tables, expected = _tables(db), _tables_of(migrations[:version])
        if found_id != application_id and (found_id or not expected <= tables or (tables and not version)):
            raise StorageError(f"{self.path} {_REASONS['not a database']} (its tables: {', '.join(sorted(tables))})")
        if version > len(migrations):
            raise StorageError(
                f"{self.path} was written by a newer cppbatch (format version {version}; this one supports "
                f"{len(migrations)}): update cppbatch, or move the file away"
            )
        if missing := expected - tables:
            raise StorageError(f"{self.path} {_CORRUPT} (no table {', '.join(sorted(missing))})")
        return int(version)

    def _check_integrity(self, db: sqlite3.Connection) -> None:
        ((verdict,),) = db.execute(f"PRAGMA {self._kind.check}(1)")
        if verdict != "ok":
            raise StorageError(f"{self.path} {_CORRUPT} ({verdict})")

    def _migrate(self, version: int) -> None:
        migrations = self._kind.migrations
        with self.transaction():  # acquires the lock even if there is nothing to upgrade
            for statements in migrations[version:]:
                for statement in statements:
                    self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {len(migrations)}")
            self._db.execute(f"PRAGMA application_id = {self._kind.application_id}")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits on exit, durably; rolls back on an exception."""
        with self._storage_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # on a full disk, SQLite has already rolled back
                    self._db.execute("ROLLBACK")
                raise
        if time.monotonic() >= self._next_checkpoint:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Empties the WAL. If that fails, the commits stay in the WAL, durably, until the next checkpoint."""
        try:
            # TRUNCATE: if a WAL remains and loses its end, SQLite reads its older pages, not the file's newer ones.
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            log.warning("%s: checkpoint failed, retrying after the next commit: %s", self.path, error)
        else:
            self._next_checkpoint = time.monotonic() + self._kind.checkpoint_s

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Executes one statement and returns its rows."""
        with self._storage_errors():
            return self._db.execute(statement, values).fetchall()

    def execute_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> int:
        """Executes one statement for each row of values. Returns the number of changed rows."""
        with self._storage_errors():
            return max(0, self._db.executemany(statement, rows).rowcount)  # -1: no rows were given

    def close(self) -> None:
        """Closes the database, so that another process can open it. SQLite makes a checkpoint and deletes the WAL."""
        self._db.close()

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:
            raise StorageError(f"{self.path} {_CORRUPT} (a text is not UTF-8)") from error
        except sqlite3.Error as error:
            text = str(error)
            if "locked" in text:
                if not self._has_locks():
                    raise StorageError(f"{self.path} {_NO_LOCKS}") from error
                raise InUse(f"{self.path} {_IN_USE}") from error
            reason = next((reason for word, reason in _REASONS.items() if word in text), "failed")
            kind = DiskFull if "full" in text or self._is_disk_full(text) else StorageError
            raise kind(f"{self.path} {reason} (SQLite: {text})") from error

    def _has_locks(self) -> bool:
        """Whether files in the folder can be locked. If not, SQLite says that the database is locked."""
        if sys.platform != "win32":
            try:
                with tempfile.TemporaryFile(dir=self.path.parent) as file:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                return error.errno not in _WITHOUT_LOCKS
        return True

    def _is_disk_full(self, text: str) -> bool:
        """SQLite reports an I/O error instead of a full disk if one of its own files, such as the WAL, cannot grow."""
        try:
            # SQLite needs some free disk space for each change
            return "disk I/O error" in text and shutil.disk_usage(self.path.parent).free < 1 << 16
        except OSError:
            return False


def _tables(db: sqlite3.Connection) -> set[str]:
    rows = db.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    return {name for (name,) in rows}


def _tables_of(migrations: Sequence[Migration]) -> set[str]:
    """The tables that these migrations create."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        for statements in migrations:
            for statement in statements:
                db.execute(statement)
        return _tables(db)
