"""Files on the disk for good: those that grow with each result, and those that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from cppbatch.errors import DiskFull, StorageError


class DurableFile:
    """A file that only grows. Somebody else remembers how much of it counts."""

    def __init__(self, path: Path, size: int) -> None:
        """Opens the file and cuts off what goes beyond `size` bytes: that was being written when its process died.

        Raises `StorageError`, also when the file is shorter.
        """
        self.path, self.size = path, size
        with _explained(path):
            self._file = path.open("ab")
            found = self._file.tell()
            if found > size:
                self._file.truncate(size)
            fsync_folder(path.parent)
        if found < size:
            self._file.close()
            raise StorageError(
                f"{path} has {found} bytes, though {size} were written to it: somebody has changed it. "
                "Put it back, or begin anew with another output"
            )

    def append(self, data: bytes) -> None:
        """On the disk when this returns; when it raises `StorageError`, nothing of it is in the file.

        Whoever sets `size` back has what was appended beyond it replaced by the next.
        """
        with _explained(self.path):
            try:
                if self._file.tell() != self.size:
                    self._reopen()
                self._file.write(data)
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError:
                self._reopen()
                raise
        self.size += len(data)

    def _reopen(self) -> None:
        """Forgets what did not get through, that in the file's buffer too."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._file = self.path.open("ab")
        self._file.truncate(self.size)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


def storage_error(path: Path, error: OSError) -> StorageError:
    """What an `OSError` says about this file, with what to do."""
    kind = StorageError
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        kind, todo = DiskFull, "free some space and start again; nothing that was written is lost"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        todo = "make it and its folder writable"
    elif error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
        todo = "check its name and its folder"
    else:
        todo = "check the disk"
    return kind(f"{path} cannot be written ({error.strerror or error}): {todo}")


def fsync_folder(folder: Path) -> None:
    """Has a folder's names on the disk. (Windows cannot, and does that by itself.)"""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move_into_place(finished: Path, path: Path) -> None:
    """Gives a file that is written and closed its name: whole, or not at all. Raises `StorageError`."""
    with _explained(path):
        with finished.open("r+b") as file:  # Windows does not sync what cannot be written to
            os.fsync(file.fileno())
        finished.replace(path)
        fsync_folder(path.parent)
