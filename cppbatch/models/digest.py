"""Which weights a file has: the SHA-256 of all its bytes.

Saved states and the results of a job are valid only with the weights that computed them, and a digest of samples would
miss a changed tensor. The digest of an unchanged file is a finding about this machine, so that it is read only once.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cppbatch.errors import ModelError
from cppbatch.findings import file_key, file_stamp, finding_path, read_finding, write_finding
from cppbatch.models.find import model_parts

log = logging.getLogger("cppbatch.models")

_SMALL_BYTES = 16 << 20  # reading these takes about as long as looking for a finding
_SETTLED_NS = 2 * 10**9  # a file that changed more recently may change again within the resolution of its times

IsStopped = Callable[[], bool]


def model_digest(path: Path, is_stopped: IsStopped = lambda: False) -> str:
    """The digest of a model, given its first or only file. Takes a second for 1.4 GB, once for each unchanged file.

    Raises `ModelError` if a file cannot be read, changes meanwhile, or `is_stopped` returns True.
    """
    return _joined([file_digest(part, is_stopped) for part in _parts(path)])


def file_digest(path: Path, is_stopped: IsStopped = lambda: False) -> str:
    """The SHA-256 of a file, in hexadecimal. Raises as `model_digest`."""
    if known := _known_digest(path):
        return known
    stamp, place, now = file_stamp(path), _place(path), time.time_ns()
    digest = _hash(path, is_stopped)
    if file_stamp(path) != stamp:
        raise ModelError(f"{path.name} changed while it was read")
    if all(abs(now - changed) > _SETTLED_NS for changed in stamp[-2:]):
        write_finding(place, digest)
    return digest


def _parts(model: Path) -> list[Path]:
    """The files of a model. Not those that its name promises: llama.cpp goes by the metadata, and reports missing
    ones."""
    return [part for part in model_parts(model) if part.exists()] or [model]


def _joined(digests: Sequence[str]) -> str:
    """The digest of a model, given those of its parts."""
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _known_digest(path: Path) -> str | None:
    """The digest of a file, if that takes only milliseconds; otherwise None."""
    stamp = file_stamp(path)
    if not path.is_file():  # a pipe would be waited for
        raise ModelError(f"{path.name} cannot be read: it is missing, or not a regular file")
    return _hash(path) if stamp and stamp[2] <= _SMALL_BYTES else read_finding(_place(path), str)


def _place(path: Path) -> Path:
    return finding_path("digests", file_key(path))


def _hash(path: Path, is_stopped: IsStopped = lambda: False) -> str:
    digest, chunk = hashlib.sha256(), memoryview(bytearray(4 << 20))  # about 3 ms without the GIL
    try:
        with path.open("rb", buffering=0) as file:
            while n := file.readinto(chunk):
                if is_stopped():
                    raise ModelError(f"{path.name} was not read to its end")
                digest.update(chunk[:n])
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read ({error.strerror})") from error
    return digest.hexdigest()


class WeightFiles:
    """The digests of the files that an engine loads. Thread-safe.

    Created before they are loaded: a file that has changed since then may not have the weights that were loaded.
    """

    def __init__(self, model: Path, others: Iterable[Path] = ()) -> None:
        """`model`: its first or only file. `others`: adapters and the projector."""
        self._parts = _parts(model)
        self._stamps = {path: file_stamp(path) for path in (*self._parts, *others)}
        self._digests: dict[Path, str] = {}
        self._problem: str | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @property
    def are_known(self) -> bool:
        """Whether all digests are known, and no file has changed as far as `check` has noticed. Does not wait."""
        return len(self._digests) == len(self._stamps) and self._problem is None

    def read(self) -> None:
        """Reads all files and waits for the end. Raises `ModelError`, as `check`, and if it was closed meanwhile."""
        if self._thread is None and self._problem is None:
            self.read_beside()
        if self._thread:
            self._thread.join()
        self.check()
        if not self.are_known:
            raise ModelError("the weights were not read to their end")

    def _read(self, is_stopped: IsStopped) -> None:
        for path in self._stamps:
            if path not in self._digests:
                self._digests[path] = file_digest(path, is_stopped)

    def check(self) -> None:
        """Raises `ModelError` if a file has changed since it was loaded: its times, its size, or which file it is.

        The time of its last change of status is not compared: a new hard link is not a change.
        """
        for path, stamp in self._stamps.items():
            if self._problem is None and file_stamp(path)[:-1] != stamp[:-1]:
                self._fail(f"{path.name} has changed since it was loaded; restart to load it again")
        if self._problem:
            raise ModelError(self._problem)

    def read_beside(self) -> None:
        """Reads the files on a thread of the lowest priority, unless their digests are known. Does not wait."""
        try:
            known = {path: _known_digest(path) for path in self._stamps}
        except ModelError as error:
            self._fail(str(error))
            return
        self._digests |= {path: digest for path, digest in known.items() if digest}
        if not self.are_known:
            self._thread = threading.Thread(target=self._read_slowly, name="cppbatch-digest", daemon=True)
            self._thread.start()

    def _read_slowly(self) -> None:
        if sys.platform == "linux":  # elsewhere, only processes have priorities
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        began = time.monotonic()
        try:
            self._read(lambda: self._is_closed)
            self.check()
        except ModelError as error:
            if not self._is_closed and self._problem is None:
                self._fail(str(error))
        else:
            log.info("read the weights in %.1f s: cached prefixes are saved and restored", time.monotonic() - began)

    def wait(self, seconds: float) -> None:
        """Waits for the thread, up to this long."""
        if self._thread:
            self._thread.join(max(0.0, seconds))

    def _fail(self, problem: str) -> None:
        self._problem = problem
        log.warning("cached prefixes are neither saved nor restored: %s", problem)

    def digest(self, path: Path) -> str:
        """The digest of one of the other files, once `are_known`."""
        return self._digests[path]

    @property
    def of_model(self) -> str:
        """The digest of the model, once `are_known`."""
        return _joined([self._digests[part] for part in self._parts])

    def close(self) -> None:
        """Stops reading."""
        self._is_closed = True
