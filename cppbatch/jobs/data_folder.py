"""The server's data folder: its books, the contents of its files, and what running batches have on the disk."""

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

_BOOKS = "jobs.sqlite3"
_PARTS = ("incoming", "files", "batches")
_PRIVATE = 0o700  # people's prompts are in there


class DataFolder:
    """`open_data` makes one. Whatever happens to the process, the books are right: contents come before their row and
    go after it, and those without a row are removed at the next start."""

    def __init__(self, folder: Path, store: BatchStore) -> None:
        self.folder = folder
        self._store = store
        self._thread = ThreadPoolExecutor(1, "cppbatch-store")  # commits wait for the disk
        self._incoming, self._files, self._batches = (folder / name for name in _PARTS)
        self.open_batches = self._repaired()
        """Those that had not ended when it was opened."""

    def _repaired(self) -> list[BatchRecord]:
        """Removes what a process left behind that was killed."""
        with _explained(self.folder):
            for part in (self._incoming, self._files, self._batches):
                part.mkdir(mode=_PRIVATE, exist_ok=True)
            for file_id in self._store.unknown_files([path.name for path in self._files.iterdir()]):
                self.content(file_id).unlink()
            for path in self._incoming.iterdir():
                path.unlink()
            batches = self._store.open_batches()
            for name in {path.name for path in self._batches.iterdir()} - {batch.shown.id for batch in batches}:
                shutil.rmtree(self.batch(name))
        return batches

    async def ask(self, method: Callable[Concatenate[BatchStore, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a method of the `BatchStore` on the thread that has it."""
        call = partial(method, self._store, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    # --- where things are ---------------------------------------------------------------------------------------

    def incoming(self, file_id: str) -> Path:
        """Where a file is written until it is whole."""
        return self._incoming / file_id

    def content(self, file_id: str) -> Path:
        """Where a file's contents are."""
        return self._files / file_id

    def batch(self, batch_id: str) -> Path:
        """The folder of a batch that runs."""
        return self._batches / batch_id

    # --- files come and go --------------------------------------------------------------------------------------

    async def keep(self, file: File) -> None:
        """Keeps what was written to `incoming`: on the disk when this returns, and to the end when it is cancelled."""
        await asyncio.to_thread(self._keep, file)

    def _keep(self, file: File) -> None:
        content = self.content(file.id)
        move_into_place(self.incoming(file.id), content)
        try:
            self._thread.submit(self._store.add_file, file).result()
        except StorageError:
            content.unlink(missing_ok=True)
            raise

    async def delete(self, file_id: str) -> None:
        """Raises `NotFound`, and `Conflict` when a batch needs it. Goes on to the end when it is cancelled."""
        await asyncio.to_thread(self._delete, file_id)

    def _delete(self, file_id: str) -> None:
        self._thread.submit(self._store.delete_file, file_id).result()
        self._unlink([file_id])

    async def sweep(self, now: int) -> None:
        """Removes files whose time is up, except those that a batch needs."""
        if gone := await self.ask(BatchStore.delete_expired, now):
            log.info("removed %d files whose time was up", len(gone))
            await asyncio.to_thread(self._unlink, gone)

    def _unlink(self, ids: list[str]) -> None:
        for file_id in ids:
            try:
                self.content(file_id).unlink(missing_ok=True)
            except OSError as error:  # the next start removes it
                log.warning("cannot remove %s: %s", self.content(file_id), error)

    def close(self) -> None:
        """Another process may open it."""
        self._thread.shutdown()
        self._store.close()


def open_data(folder: Path) -> DataFolder:
    """Opens or makes a data folder, and repairs what a process that was killed left behind.

    Raises `StorageError`; `InUse` when another process has it.
    """
    folder = folder.expanduser()
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file; the data of a server needs a folder")
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_others(folder)
    store = BatchStore(folder / _BOOKS)
    try:
        return DataFolder(folder, store)
    except BaseException:
        store.close()
        raise


def _refuse_others(folder: Path) -> None:
    """What the books do not know is removed, so without books there must be nothing."""
    if (folder / _BOOKS).exists():
        return
    for name in _PARTS:
        part = folder / name
        if part.exists() and (not part.is_dir() or any(part.iterdir())):
            raise StorageError(
                f"{folder} has {name!r} in it and no {_BOOKS}: it is no data folder, or its books are gone. "
                f"Use an empty folder, or move {name!r} away"
            )


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(Path(error.filename or folder), error) from error
