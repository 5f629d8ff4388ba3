"""Files that survive a power loss: append-only files, and files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from cppbatch.errors import DiskFull, StorageError

log = logging.getLogger("cppbatch.jobs")


class DurableFile:
    """An append-only file of lines. The caller records durably which size is committed."""

    def __init__(self, path: Path, size: int) -> None:
        """Opens the file and truncates it to `size` bytes: the rest was not committed before the process died.

        Complete lines in the rest are kept in a file beside it (`kept_lines`), because the rest can also mean that the
        record of the size is an older one. Raises `StorageError`, also if the file is shorter than `size`.
        """
        self.path, self.size = path, size
        with _storage_errors(path):
            self._file = path.open("ab")
            found = self._file.tell()
            if found > size:
                self._keep_lines()
                self._file.truncate(size)
            fsync_folder(path.parent)
        if found < size:
            self._file.close()
            raise StorageError(
                f"{path} has {found} bytes instead of the {size} written to it: another program changed it. Restore "
                "the file, or start over with another output"
            )

    def _keep_lines(self) -> None:
        """Copies the complete lines beyond `size`."""
        n_lines, kept = 0, kept_lines(self.path)
        with self.path.open("rb") as file, kept.open("ab") as copy:
            file.seek(self.size)
            for line in file:
                if line.endswith(b"\n"):
                    n_lines += 1
                    copy.write(line)
            copy.flush()
            os.fsync(copy.fileno())
        if n_lines:
            text = "%s: its last %d lines were not committed and will be answered again; they were saved to %s"
            log.warning(text, self.path, n_lines, kept)
        elif not kept.stat().st_size:
            kept.unlink()

    def append(self, data: bytes) -> None:
        """Writes and fsyncs `data`. If it raises `StorageError`, the file is unchanged.

        The caller may set `size` back; the next append then first discards the data beyond it.
        """
        with _storage_errors(self.path):
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
        """Discards the data beyond `size`, in the file and in its buffer."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._file = self.path.open("ab")
        self._file.truncate(self.size)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def kept_lines(path: Path) -> Path:
    """Where the lines of a `DurableFile` are that were not committed."""
    return path.with_name(path.name + ".uncommitted")


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


def storage_error(path: Path, error: OSError) -> StorageError:
    """The `StorageError` for an `OSError` at this path, with advice."""
    kind = StorageError
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        kind, advice = DiskFull, "free some space and restart; no data was lost"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "make it and its folder writable"
    elif error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
        advice = "check its name and its folder"
    else:
        advice = "check the disk"
    return kind(f"{path} cannot be written ({error.strerror or error}): {advice}")


def fsync_folder(folder: Path) -> None:
    """Makes the folder's entries durable. Windows has no such call and does not need it."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_durable(path: Path) -> None:
    """Fsyncs a closed file and its entry in its folder. Raises `StorageError`."""
    with _storage_errors(path):
        with path.open("r+b") as file:  # Windows can only fsync files that are open for writing
            os.fsync(file.fileno())
        fsync_folder(path.parent)


def move_into_place(finished: Path, path: Path) -> None:
    """Makes a closed file durable and renames it to `path`, atomically and durably. Raises `StorageError`."""
    make_durable(finished)
    move(finished, path)


def move(durable: Path, path: Path) -> None:
    """Renames a file that is durable already. Raises `StorageError`."""
    with _storage_errors(path):
        durable.replace(path)
        fsync_folder(path.parent)
