"""The database of files and batches, and its folder: leftovers of a kill are cleaned up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cppbatch.errors import Conflict, InvalidRequest, NotFound, StorageError
from cppbatch.jobs.batches.data_folder import DataFolder, open_data_folder
from cppbatch.jobs.batches.manager import BatchManager
from cppbatch.jobs.batches.records import Batch, BatchRecord, File, check_metadata, completion_window_seconds
from cppbatch.jobs.batches.store import BatchStore, Page

EVERY = Page(limit=100, newest_first=False)


def file(name: str, **others: Any) -> File:
    fields: dict[str, Any] = {
        "id": f"file-{name}",
        "bytes": 3,
        "created_at": 1,
        "filename": f"{name}.jsonl",
        "purpose": "batch",
    }
    return File(**{**fields, **others})


def batch(name: str, **others: Any) -> BatchRecord:
    fields: dict[str, Any] = {
        "endpoint": "/v1/completions",
        "model": "m",
        "input_file_id": "file-in",
        "completion_window": "1h",
    }
    shown = Batch(id=f"batch_{name}", created_at=1, expires_at=2, **{**fields, **others})
    return BatchRecord(batch=shown, output_file_id=f"file-{name}-out", error_file_id=f"file-{name}-err")


def ended(record: BatchRecord) -> BatchRecord:
    return msgspec.structs.replace(record, batch=msgspec.structs.replace(record.batch, status="completed"))


def test_a_file_is_unchanged_after_a_restart(store: BatchStore, tmp_path: Path) -> None:
    store.add_file(file("a", expires_at=99))
    store.add_file(file("a", bytes=4))  # as when a batch puts its files in place again
    store.close()
    again = BatchStore(tmp_path / "jobs.sqlite3")
    assert again.file("file-a") == file("a", expires_at=99)
    again.close()
    with pytest.raises(NotFound, match="file-b"):
        BatchStore(tmp_path / "other.sqlite3").file("file-b")


def test_pages_follow_each_other_in_both_orders(store: BatchStore) -> None:
    for name in "abcde":
        store.add_file(file(name, purpose="vision" if name == "c" else "batch"))
    names = [f"file-{name}" for name in "abcde"]
    for newest_first, expected in ((False, names), (True, names[::-1])):
        seen: list[str] = []
        has_more, after = True, None
        while has_more:
            page, has_more = store.files(Page(after=after, limit=2, newest_first=newest_first))
            seen += [each.id for each in page]
            after = seen[-1]
        assert seen == expected
    assert [each.id for each in store.files(EVERY, "vision")[0]] == ["file-c"]
    with pytest.raises(InvalidRequest, match="after"):
        store.files(Page(after="file-z", limit=2))


def test_the_files_of_an_open_batch_are_not_deleted(store: BatchStore) -> None:
    store.add_file(file("in", expires_at=10))
    store.add_batch(batch("a"))
    with pytest.raises(Conflict, match="batch_a"):
        store.delete_file("file-in")
    assert store.delete_expired(100) == []
    store.update_batch(ended(batch("a")), [file("a-out")])
    assert store.delete_expired(9) == []
    assert store.delete_expired(10) == ["file-in"]
    store.delete_file("file-a-out")
    with pytest.raises(NotFound):
        store.delete_file("file-a-out")


def test_a_batch_is_created_only_from_an_existing_file_with_purpose_batch(store: BatchStore) -> None:
    with pytest.raises(InvalidRequest, match=r"input_file_id: file .* not found"):
        store.add_batch(batch("a"))
    store.add_file(file("in", purpose="vision"))
    with pytest.raises(InvalidRequest, match="purpose must be"):
        store.add_batch(batch("a"))
    assert store.batches(EVERY) == ([], False)


def test_open_batches_are_those_that_have_not_ended(store: BatchStore) -> None:
    store.add_file(file("in"))
    for name in "abc":
        store.add_batch(batch(name))
    store.update_batch(ended(batch("b")))
    assert [record.batch.id for record in store.open_batches()] == ["batch_a", "batch_c"]
    assert store.batch("batch_b").status == "completed"
    assert [each.id for each in store.batches(Page(limit=2))[0]] == ["batch_c", "batch_b"]
    with pytest.raises(NotFound, match="batch_z"):
        store.batch("batch_z")


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Callable[[], DataFolder]]:
    opened: list[DataFolder] = []

    def open_folder() -> DataFolder:
        if opened:
            opened.pop().close()
        opened.append(open_data_folder(tmp_path / "new" / "data"))
        return opened[-1]

    yield open_folder
    opened.pop().close()


async def test_leftovers_of_a_kill_are_cleaned_up_at_the_next_start(
    open_folder: Callable[[], DataFolder], caplog: pytest.LogCaptureFixture
) -> None:
    data = open_folder()
    for name in ("in", "deleted"):
        data.incoming(f"file-{name}").write_bytes(b"abc")
        await data.add_file(file(name))
    for name in ("a", "b"):
        await data.query(BatchStore.add_batch, batch(name))
    await data.query(BatchStore.update_batch, ended(batch("b")))
    await data.query(BatchStore.delete_file, "file-deleted")  # killed before its contents were deleted
    await data.query(BatchStore.add_file, file("late"))  # killed before its contents were in place
    data.incoming("file-late").write_bytes(b"abc")
    data.incoming("file-half").write_bytes(b"x")  # an upload
    data.content("file-a-out").write_bytes(b"x")  # that of a batch which is just putting its files in place
    for name in ("batch_a", "batch_b"):
        data.batch(name).mkdir()
        (data.batch(name) / "ledger.sqlite3").write_bytes(b"")
    again = open_folder()
    found = {path.relative_to(again.folder).as_posix() for path in again.folder.glob("*/*")}
    assert found == {"files/file-in", "files/file-late", "files/file-a-out", "batches/batch_a"}
    assert [record.batch.id for record in again.open_batches] == ["batch_a"]
    assert not caplog.records


async def test_a_file_is_not_kept_if_its_row_cannot_be_written(
    open_folder: Callable[[], DataFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("the disk is full")

    data = open_folder()
    data.incoming("file-a").write_bytes(b"abc")
    monkeypatch.setattr(data._store, "add_file", full)
    with pytest.raises(StorageError, match="full"):
        await data.add_file(file("a"))
    assert not data.content("file-a").exists()
    monkeypatch.undo()
    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(StorageError, match="no such disk"):
        await data.add_file(file("a"))
    with pytest.raises(NotFound):
        await data.query(BatchStore.file, "file-a")


def failing(*_: object) -> None:
    raise OSError(5, "no such disk")


async def test_expired_files_are_deleted(open_folder: Callable[[], DataFolder]) -> None:
    data = open_folder()
    for name, expires_at in (("a", 10), ("b", None)):
        data.incoming(f"file-{name}").write_bytes(b"abc")
        await data.add_file(file(name, expires_at=expires_at))
    await data.delete_expired(10)
    assert [path.name for path in (data.folder / "files").iterdir()] == ["file-b"]


@pytest.mark.parametrize("part", ["incoming", "files", "batches"])
def test_a_folder_with_other_files_is_not_touched(tmp_path: Path, part: str) -> None:
    mine = tmp_path / part / "mine" if part != "batches" else tmp_path / part / "of" / "mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("x")
    with pytest.raises(StorageError, match=f"contains '{part}' but no jobs.sqlite3"):
        open_data_folder(tmp_path)
    assert mine.read_text() == "x"


def test_a_folder_that_cannot_be_used_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file is a file"):
        open_data_folder(tmp_path / "file")
    with pytest.raises(StorageError, match=r"file/data.*check its name"):
        open_data_folder(tmp_path / "file" / "data")

    def read_only(path: Path, **_: Any) -> None:
        raise OSError(30, "Read-only file system", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", read_only)
        with pytest.raises(StorageError, match=r"Read-only file system.*make it and its folder writable"):
            open_data_folder(tmp_path / "new")


async def test_a_batch_runs_even_if_its_client_disconnects_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = open_data_folder(tmp_path)
    await data.query(BatchStore.add_file, file("in"))
    add = BatchStore.add_batch

    def add_slowly(*arguments: Any) -> None:
        time.sleep(0.2)
        add(*arguments)

    monkeypatch.setattr(BatchStore, "add_batch", add_slowly)
    batches = BatchManager(data, ["/v1/completions"])
    fields: dict[str, Any] = {
        "endpoint": "/v1/completions",
        "input_file_id": "file-in",
        "completion_window": "1h",
        "model": "m",
    }
    making = asyncio.create_task(batches.create(**fields))
    await asyncio.sleep(0.05)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    await asyncio.sleep(0.3)
    (known,) = await data.query(BatchStore.open_batches)
    assert [batch.id for batch in batches.open_batches] == [known.batch.id]
    await batches.close()


@pytest.mark.parametrize(("given", "seconds"), [("24h", 86400), ("30m", 1800), ("90s", 90), ("7d", 604800)])
def test_completion_windows_are_numbers_with_units(given: str, seconds: int) -> None:
    assert completion_window_seconds(given) == seconds


@pytest.mark.parametrize("given", ["", "24", "h", "0h", "-1h", "1.5h", "24 h", "1w", "367d", "٣h", "9" * 5000 + "h"])
def test_other_completion_windows_are_refused(given: str) -> None:
    with pytest.raises(InvalidRequest, match="completion_window"):
        completion_window_seconds(given)


def test_metadata_has_openais_limits() -> None:
    check_metadata({str(i): "v" * 512 for i in range(16)})
    check_metadata(None)
    for metadata in ({str(i): "" for i in range(17)}, {"k" * 65: ""}, {"k": "v" * 513}):
        with pytest.raises(InvalidRequest, match="metadata"):
            check_metadata(metadata)
