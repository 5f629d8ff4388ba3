"""The server's data folder: the database, the contents of files, and the working folders of open batches.

jobs.sqlite3     `BatchStore`
incoming/ID      uploads that are not complete
files/ID         contents of files
batches/ID/      ledger.sqlite3, output.jsonl, errors.jsonl of an open batch
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from cppbatch.errors import StorageError
from cppbatch.jobs.batch_records import BatchRecord, File
from cppbatch.jobs.batch_store import BatchStore
from cppbatch.jobs.durable_files import move_into_place, storage_error

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("cppbatch.jobs")

_DATABASE = "jobs.sqlite3"
_SUBFOLDERS = ("incoming", "files", "batches")
_PRIVATE = 0o700  # the files contain users' prompts


class DataFolder:
    """An open data folder. `open_data_folder` makes one.

    The database is consistent with the files whenever the process dies: contents are written before their row and
    deleted after it, and contents without a row are deleted at the next start.
    """

    def __init__(self, folder: Path, store: BatchStore) -> None:
        self.folder = folder
        self._store = store
        self._thread = ThreadPoolExecutor(1, "cppbatch-store")  # commits wait for the disk
        self._incoming, self._files, self._batches = (folder / name for name in _SUBFOLDERS)
        self.open_batches = self._clean_up()
        """The batches that had not ended when the folder was opened."""

    def _clean_up(self) -> list[BatchRecord]:
        """Deletes what a killed process left behind. Returns the open batches."""
        with _storage_errors(self.folder):
            for subfolder in (self._incoming, self._files, self._batches):
                subfolder.mkdir(mode=_PRIVATE, exist_ok=True)
            for file_id in self._store.unknown_files([path.name for path in self._files.iterdir()]):
                self.content(file_id).unlink()
            for path in self._incoming.iterdir():
                path.unlink()
            records = self._store.open_batches()
            for name in {path.name for path in self._batches.iterdir()} - {record.batch.id for record in records}:
                shutil.rmtree(self.batch(name))
        return records

    async def query(self, method: Callable[Concatenate[BatchStore, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a method of the `BatchStore` on its thread, for example `query(BatchStore.file, file_id)`."""
        call = partial(method, self._store, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    # --- paths --------------------------------------------------------------------------------------------------

    def incoming(self, file_id: str) -> Path:
        """Where an upload is written until it is complete."""
        return self._incoming / file_id

    def content(self, file_id: str) -> Path:
        """The contents of a file."""
        return self._files / file_id

    def batch(self, batch_id: str) -> Path:
        """The working folder of an open batch."""
        return self._batches / batch_id

    # --- adding and deleting files ------------------------------------------------------------------------------

    async def add_file(self, file: File, owner: str = "") -> None:
        """Adds the file that was written to `incoming`, durably. Completes even if it is cancelled."""
        await asyncio.to_thread(self._add_file, file, owner)

    def _add_file(self, file: File, owner: str) -> None:
        content = self.content(file.id)
        move_into_place(self.incoming(file.id), content)
        try:
            self._thread.submit(self._store.add_file, file, owner).result()
        except StorageError:
            content.unlink(missing_ok=True)
            raise

    async def delete_file(self, file_id: str, viewer: str | None = None) -> None:
        """Deletes a file, even if cancelled. `viewer`: as in `BatchStore`. Raises `NotFound`, and `Conflict` if an open
        batch reads the file."""
        await asyncio.to_thread(self._delete_file, file_id, viewer)

    def _delete_file(self, file_id: str, viewer: str | None) -> None:
        self._thread.submit(self._store.delete_file, file_id, viewer).result()
        self._unlink([file_id])

    async def delete_expired(self, now: int) -> None:
        """Deletes expired files, except inputs of open batches."""
        if deleted := await self.query(BatchStore.delete_expired, now):
            log.info("deleted %d expired files", len(deleted))
            await asyncio.to_thread(self._unlink, deleted)

    def _unlink(self, ids: list[str]) -> None:
        for file_id in ids:
            try:
                self.content(file_id).unlink(missing_ok=True)
            except OSError as error:  # the next start deletes it
                log.warning("cannot delete %s: %s", self.content(file_id), error)

    def close(self) -> None:
        """Closes the database, so that another process can open the folder."""
        self._thread.shutdown()
        self._store.close()


def open_data_folder(folder: Path) -> DataFolder:
    """Opens or creates a data folder, and deletes what a killed process left behind.

    Raises `StorageError`; `InUse` if another process has opened it.
    """
    folder = folder.expanduser()
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file; the server's data needs a folder")
    with _storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _check_ownership(folder)
    store = BatchStore(folder / _DATABASE)
    try:
        return DataFolder(folder, store)
    except BaseException:
        store.close()
        raise


def _check_ownership(folder: Path) -> None:
    """Raises `StorageError` if the folder has files but no database: `DataFolder` would delete files without a row."""
    if (folder / _DATABASE).exists():
        return
    for name in _SUBFOLDERS:
        subfolder = folder / name
        if subfolder.exists() and (not subfolder.is_dir() or any(subfolder.iterdir())):
            raise StorageError(
                f"{folder} contains {name!r} but no {_DATABASE}: it is not a data folder, or its database is lost. "
                f"Use an empty folder, or move {name!r} away"
            )


@contextlib.contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(Path(error.filename or folder), error) from error
