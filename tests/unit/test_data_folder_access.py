"""The server's data folder on a disk and among users that it does not have for itself: who can read it, full disks,
file systems without locks, and pipes in the place of files."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

import pytest

from cppbatch.errors import DiskFull, InUse, StorageError
from cppbatch.jobs import database
from cppbatch.jobs.batches.data_folder import DataFolder, open_data_folder
from cppbatch.jobs.batches.records import File
from cppbatch.jobs.batches.store import BatchStore
from cppbatch.jobs.durable_files import DurableFile, uncommitted_path
from cppbatch.jobs.ledger import Ledger

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes, pipes and locks of POSIX")

FILE = File(id="file-a", bytes=3, created_at=1, filename="a", purpose="batch")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def add(data: DataFolder, file: File = FILE) -> None:
    data.incoming(file.id).write_bytes(b"abc")
    await data.add_file(file)


def modes(folder: Path) -> dict[str, int]:
    names = ("", "jobs.sqlite3", "jobs.sqlite3-wal", "incoming", "files", "batches")
    return {name: mode(folder / name) for name in names if (folder / name).exists()}


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_a_new_data_folder_can_be_read_by_its_owner_only(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        data = open_data_folder(tmp_path / "deep" / "data")
        found = modes(tmp_path / "deep" / "data")
        data.close()
        Ledger(tmp_path / "out.jsonl.job").close()
    finally:
        os.umask(before)
    assert found.pop("jobs.sqlite3") == found.pop("jobs.sqlite3-wal") == mode(tmp_path / "out.jsonl.job") == 0o600
    assert set(found.values()) == {0o700}


def test_a_data_folder_that_others_can_read_is_closed_to_them(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    open_data_folder(folder).close()
    (folder / "models").mkdir()  # the user's data folder has both
    (folder / "unknown-2026-11-28").mkdir()
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    open_data_folder(folder).close()
    assert set(modes(folder).values()) == {0o700, 0o600}
    assert mode(folder / "models") == 0o755


def test_a_folder_with_files_of_others_stays_as_it_is_and_what_the_server_has_in_it_is_closed(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    tmp_path.chmod(0o755)
    open_data_folder(tmp_path).close()
    for path in (tmp_path / "files", tmp_path / "jobs.sqlite3"):
        path.chmod(0o755)
    open_data_folder(tmp_path).close()
    found = modes(tmp_path)
    assert found.pop("") == 0o755
    assert set(found.values()) == {0o700, 0o600}


def test_a_database_of_another_program_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite3"
    path.write_bytes(b"mine" * 1000)
    path.chmod(0o644)
    with pytest.raises(StorageError, match="is not a database of cppbatch"):
        open_data_folder(tmp_path)
    assert mode(path) == 0o644


async def test_the_reserve_is_used_once_and_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, reserve, real = open_data_folder(tmp_path), tmp_path / "jobs.reserve", BatchStore.delete_file
    size = reserve.stat().st_size
    assert size >= 1 << 18
    await add(data)

    def delete(store: BatchStore, file_id: str, viewer: str | None = None) -> None:
        if reserve.stat().st_size:
            raise DiskFull("the disk is full")
        real(store, file_id, viewer)

    with monkeypatch.context() as patch:
        patch.setattr(BatchStore, "delete_file", delete)
        await data.delete_file("file-a")
    assert (reserve.stat().st_size, os.listdir(tmp_path / "files")) == (size, [])
    await add(data)

    def never(*_: object) -> None:
        raise DiskFull("the disk is full")

    monkeypatch.setattr(BatchStore, "delete_file", never)
    with pytest.raises(DiskFull):
        await data.delete_file("file-a")
    assert os.listdir(tmp_path / "files") == ["file-a"], "nothing is deleted without its note"
    data.close()


def test_a_folder_without_working_locks_is_not_said_to_be_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_LOCK_TIMEOUT_S", 0.1)
    data = open_data_folder(tmp_path)
    with pytest.raises(InUse, match="is in use by another cppbatch"):
        open_data_folder(tmp_path)

    def lock(_file: object, _mode: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", lock)
    with pytest.raises(StorageError, match="has no working locks: use a folder on a local disk") as refused:
        open_data_folder(tmp_path)
    assert not isinstance(refused.value, InUse)
    data.close()


@pytest.mark.parametrize("is_uncommitted", [False, True])
def test_a_pipe_in_the_place_of_results_is_refused_at_once(tmp_path: Path, is_uncommitted: bool) -> None:
    path = tmp_path / "output.jsonl"
    if is_uncommitted:
        path.write_bytes(b"{}\n{}\n")
    os.mkfifo(uncommitted_path(path) if is_uncommitted else path)
    with pytest.raises(StorageError, match="it is not a regular file"):
        DurableFile(path, 0)


def test_a_pipe_in_the_place_of_a_database_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job")
    with pytest.raises(StorageError, match="it is not a regular file"):
        Ledger(tmp_path / "job")
