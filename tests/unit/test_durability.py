"""What is on the disk when, and that little hangs on the WAL."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cppbatch.errors import ConfigError, InputChanged, LedgerLost, StorageError
from cppbatch.jobs.batches.data_folder import DataFolder, open_data_folder
from cppbatch.jobs.batches.records import File
from cppbatch.jobs.batches.store import BatchStore
from cppbatch.jobs.durable_files import uncommitted_path
from cppbatch.jobs.journal import Journal
from cppbatch.jobs.ledger import Ledger
from tests.support.job_results import ids_of, item, opened, result

FILE = File(id="file-a", bytes=3, created_at=1, filename="a", purpose="batch")


def ids_in_file_alone(path: Path, copy: Path) -> list[str]:
    """The files in a database without its WAL."""
    shutil.copy(path, copy)
    db = sqlite3.connect(copy)
    ids = [file_id for (file_id,) in db.execute("SELECT id FROM files")]
    db.close()
    return ids


def test_every_commit_of_the_jobs_is_in_the_file_itself(store: BatchStore, tmp_path: Path) -> None:
    store.add_file(FILE)
    assert ids_in_file_alone(tmp_path / "jobs.sqlite3", tmp_path / "copy") == ["file-a"]
    assert (tmp_path / "jobs.sqlite3-wal").stat().st_size == 0


def test_commits_are_synced_and_sqlite_makes_no_checkpoints_of_its_own(store: BatchStore) -> None:
    values = [
        store._db.execute(f"PRAGMA {name}")[0][0] for name in ("journal_mode", "synchronous", "wal_autocheckpoint")
    ]
    assert values == ["wal", 2, 0]


def test_a_ledger_is_checkpointed_every_second_and_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    journal, wal = opened(tmp_path), tmp_path / "job-wal"
    journal.register([item(1), item(2)])
    assert wal.stat().st_size > 0
    now = 1.5
    journal.record([result(item(1))])
    assert wal.stat().st_size == 0
    journal.record([result(item(2))])
    assert wal.stat().st_size > 0
    journal.close()
    assert not wal.exists()


def test_a_checkpoint_that_fails_loses_nothing_and_is_logged(
    store: BatchStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = store._db._db

    class Failing:
        def execute(self, statement: str, *values: Any) -> object:
            if "wal_checkpoint" in statement:
                raise sqlite3.OperationalError("disk I/O error")
            return real.execute(statement, *values)

    monkeypatch.setattr(store._db, "_db", Failing())
    with caplog.at_level(logging.WARNING):
        store.add_file(FILE)
    assert "checkpoint failed, retrying after the next commit: disk I/O error" in caplog.text
    monkeypatch.undo()
    shutil.copytree(tmp_path, tmp_path / "killed")
    again = BatchStore(tmp_path / "killed" / "jobs.sqlite3")
    assert again.file("file-a") == FILE
    again.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to the disk, in order."""
    events: list[str] = []
    fsync, replace, add_file = os.fsync, Path.replace, BatchStore.add_file

    def record_fsync(handle: int) -> None:
        events.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        fsync(handle)

    def record_replace(path: Path, target: Path) -> Path:
        events.append(f"rename {path.parent.name}/{path.name} to {target.parent.name}")
        return replace(path, target)

    def record_add(store: BatchStore, *arguments: object) -> None:
        events.append("row")
        add_file(store, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_replace)
    monkeypatch.setattr(BatchStore, "add_file", record_add)
    return events


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the names of open files are read from /proc")
async def test_an_upload_is_on_the_disk_before_its_row_and_in_its_place_before_the_answer(
    tmp_path: Path, disk: list[str]
) -> None:
    data = open_data_folder(tmp_path / "data")
    assert disk == [f"fsync {tmp_path.name}", "fsync data", "fsync data"]  # the folder, the database, the subfolders
    disk.clear()
    data.incoming("file-a").write_bytes(b"abc")
    await data.add_file(FILE)
    assert disk == ["fsync file-a", "fsync incoming", "row", "rename incoming/file-a to files", "fsync files"]
    data.close()


async def test_a_client_that_disconnects_at_the_end_of_its_upload_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler deletes what is left of the upload when `add_file` returns: that must not be what is to be added."""
    data = open_data_folder(tmp_path / "data")
    slow, add_file = threading.Event(), BatchStore.add_file

    def add_slowly(*arguments: object) -> None:
        slow.wait(5)
        add_file(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(BatchStore, "add_file", add_slowly)
    data.incoming("file-a").write_bytes(b"abc")
    adding = asyncio.create_task(data.add_file(FILE))
    await asyncio.sleep(0.05)
    adding.cancel()
    asyncio.get_running_loop().call_later(0.1, slow.set)
    with pytest.raises(asyncio.CancelledError):
        await adding
    assert data.content("file-a").read_bytes() == b"abc"
    data.close()


async def test_a_deletion_is_completed_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_data_folder(tmp_path / "data")
    data.incoming("file-a").write_bytes(b"abc")
    await data.add_file(FILE)
    with monkeypatch.context() as patch:
        patch.setattr(DataFolder, "_unlink", lambda *_: None)  # killed here
        await data.delete_file("file-a")
    data.close()
    again = open_data_folder(tmp_path / "data")
    assert not again.content("file-a").exists()
    assert not [*(tmp_path / "data").glob("unknown-*")]
    assert again._store.read_contents().deleted == set()
    again.close()


async def test_an_upload_is_compared_by_its_hash_and_one_of_0_1_0_by_its_size(tmp_path: Path) -> None:
    data = open_data_folder(tmp_path / "data")
    for name, sha256 in (("new", hashlib.sha256(b"abc").hexdigest()), ("old", None)):
        data.incoming(name).write_bytes(b"abc")
        await data.add_file(msgspec.structs.replace(FILE, id=name), sha256=sha256)
    with ThreadPoolExecutor(1) as thread:
        for name in ("new", "old"):
            await data.check_upload(name, thread)
            data.content(name).write_bytes(b"abd")
        with pytest.raises(InputChanged, match="differs from the uploaded content"):
            await data.check_upload("new", thread)
        await data.check_upload("old", thread)
        data.content("old").write_bytes(b"ab")
        with pytest.raises(InputChanged, match="has 2 bytes instead of the uploaded 3"):
            await data.check_upload("old", thread)
        with pytest.raises(ConfigError, match="is not in the database"):
            await data.check_upload("other", thread)
    data.close()


def lost(path: Path) -> None:
    path.unlink()


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [lost, emptied])
def test_results_without_their_ledger_are_not_written_to(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    journal = opened(tmp_path)
    journal.register([item(1)])
    journal.record([result(item(1))])
    journal.close()
    damage(tmp_path / "job")
    for _ in range(2):
        ledger = Ledger(tmp_path / "job")
        with pytest.raises(LedgerLost, match=r"has no record of out.jsonl, which has \d+ bytes"):
            Journal(ledger, tmp_path / "out.jsonl", tmp_path / "errors.jsonl")
        ledger.close()
    assert ids_of(tmp_path / "out.jsonl") == ["id-1"]


def test_results_that_an_older_ledger_lacks_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [item(i) for i in range(1, 5)]
    journal = opened(tmp_path)
    journal.register(lines)
    journal.record([result(lines[0])])
    journal.ledger._db._checkpoint()
    shutil.copy(tmp_path / "job", tmp_path / "earlier")
    for each in lines[1:3]:
        journal.record([result(each)])
    journal.close()
    (tmp_path / "earlier").replace(tmp_path / "job")
    journal = opened(tmp_path)
    assert journal.register(lines) == lines[1:]
    assert ids_of(uncommitted_path(tmp_path / "out.jsonl")) == ["id-2", "id-3"]
    assert "its last 2 lines were not committed and will be answered again; they were saved to" in caplog.text
    journal.close()


@pytest.mark.parametrize("ordered", [False, True])
def test_a_ledger_of_which_only_some_pages_are_newer_is_refused(tmp_path: Path, ordered: bool) -> None:
    """As in a copy that was made while it was written: its lines would be done, and their results cut off."""
    lines = [item(i) for i in range(1, 4)]
    journal = opened(tmp_path, ordered=ordered)
    journal.register(lines)
    journal.record([result(lines[0])])
    earlier = journal.ledger._db.execute("SELECT * FROM numbers")
    journal.record([result(lines[2])])
    journal.close()
    db = sqlite3.connect(tmp_path / "job")
    db.executemany("INSERT OR REPLACE INTO numbers VALUES (?, ?)", earlier)
    db.commit()
    db.close()
    with pytest.raises(StorageError, match="is corrupt: restore it from a backup"):
        Ledger(tmp_path / "job")
