"""Files of cached prefixes in a folder shared by several processes, with a limit on their bytes.

    prefix-KEY-CONTENT.kv      a prefix, laid out as a slot's file (`slots`). KEY: `StateKey.short`; CONTENT: a hash
                               of salt, adapters and tokens, so that a prefix has one file, by any process
    .prefix-*.part             a file being written; its writer holds a lock on it
    .prefixes.lock             held while files are evicted, or a .part file is created

A file's modification time is its last use: the least recently used one is deleted first. Other files are not touched.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from cppbatch.config import setting_name
from cppbatch.engine.disk.slots import (
    Footer,
    Tokens,
    parse_slot_file,
    read_slot_head,
    slot_file_parts,
)
from cppbatch.errors import ConfigError

if sys.platform != "win32":
    import fcntl


_FILE = re.compile(r"prefix-[0-9a-f]{16}-[0-9a-f]{32}\.kv")
_PART_PREFIX, _PART_SUFFIX = ".prefix-", ".part"
_LOCK = ".prefixes.lock"
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600  # the files contain users' prompts
_MAX_KEPT_FREE, _KEPT_FREE = 2 << 30, 0.05  # disk space to keep free: 2 GiB, or this fraction of a small disk


class PrefixFolder:
    """A process's view of the folder. Thread-safe: every method accesses the disk, and none keeps a file open."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Creates the folder if necessary, and removes leftovers of killed processes.

        Raises `ConfigError` if files cannot be written there.
        """
        self.folder = folder
        self.max_bytes = max_bytes
        if sys.platform == "win32":
            raise ConfigError(
                f"{setting_name('prefix_cache_disk')} requires POSIX file locks, which Windows does not support"
            )
        try:
            with self._lock_folder():
                self._remove_leftovers()
                handle, path = tempfile.mkstemp(prefix=_PART_PREFIX, suffix=_PART_SUFFIX, dir=folder)
                os.close(handle)
                os.unlink(path)
        except OSError as error:
            raise ConfigError(
                f"{setting_name('prefix_cache_disk')}: {folder} is not writable ({error.strerror}); choose another "
                "folder"
            ) from error

    # --- existing files -----------------------------------------------------------------------------------------

    def names(self, key: str) -> set[str]:
        """The names of the files of a key; empty if the folder is gone."""
        begin = f"prefix-{key}-"
        with contextlib.suppress(OSError):
            return {name for name in os.listdir(self.folder) if name.startswith(begin) and _FILE.fullmatch(name)}
        return set()

    def version(self) -> int:
        """Changes when files are added or removed. 0: there may be a very recent change, so check again."""
        try:
            changed = os.stat(self.folder).st_mtime_ns
        except OSError:
            return 0
        # a folder that changed within 0.1 s may change again within its timestamp's resolution
        return changed if abs(time.time_ns() - changed) > 10**8 else 0

    def read_head(self, name: str) -> tuple[Tokens, Footer, int]:
        """Tokens, footer and bytes of a file, not verified. Raises `OSError`; `ValueError` if it is damaged."""
        tokens, footer, n_bytes = read_slot_head(self.folder / name)
        _check_name(name, tokens, footer)
        return tokens, footer, n_bytes

    def read(self, name: str) -> tuple[Tokens, npt.NDArray[np.uint8], Footer]:
        """Reads a file, and makes it the most recently used. Raises `OSError`; `ValueError` if it is damaged."""
        path = self.folder / name
        tokens, state, footer, _ = parse_slot_file(np.fromfile(path, np.uint8))
        _check_name(name, tokens, footer)
        os.utime(path)
        return tokens, state, footer

    def touch(self, name: str) -> None:
        """Makes a file the most recently used."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / name)

    def remove(self, name: str) -> None:
        """Deletes a file, if it exists."""
        with contextlib.suppress(OSError):
            os.unlink(self.folder / name)

    # --- writing ------------------------------------------------------------------------------------------------

    def write(self, name: str, tokens: Tokens, state: npt.NDArray[np.uint8], footer: Footer) -> int:
        """Writes a prefix atomically, deleting the least recently used files of all keys to make room.

        Returns its bytes; 0 if it exceeds the limit. Raises `OSError`, with ENOSPC also if too little of the disk would
        stay free.
        """
        parts = slot_file_parts(tokens, state, footer)
        n_bytes = sum(part.nbytes for part in parts)
        if n_bytes > self.max_bytes:
            return 0
        with self._lock_folder():
            self._remove_leftovers()
            self._make_room(n_bytes)
            handle, temporary = tempfile.mkstemp(prefix=_PART_PREFIX, suffix=_PART_SUFFIX, dir=self.folder)
            try:
                _lock(handle)
                os.truncate(handle, n_bytes)  # shows other processes its final size
            except BaseException:
                _discard(handle, temporary)
                raise
        try:
            for part in parts:
                _write_all(handle, part)
            os.fsync(handle)
            os.replace(temporary, self.folder / name)
        except BaseException:
            _discard(handle, temporary)
            raise
        os.close(handle)
        return n_bytes

    def _make_room(self, n_bytes: int) -> None:
        """Deletes the least recently used files until this many bytes fit. Raises `OSError` (ENOSPC) if they cannot."""
        files, n_used = [], 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                is_whole = _FILE.fullmatch(entry.name) is not None
                if is_whole or _is_part(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        n_used += status.st_size
                        if is_whole:
                            files.append((status.st_mtime_ns, entry.name, status.st_size))
        disk = shutil.disk_usage(self.folder)
        free = disk.free - min(_MAX_KEPT_FREE, int(_KEPT_FREE * disk.total))
        excess = max(n_used + n_bytes - self.max_bytes, n_bytes - free)
        if excess > sum(size for _, _, size in files):
            raise OSError(errno.ENOSPC, "not enough free space on the disk, or within the size limit")
        for _, name, size in sorted(files):
            if excess <= 0:
                break
            os.unlink(self.folder / name)
            excess -= size

    def _remove_leftovers(self) -> None:
        """Deletes .part files that no running process is writing."""
        for name in filter(_is_part, os.listdir(self.folder)):
            with contextlib.suppress(OSError):  # BlockingIOError: it is being written
                handle = os.open(self.folder / name, os.O_RDWR)
                try:
                    _lock(handle, wait=False)
                    os.unlink(self.folder / name)
                finally:
                    os.close(handle)

    @contextlib.contextmanager
    def _lock_folder(self) -> Iterator[None]:
        self.folder.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
        handle = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, _PRIVATE_FILE)
        try:
            _lock(handle)
            yield
        finally:
            os.close(handle)


def file_name(key: str, tokens: Tokens, footer: Footer) -> str:
    """The file name for a prefix. `key`: `StateKey.short`."""
    digest = hashlib.sha256(msgspec.json.encode((footer.cache_salt, footer.adapters)))
    digest.update(np.ascontiguousarray(tokens, np.int32).data)
    return f"prefix-{key}-{digest.hexdigest()[:32]}.kv"


def _check_name(name: str, tokens: Tokens, footer: Footer) -> None:
    if file_name(name.split("-")[1], tokens, footer) != name:
        raise ValueError("its name belongs to a different prefix")


def _is_part(name: str) -> bool:
    return name.startswith(_PART_PREFIX) and name.endswith(_PART_SUFFIX)


def _lock(handle: int, *, wait: bool = True) -> None:
    """Locks a file until it is closed or the process ends. Raises `BlockingIOError` if it is locked and not `wait`."""
    if sys.platform != "win32":
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _write_all(handle: int, data: memoryview) -> None:
    while data.nbytes:
        data = data[os.write(handle, data) :]


def _discard(handle: int, path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
    os.close(handle)
