"""Files that are durable across power loss, and streams."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cppbatch.errors import DiskFull, StorageError
from cppbatch.regular_files import STANDARD_STREAM, refuse_special, replace_file

log = logging.getLogger("cppbatch.jobs")


class DurableFile:
    """An append-only file of lines. The caller durably records the committed size."""

    def __init__(self, path: Path, size: int) -> None:
        """Opens the file and truncates it to `size` bytes: the rest was not committed before the process died.

        Complete lines in the rest are kept in a file next to it (`uncommitted_path`), because the recorded size may
        also be out of date. Raises `StorageError`, also if the file is shorter than `size` or it is not a regular file.
        """
        self.path, self.size = path, size
        with storage_errors(path):
            self._file = _open_to_append(path)
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
        n_lines, kept = 0, uncommitted_path(self.path)
        with self.path.open("rb") as file, _open_to_append(kept) as copy:
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

        The caller may reset `size` to a smaller value; the next append then first discards the data beyond it.
        """
        with storage_errors(self.path):
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
        self._file = _open_to_append(self.path)
        self._file.truncate(self.size)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _open_to_append(path: Path) -> BinaryIO:
    refuse_special(path)  # opening a pipe would wait for its reader
    return path.open("ab")


class StreamFile:
    """Standard output, a pipe or a device, with the interface of `DurableFile`: what is written has passed on."""

    def __init__(self, path: Path, size: int) -> None:
        """Opens the stream; a pipe waits for its reader. `size`: the bytes written so far. Raises `StorageError`."""
        self.path, self.size = path, size
        with storage_errors(path):
            is_stdout = path == STANDARD_STREAM
            handle = os.dup(sys.stdout.fileno()) if is_stdout else os.open(path, os.O_WRONLY | os.O_APPEND)
            self._file = open(handle, "wb")  # noqa: SIM115 (close() does)

    def append(self, data: bytes) -> None:
        """Writes `data`. Raises `StorageError`."""
        with storage_errors(self.path):
            self._file.write(data)
            self._file.flush()
        self.size += len(data)

    def close(self) -> None:
        """Closes the stream. Data that it has refused is dropped."""
        with contextlib.suppress(OSError):
            self._file.close()


def uncommitted_path(path: Path) -> Path:
    """The path of the file with the uncommitted lines of a `DurableFile`."""
    return beside(path, ".uncommitted")


def beside(path: Path, suffix: str) -> Path:
    """The path of a file in the same folder, whose name has this suffix in addition."""
    return path.with_name(path.name + suffix)


def make_private(path: Path, mode: int) -> None:
    """Sets the mode of a file or folder if it exists, gives other users access, and is this user's own."""
    if sys.platform == "win32":  # its modes do not tell who has access
        return
    try:
        found = path.stat()
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:
            path.chmod(mode)
            log.info("%s is now readable by its owner only", path)
    except FileNotFoundError:
        pass
    except OSError as error:  # such as a file system without modes
        log.warning("other users may be able to read %s: %s", path, error.strerror)


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
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
    elif error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EINVAL):
        advice = "check its name and its folder"
    elif error.errno == errno.EPIPE:
        advice = "the program that reads it has ended"
    else:
        advice = "check the disk"
    name = "standard output" if path == STANDARD_STREAM else path
    return kind(f"{name} cannot be written ({error.strerror or error}): {advice}")


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
    with storage_errors(path):
        with path.open("r+b") as file:  # Windows can only fsync files that are open for writing
            os.fsync(file.fileno())
        fsync_folder(path.parent)


def move_into_place(finished: Path, path: Path) -> None:
    """Makes a closed file durable and renames it to `path`, atomically and durably. Raises `StorageError`."""
    make_durable(finished)
    move(finished, path)


def move(durable: Path, path: Path) -> None:
    """Renames a file that is already durable. Raises `StorageError`, also if `path` is a device or a pipe."""
    with storage_errors(path):
        replace_file(durable, path)
        fsync_folder(Path(os.path.realpath(path)).parent)
