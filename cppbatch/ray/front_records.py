"""What every `cppbatch serve --ray` of this user and machine has started, in files that outlive a killed process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import platformdirs
import psutil

from cppbatch.ray.ray_cluster import RayCluster


class FrontRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A front, its cluster, and the Serve application that it has deployed."""

    pid: int
    created: float
    """When the process started, in seconds since 1970: tells it from a later process with the same number."""
    cluster: RayCluster
    started_serve: bool
    """Whether Ray Serve did not run in the cluster before."""
    application: str
    """The name of the application in Ray Serve."""
    model: str
    replicas: str
    """`2` or `1..8`."""

    @property
    def is_alive(self) -> bool:
        """Whether the front runs."""
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.created) < 1
            return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return False


@contextlib.contextmanager
def recorded(record: FrontRecord) -> Iterator[None]:
    """Keeps the record in a file meanwhile. The file of a process that is killed stays."""
    remember(record)
    try:
        yield
    finally:
        forget(record)


def remember(record: FrontRecord) -> None:
    """Writes the record."""
    _file(record).write_bytes(msgspec.json.encode(record))


def this_process() -> tuple[int, float]:
    """The pid of this process and when it started, for a `FrontRecord`."""
    return os.getpid(), psutil.Process().create_time()


def records() -> list[FrontRecord]:
    """All records, by pid. Those of a dead front with a cluster of its own are deleted: the cluster ended with it."""
    found = []
    for file in sorted(_folder().glob("*.json"), key=lambda file: int(file.stem)):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            record = msgspec.json.decode(file.read_bytes(), type=FrontRecord)
            if record.is_alive or not record.cluster.is_own:
                found.append(record)
            else:
                forget(record)
    return found


def forget(record: FrontRecord) -> None:
    """Deletes the record."""
    _file(record).unlink(missing_ok=True)


def _file(record: FrontRecord) -> Path:
    return _folder() / f"{record.pid}.json"


def _folder() -> Path:
    folder = Path(platformdirs.user_state_dir("cppbatch")) / "ray"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
