"""The database of the server's files and batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from cppbatch.errors import Conflict, InvalidRequest, NotFound, StorageError
from cppbatch.jobs.batches.records import Batch, BatchRecord, File
from cppbatch.jobs.database import Database, Kind

T = TypeVar("T")

_MIGRATIONS = (
    (
        """CREATE TABLE files (
            number INTEGER PRIMARY KEY AUTOINCREMENT,   -- insertion order
            id TEXT NOT NULL UNIQUE,
            purpose TEXT NOT NULL,
            expires_at INTEGER,
            record BLOB NOT NULL                        -- `File` as JSON
        )""",
        "CREATE INDEX expiring_files ON files (expires_at) WHERE expires_at IS NOT NULL",
        """CREATE TABLE batches (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            input_file_id TEXT NOT NULL,
            is_open INTEGER NOT NULL,
            record BLOB NOT NULL                        -- `BatchRecord` as JSON
        )""",
        "CREATE INDEX open_batches ON batches (input_file_id) WHERE is_open",
    ),
    (  # files and batches stored by 0.1.0 have no owner: they are visible to all, as before
        "ALTER TABLE files ADD COLUMN owner TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE batches ADD COLUMN owner TEXT NOT NULL DEFAULT ''",
    ),
    (
        "ALTER TABLE files ADD COLUMN sha256 TEXT",  # NULL: unknown, of uploads before this version and of results
        # Files whose contents may still be on the disk: only those may be deleted without a row.
        "CREATE TABLE deleted_files (id TEXT PRIMARY KEY) WITHOUT ROWID",
    ),
)
_KIND = Kind(0x63706A62, _MIGRATIONS, check="integrity_check", checkpoint_s=0)
_VISIBLE = "(? IS NULL OR owner IN ('', ?))"


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a list to return."""

    after: str | None = None
    """The ID of the last element of the previous page."""
    limit: int
    newest_first: bool = True


class KnownContents(NamedTuple):
    """The contents of the data folder according to the database."""

    sizes: dict[str, int]
    """The size of each file, by ID."""
    future_outputs: dict[str, str]
    """The IDs of the future result files of open batches, with the batch's ID."""
    deleted: set[str]
    """The IDs of deleted files."""
    batches: dict[str, bool]
    """All batches by ID, and whether they are open."""


class BatchStore:
    """One SQLite file. Not thread-safe: one thread at a time. Raises `StorageError`.

    `viewer`: only files and batches of this owner, and those without an owner, are visible; None: all are.
    """

    def __init__(self, path: Path, *, must_exist: bool = False) -> None:
        """`must_exist`: as for `Database`."""
        self._db = Database(path, _KIND, must_exist=must_exist)

    def close(self) -> None:
        """Closes the file, so that another process can open it."""
        self._db.close()

    def read_contents(self) -> KnownContents:
        """Reads all rows. Raises `StorageError` if one is damaged."""
        try:
            files = {
                file_id: msgspec.json.decode(record, type=File)
                for file_id, record in self._db.execute("SELECT id, record FROM files")
            }
            records = {
                batch_id: msgspec.json.decode(record, type=BatchRecord)
                for batch_id, record in self._db.execute("SELECT id, record FROM batches")
            }
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:  # TypeError: not text, but a number
            raise StorageError(f"{self._db.path} is corrupt: restore it from a backup (a row: {error})") from error
        if any(each_id != file.id for each_id, file in files.items()) or any(
            each_id != record.batch.id for each_id, record in records.items()
        ):
            raise StorageError(f"{self._db.path} is corrupt: restore it from a backup (a row has two IDs)")
        open_records = [record for record in records.values() if not record.batch.has_ended]
        return KnownContents(
            sizes={file_id: file.bytes for file_id, file in files.items()},
            future_outputs={
                file_id: record.batch.id
                for record in open_records
                for file_id in (record.output_file_id, record.error_file_id)
            },
            deleted={file_id for (file_id,) in self._db.execute("SELECT id FROM deleted_files")},
            batches={batch_id: not record.batch.has_ended for batch_id, record in records.items()},
        )

    @property
    def was_used(self) -> bool:
        """Whether there has ever been a file or a batch."""
        return bool(self._db.execute("SELECT name FROM sqlite_sequence"))

    # --- files --------------------------------------------------------------------------------------------------

    def add_file(self, file: File, owner: str = "", sha256: str | None = None) -> None:
        """Adds a file; does nothing if its ID exists."""
        with self._db.transaction():
            self._insert(file, owner, sha256)

    def _insert(self, file: File, owner: str, sha256: str | None = None) -> None:
        self._db.execute(
            "INSERT OR IGNORE INTO files (id, purpose, expires_at, record, owner, sha256) VALUES (?, ?, ?, ?, ?, ?)",
            (file.id, file.purpose, file.expires_at, msgspec.json.encode(file), owner, sha256),
        )

    def upload(self, file_id: str) -> tuple[int, str | None]:
        """The size and the SHA-256 of a file as it was uploaded; None: unknown. Raises `NotFound`."""
        size = self.file(file_id).bytes
        ((sha256,),) = self._db.execute("SELECT sha256 FROM files WHERE id = ?", (file_id,))
        return size, sha256

    def file(self, file_id: str, viewer: str | None = None) -> File:
        """Returns a file. Raises `NotFound`."""
        found = f"SELECT record FROM files WHERE id = ? AND {_VISIBLE}"
        if rows := self._db.execute(found, (file_id, viewer, viewer)):
            return msgspec.json.decode(rows[0][0], type=File)
        raise NotFound("id", f"file {file_id[:80]!r} not found")

    def files(self, page: Page, purpose: str | None = None, viewer: str | None = None) -> tuple[list[File], bool]:
        """A page of files, optionally of one purpose, and whether there are more."""
        where = {} if purpose is None else {"purpose = ?": purpose}
        return self._page("files", page, File, viewer, where)

    def delete_file(self, file_id: str, viewer: str | None = None) -> None:
        """Deletes a file's row. Raises `NotFound`, and `Conflict` if an open batch reads the file."""
        with self._db.transaction():
            self.file(file_id, viewer)
            if rows := self._db.execute("SELECT id FROM batches WHERE is_open AND input_file_id = ?", (file_id,)):
                raise Conflict("id", f"{file_id} is the input of {rows[0][0]}, which is still running: cancel it first")
            self._delete([(file_id,)])

    def _delete(self, ids: Sequence[tuple[str]]) -> None:
        self._db.execute_many("DELETE FROM files WHERE id = ?", ids)
        self._db.execute_many("INSERT OR IGNORE INTO deleted_files VALUES (?)", ids)

    def forget_deleted(self, ids: Sequence[str]) -> None:
        """Removes the deletion notes of files after their contents were deleted from disk."""
        if ids:
            with self._db.transaction():
                self._db.execute_many("DELETE FROM deleted_files WHERE id = ?", [(file_id,) for file_id in ids])

    def delete_expired(self, now: int) -> list[str]:
        """Deletes the rows of expired files, except inputs of open batches, and returns their IDs."""
        with self._db.transaction():
            rows = self._db.execute(
                "SELECT id FROM files WHERE expires_at <= ? "
                "AND id NOT IN (SELECT input_file_id FROM batches WHERE is_open)",
                (now,),
            )
            self._delete([(file_id,) for (file_id,) in rows])
        return [file_id for (file_id,) in rows]

    # --- batches ------------------------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord, viewer: str | None = None) -> None:
        """Adds a new batch. Raises `InvalidRequest` if its input is not visible or has another purpose."""
        batch = record.batch
        with self._db.transaction():
            found = f"SELECT purpose FROM files WHERE id = ? AND {_VISIBLE}"
            rows = self._db.execute(found, (batch.input_file_id, viewer, viewer))
            if not rows:
                raise InvalidRequest("input_file_id", f"file {batch.input_file_id[:80]!r} not found")
            if rows[0][0] != "batch":
                raise InvalidRequest(
                    "input_file_id",
                    f"{batch.input_file_id} was uploaded with purpose {rows[0][0]!r}; its purpose must be 'batch'",
                )
            self._db.execute(
                "INSERT INTO batches (id, input_file_id, is_open, record, owner) VALUES (?, ?, TRUE, ?, ?)",
                (batch.id, batch.input_file_id, msgspec.json.encode(record), record.owner),
            )

    def batch(self, batch_id: str, viewer: str | None = None) -> Batch:
        """Returns a batch. Raises `NotFound`."""
        found = f"SELECT record FROM batches WHERE id = ? AND {_VISIBLE}"
        if rows := self._db.execute(found, (batch_id, viewer, viewer)):
            return msgspec.json.decode(rows[0][0], type=BatchRecord).batch
        raise NotFound("id", f"batch {batch_id[:80]!r} not found")

    def batches(self, page: Page, viewer: str | None = None) -> tuple[list[Batch], bool]:
        """A page of batches, and whether there are more."""
        records, has_more = self._page("batches", page, BatchRecord, viewer, {})
        return [record.batch for record in records], has_more

    def open_batches(self) -> list[BatchRecord]:
        """The batches that have not ended, oldest first."""
        rows = self._db.execute("SELECT record FROM batches WHERE is_open ORDER BY number")
        return [msgspec.json.decode(record, type=BatchRecord) for (record,) in rows]

    def update_batch(self, record: BatchRecord, outputs: Sequence[File] = ()) -> None:
        """Updates a batch and adds its output files, in one commit."""
        with self._db.transaction():
            for file in outputs:
                self._insert(file, record.owner)
            self._db.execute(
                "UPDATE batches SET is_open = ?, record = ? WHERE id = ?",
                (not record.batch.has_ended, msgspec.json.encode(record), record.batch.id),
            )

    # --- both ---------------------------------------------------------------------------------------------------

    def _page(
        self, table: str, page: Page, kind: type[T], viewer: str | None, conditions: dict[str, str]
    ) -> tuple[list[T], bool]:
        """`conditions`: {condition with a ?: value}."""
        where, values = " AND ".join([_VISIBLE, *conditions]), [viewer, viewer, *conditions.values()]
        order, beyond = ("DESC", "<") if page.newest_first else ("ASC", ">")
        if page.after is not None:
            found = f"SELECT number FROM {table} WHERE id = ? AND {_VISIBLE}"
            rows = self._db.execute(found, (page.after, viewer, viewer))
            if not rows:
                raise InvalidRequest("after", f"{page.after[:80]!r} is not in the list")
            where, values = f"{where} AND number {beyond} ?", [*values, rows[0][0]]
        listed = self._db.execute(
            f"SELECT record FROM {table} WHERE {where} ORDER BY number {order} LIMIT ?", [*values, page.limit + 1]
        )
        records = [msgspec.json.decode(record, type=kind) for (record,) in listed[: page.limit]]
        return records, len(listed) > page.limit
