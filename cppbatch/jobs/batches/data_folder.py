"""The server's data folder: the database, the contents of files, and the working folders of open batches.

jobs.sqlite3     `BatchStore`
jobs.reserve     `_Reserve`
incoming/ID      uploads that are not complete
files/ID         contents of files
batches/ID/      ledger.sqlite3, output.jsonl, errors.jsonl of an open batch
unknown-DATE/    files and folders found in these folders but not in the database
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import logging
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from cppbatch.errors import ConfigError, DiskFull, InputChanged, NotFound, StorageError
from cppbatch.jobs.batches.records import File
from cppbatch.jobs.batches.store import BatchStore, KnownContents
from cppbatch.jobs.durable_files import fsync_folder, make_durable, make_private, move, move_into_place, storage_error
from cppbatch.jobs.input.format import unreadable_file
from cppbatch.regular_files import is_special, open_regular

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("cppbatch.jobs")

_DATABASE = "jobs.sqlite3"
_RESERVE = "jobs.reserve"
_SUBFOLDERS = ("incoming", "files", "batches")
RESULT_NAMES = ("output.jsonl", "errors.jsonl")
"""In the working folder of a batch."""
_PRIVATE = 0o700  # the files contain users' prompts
_UNKNOWN = "unknown-"
_OWN = {_DATABASE, f"{_DATABASE}-wal", f"{_DATABASE}-shm", _RESERVE, *_SUBFOLDERS, "models"}  # models: `models_folder`


class DataFolder:
    """An open data folder, created by `open_data_folder`.

    A file's row is written before its contents move from `incoming` to `files`. On deletion, a note replaces the row
    before the contents are deleted. So if the process dies at any point, contents in `files` have a row or a deletion
    note. Contents with neither are not leftovers of a kill: the database or the folder was damaged. They are moved
    aside, never deleted.
    """

    def __init__(self, folder: Path, store: BatchStore) -> None:
        self.folder = folder
        self._store = store
        self._thread = ThreadPoolExecutor(1, "cppbatch-store")  # commits wait for the disk
        self._incoming, self._files, self._batches = (folder / name for name in _SUBFOLDERS)
        self._reserve = _Reserve(folder / _RESERVE)
        with _storage_errors(self.folder):
            self._clean_up(store.read_contents())
            self._reserve.fill()
        self.open_batches = store.open_batches()
        """The batches that had not ended when the folder was opened."""

    # --- opening ------------------------------------------------------------------------------------------------

    def _clean_up(self, known: KnownContents) -> None:
        """Completes or undoes the operations of a killed process, and moves unknown files and folders aside."""
        if known.sizes and not any(self._is_there(file_id) for file_id in known.sizes):
            raise StorageError(
                f"{self._files} contains none of the {len(known.sizes)} files listed in {_DATABASE}: check that its "
                "disk is mounted, restore it from a backup, or use another folder"
            )
        for subfolder in (self._incoming, self._files, self._batches):
            subfolder.mkdir(mode=_PRIVATE, exist_ok=True)
            make_private(subfolder, _PRIVATE)
        if all(path.name in _OWN or path.name.startswith(_UNKNOWN) for path in self.folder.iterdir()):
            make_private(self.folder, _PRIVATE)
        fsync_folder(self.folder)
        unknown = [
            path
            for subfolder, is_known in (
                (self._incoming, self._settle_incoming),
                (self._files, self._settle_content),
                (self._batches, self._settle_batch),
            )
            for path in list(subfolder.iterdir())
            if not is_known(path, known)
        ]
        self.set_aside(sorted(unknown), f"are not in {_DATABASE}")
        self._store.forget_deleted([file_id for file_id in known.deleted if not self.content(file_id).exists()])
        damaged = [each for file_id, size in known.sizes.items() if (each := self._damage(file_id, size))]
        if damaged:
            text = "%d of %d files in %s are damaged; restore them from a backup, or delete them: %s"
            log.error(text, len(damaged), len(known.sizes), self._files, _first(damaged))

    def _is_there(self, file_id: str) -> bool:
        return self.content(file_id).exists() or self.incoming(file_id).exists()

    def _settle_incoming(self, path: Path, known: KnownContents) -> bool:
        """Completes or deletes an upload. Returns whether the path is an upload."""
        if not path.name.startswith("file-") or not stat.S_ISREG(path.lstat().st_mode):
            return False
        if path.name in known.sizes and not self.content(path.name).exists():
            move_into_place(path, self.content(path.name))
        else:  # it was not acknowledged
            _delete(path)
        return True

    def _settle_content(self, path: Path, known: KnownContents) -> bool:
        """Completes a deletion. Returns whether the path is the contents of a file."""
        if path.name in known.deleted and stat.S_ISREG(path.lstat().st_mode):
            _delete(path)
            return True
        return path.name in known.sizes or path.name in known.future_outputs

    def _settle_batch(self, path: Path, known: KnownContents) -> bool:
        """Deletes the folder of a batch that has ended. Returns whether the path is the folder of a batch."""
        if path.name not in known.batches or not path.is_dir():
            return False
        if known.batches[path.name]:
            return True
        if path.is_symlink():
            return False
        results = (path / name for name in RESULT_NAMES)
        if any(each.exists() and each.stat().st_size for each in results):
            return False  # the results of an ended batch are in `files`
        shutil.rmtree(path, ignore_errors=True)
        return True

    def _damage(self, file_id: str, size: int) -> str | None:
        """The damage to the contents of a file, from its directory entry; None if there is none."""
        content = f"{self._files}/{file_id}"  # for a hundred thousand files, `Path` would take most of the time
        try:
            found = os.stat(content)
        except OSError as error:
            return f"{file_id}: {error.strerror}"
        if not stat.S_ISREG(found.st_mode):
            return f"{file_id}: is not a file"
        if found.st_size != size:
            return f"{file_id}: has {found.st_size} bytes instead of {size}"
        return None if os.access(content, os.R_OK) else f"{file_id}: cannot be read"

    def set_aside(self, paths: Sequence[Path], why: str) -> None:
        """Moves files and folders of the data folder to a new folder `unknown-DATE` in it, and logs it."""
        paths = [path for path in paths if path.exists() or path.is_symlink()]
        if not paths:
            return
        name = f"{_UNKNOWN}{datetime.date.today()}"
        names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
        target = next(path for each in names if not (path := self.folder / each).exists())
        moved, kept = [], []
        for path in paths:
            place = target / path.relative_to(self.folder)
            try:
                place.parent.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
                path.rename(place)
                moved.append(str(path.relative_to(self.folder)))
            except OSError as error:  # a mount point, or a folder of another user
                kept.append(f"{path} ({error.strerror})")
        if moved:
            fsync_folder(self.folder)
            text = "moved %d files or folders that %s to %s; nothing was deleted: %s"
            log.warning(text, len(moved), why, target, _first(moved))
        if kept:
            log.warning("left %d files or folders that %s in place: %s", len(kept), why, _first(kept))

    async def query(self, method: Callable[Concatenate[BatchStore, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a method of the `BatchStore` on its thread, for example `query(BatchStore.file, file_id)`."""
        call = partial(method, self._store, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    # --- paths --------------------------------------------------------------------------------------------------

    def incoming(self, file_id: str) -> Path:
        """The path of an upload until it is complete."""
        return self._incoming / file_id

    def content(self, file_id: str) -> Path:
        """The contents of a file."""
        return self._files / file_id

    def contents(self, file_id: str) -> tuple[Path, Path]:
        """The possible paths of the contents of a file with a row; the first one that exists is valid."""
        return self.incoming(file_id), self.content(file_id)

    def batch(self, batch_id: str) -> Path:
        """The working folder of an open batch."""
        return self._batches / batch_id

    # --- adding and deleting files ------------------------------------------------------------------------------

    async def add_file(self, file: File, owner: str = "", sha256: str | None = None) -> None:
        """Durably adds a file from `incoming`. Runs to completion even if cancelled.

        `sha256`: of its contents, in hexadecimal.
        """
        adding = asyncio.ensure_future(asyncio.to_thread(self._add_file, file, owner, sha256))
        try:
            await asyncio.shield(adding)
        except asyncio.CancelledError:  # the caller may delete the upload now
            await asyncio.wait([adding])
            raise

    def _add_file(self, file: File, owner: str, sha256: str | None) -> None:
        make_durable(self.incoming(file.id))
        self._thread.submit(self._store.add_file, file, owner, sha256).result()
        try:
            move(self.incoming(file.id), self.content(file.id))
        except StorageError:
            self._delete_file(file.id, None)
            raise

    async def delete_file(self, file_id: str, viewer: str | None = None) -> None:
        """Deletes a file, even if cancelled. `viewer`: the owner that asks; None: anyone. Raises `NotFound`, and
        `Conflict` if an open batch reads the file."""
        await asyncio.to_thread(self._delete_file, file_id, viewer)

    def _delete_file(self, file_id: str, viewer: str | None) -> None:
        self._thread.submit(self._reserve.use_for, partial(self._store.delete_file, file_id, viewer)).result()
        self._unlink([file_id])

    async def delete_expired(self, now: int) -> None:
        """Deletes expired files, except inputs of open batches."""
        delete = partial(self._reserve.use_for, partial(self._store.delete_expired, now))
        if deleted := await asyncio.get_running_loop().run_in_executor(self._thread, delete):
            log.info("deleted %d expired files", len(deleted))
            await asyncio.to_thread(self._unlink, deleted)

    def _unlink(self, ids: list[str]) -> None:
        deleted = [file_id for file_id in ids if _delete(self.content(file_id))]
        try:
            self._thread.submit(self._store.forget_deleted, deleted).result()
        except StorageError as error:  # deleted on the next start
            log.warning("%s", error)
        self._reserve.fill()

    async def check_upload(self, file_id: str, executor: ThreadPoolExecutor) -> None:
        """Compares the contents of a file with its upload: the size, and the SHA-256 unless an earlier version stored
        the file. Raises `InputChanged`, and `ConfigError` if it cannot be read."""
        try:
            size, sha256 = await self.query(BatchStore.upload, file_id)
        except NotFound as error:
            raise ConfigError(f"is not in the database: {error.message}") from None
        check = partial(_check_upload, self.content(file_id), size, sha256)
        await asyncio.get_running_loop().run_in_executor(executor, check)

    def close(self) -> None:
        """Closes the database, so that another process can open the folder."""
        self._thread.shutdown()
        self._store.close()


def open_data_folder(folder: Path) -> DataFolder:
    """Opens or creates a data folder, and completes or undoes the operations of a killed process.

    Raises `StorageError`, for example if there are files but the database is missing or never had any; `InUse` if
    another process has opened the folder. In these cases, no files are moved or deleted.
    """
    folder = folder.expanduser()
    with _storage_errors(folder):
        if folder.exists() and not folder.is_dir():
            raise StorageError(f"{folder} is a file; give a folder for the server's data")
        folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        fsync_folder(folder.parent)
        contents = _contents(folder)
    database = folder / _DATABASE
    if contents and not (database.exists() and database.stat().st_size):
        raise _database_lost(folder, contents, f"no {_DATABASE}" if not database.exists() else f"an empty {_DATABASE}")
    store = _Reserve(folder / _RESERVE).use_for(partial(BatchStore, database, must_exist=bool(contents)))
    try:
        # An upload in `incoming` may be the very first one.
        if not store.was_used and (settled := [name for name in contents if name != _SUBFOLDERS[0]]):
            raise _database_lost(folder, settled, f"{_DATABASE} never contained any data")
        return DataFolder(folder, store)
    except BaseException:
        store.close()
        raise


class _Reserve:
    """A file that keeps space free, so that files can be deleted on a disk that another program has filled: SQLite
    needs some for each change. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def use_for(self, change: Callable[[], T]) -> T:
        """Calls `change`, which raises `DiskFull` on a full disk, and then again with the space of the file."""
        try:
            return change()
        except DiskFull:
            with self._lock, contextlib.suppress(OSError):
                os.truncate(self._path, 0)
            return change()

    def fill(self) -> None:
        """Takes the space, or what there is of it."""
        with self._lock, contextlib.suppress(OSError):
            if self._path.exists() and not self._path.is_file():
                return
            with open(self._path, "ab", buffering=0, opener=_open_private) as file:
                if missing := max(0, (1 << 20) - file.tell()):
                    file.write(os.urandom(missing))  # some file systems take no space for zeros


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _contents(folder: Path) -> list[str]:
    """The names of the subfolders that are not empty."""
    subfolders = {name: folder / name for name in _SUBFOLDERS}
    return [name for name, path in subfolders.items() if path.exists() and (not path.is_dir() or any(path.iterdir()))]


def _database_lost(folder: Path, contents: Sequence[str], state: str) -> StorageError:
    names = " and ".join(map(repr, contents))
    return StorageError(
        f"{folder} contains {names} but {state}: it is not a data folder, or its database was lost. Restore "
        f"{_DATABASE} from a backup, use an empty folder, or move {names} away"
    )


def _delete(path: Path) -> bool:
    """Deletes a file. Returns whether it is gone."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # the next start deletes it
        log.warning("cannot delete %s: %s", path, error)
        return False
    return True


def _check_upload(content: Path, size: int, sha256: str | None) -> None:
    if is_special(content):
        raise InputChanged("is not a regular file")
    try:
        with open_regular(content) as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise InputChanged(f"has {found} bytes instead of the uploaded {size}")
            # hashlib.file_digest: from Python 3.11
            digest = hashlib.sha256()
            while sha256 and (data := file.read(1 << 20)):
                digest.update(data)
    except OSError as error:
        raise unreadable_file(content, error) from error
    if sha256 and digest.hexdigest() != sha256:
        raise InputChanged("differs from the uploaded content")


def _first(names: Sequence[str]) -> str:
    """The first names, for a log line."""
    return ", ".join(names[:10]) + (" ..." if len(names) > 10 else "")


@contextlib.contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(Path(error.filename or folder), error) from error
