"""Whatever happens to a data folder: contents are never deleted, and the loss is said, or the start refused."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import shutil
import socket
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cppbatch.errors import InputChanged, StorageError
from cppbatch.jobs.batches.active_batch import ActiveBatch
from cppbatch.jobs.batches.data_folder import DataFolder, _check_upload, open_data_folder
from cppbatch.jobs.batches.manager import BatchManager
from cppbatch.jobs.batches.records import Batch, BatchRecord, File
from cppbatch.jobs.batches.store import BatchStore, Page
from cppbatch.jobs.journal import Journal
from cppbatch.jobs.ledger import Ledger
from tests.support.job_results import item, result
from tests.unit.test_stored_formats import JOBS

URL = "/v1/completions"
FAR = 2**33
PAGE = 4096
N_RESULTS = 40
Damage = Callable[[Path, Path], object]


def upload(name: str) -> File:
    return File(id=f"file-{name}", bytes=len(name) * 1000, created_at=1, filename=name, purpose="batch")


def batch(name: str, *, status: str = "in_progress") -> BatchRecord:
    shown = Batch(
        id=f"batch_{name}",
        created_at=1,
        expires_at=FAR,
        in_progress_at=1,
        endpoint=URL,
        model="m",
        input_file_id="file-in",
        completion_window="1h",
        status=status,  # type: ignore[arg-type]
    )
    return BatchRecord(
        batch=shown, output_file_id=f"file-{name}-out", error_file_id=f"file-{name}-err", is_begun=status != "ended"
    )


async def add(data: DataFolder, name: str) -> None:
    data.incoming(f"file-{name}").write_bytes(name.encode() * 1000)
    await data.add_file(upload(name))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with five uploads, a running and a completed batch, as kill -9 leaves it. Beside it, `earlier`: a copy
    from before the last uploads and the completed batch, and before half of the results."""
    root = tmp_path_factory.mktemp("folders")
    asyncio.run(fill(root))
    return root / "killed"


async def fill(root: Path) -> None:
    data = open_data_folder(root / "live")
    await add(data, "in")
    for i in range(20):
        await data.query(BatchStore.add_batch, batch(f"old-{i}"))
        await data.query(
            BatchStore.update_batch,
            msgspec.structs.replace(
                batch(f"old-{i}"), batch=msgspec.structs.replace(batch(f"old-{i}").batch, status="failed")
            ),
        )
    await data.query(BatchStore.add_batch, batch("a"))
    data.batch("batch_a").mkdir()
    journal = Journal(
        Ledger(data.batch("batch_a") / "ledger.sqlite3"), *ActiveBatch(batch("a"), data, [URL])._result_paths()
    )
    lines = [item(i) for i in range(1, 2000)]
    journal.register(lines)
    journal.record([result(each) for each in lines[: N_RESULTS // 2]])
    journal.ledger._db._checkpoint()
    shutil.copytree(root / "live", root / "earlier")
    for each in lines[N_RESULTS // 2 : N_RESULTS]:
        journal.record([result(each)])
    for name in ("two", "three", "four", "five"):
        await add(data, name)
    await data.query(BatchStore.add_batch, batch("b"))
    (data.folder / "files" / "file-b-out").write_bytes(b"{}\n")
    completed = msgspec.structs.replace(batch("b"), batch=msgspec.structs.replace(batch("b").batch, status="completed"))
    output = File(id="file-b-out", bytes=3, created_at=1, filename="b", purpose="batch_output")
    await data.query(BatchStore.update_batch, completed, [output])
    shutil.copytree(root / "live", root / "killed")
    journal.close()
    data.close()


def database(folder: Path) -> Path:
    return folder / "jobs.sqlite3"


def wal(folder: Path) -> Path:
    return folder / "jobs.sqlite3-wal"


def sql(*statements: str) -> Damage:
    """Changes the database."""

    def change(folder: Path, _: Path) -> None:
        db = sqlite3.connect(database(folder), isolation_level=None)
        for statement in statements:
            db.execute(statement)
        db.close()

    return change


def other_database(*statements: str) -> Damage:
    """Another database in the place of jobs.sqlite3."""

    def replace(folder: Path, killed: Path) -> None:
        for path in (database(folder), wal(folder)):
            path.unlink()
        sql(*statements)(folder, killed)

    return replace


def written(name: str, data: bytes) -> Damage:
    def write(folder: Path, _: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    return write


def removed(*names: str) -> Damage:
    def remove(folder: Path, _: Path) -> None:
        for name in names:
            shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()

    return remove


def cut(name: str, part: float) -> Damage:
    def shorten(folder: Path, _: Path) -> None:
        os.truncate(folder / name, int((folder / name).stat().st_size * part))

    return shorten


def page(name: str, number: int) -> Damage:
    """A page of random bytes."""

    def overwrite(folder: Path, _: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.seek(PAGE * number)
            file.write(random.Random(number).randbytes(PAGE))

    return overwrite


def index_page(folder: Path, killed: Path) -> None:
    """The page of the index of file IDs, empty."""
    db = sqlite3.connect(database(folder))
    ((number,),) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_files_1'")
    db.close()
    with database(folder).open("r+b") as file:
        file.seek(PAGE * (number - 1))
        file.write(bytes([10, 0, 0, 0, 0, PAGE >> 8, 0, 0]))


def earlier(*names: str) -> Damage:
    """These come from a copy that was made earlier."""

    def copy(folder: Path, killed: Path) -> None:
        for name in names:
            shutil.copy(killed.with_name("earlier") / name, folder / name)

    return copy


def old_version(damage: Damage) -> Damage:
    """A server of 0.1.0 was killed with all its changes in the WAL."""

    def replace(folder: Path, killed: Path) -> None:
        for path in (database(folder), wal(folder)):
            path.unlink()
        db = sqlite3.connect(database(folder), isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.executescript(JOBS)
        for name in ("in", "two", "three", "four", "five"):
            record = msgspec.json.encode(upload(name))
            db.execute("INSERT INTO files VALUES (NULL, ?, 'batch', NULL, ?)", (f"file-{name}", record))
        kept = [(path, path.read_bytes()) for path in (database(folder), wal(folder))]
        db.close()
        for path, data in kept:
            path.write_bytes(data)
        damage(folder, killed)

    return replace


def flipped_frame(folder: Path, _: Path) -> None:
    data = bytearray(wal(folder).read_bytes())
    data[-2 * PAGE] ^= 1
    wal(folder).write_bytes(data)


def folder_of(name: str) -> Damage:
    def make(folder: Path, _: Path) -> None:
        (folder / name / "deep").mkdir(parents=True)
        (folder / name / "deep" / "mine").write_bytes(b"mine")

    return make


def link(name: str, target: str) -> Damage:
    def make(folder: Path, killed: Path) -> None:
        (folder / name).symlink_to(killed / target)

    return make


def unix_socket(folder: Path, _: Path) -> None:
    here = Path.cwd()
    os.chdir(folder / "files")  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind("socket")
    finally:
        os.chdir(here)


def unreadable(folder: Path, _: Path) -> None:
    (folder / "files" / "secret").write_bytes(b"secret")
    (folder / "files" / "secret").chmod(0)


def both(*damages: Damage) -> Damage:
    def each(folder: Path, killed: Path) -> None:
        for damage in damages:
            damage(folder, killed)

    return each


LEDGER, OUTPUT = "batches/batch_a/ledger.sqlite3", "batches/batch_a/output.jsonl"
LEDGER_WAL = LEDGER + "-wal"
ERRORS = "batches/batch_a/errors.jsonl"
NOT_OURS = "is not a database of cppbatch"
ASIDE = "nothing was deleted"
NONE_OF = "contains none of the 6 files"
OVER = "batch_a starts over"
UNREADABLE = "batch_a: cannot read its results so far"
REFUSED: dict[str, tuple[Damage, str]] = {
    "database: 0 bytes": (written("jobs.sqlite3", b""), "an empty jobs.sqlite3"),
    "database: gone": (removed("jobs.sqlite3"), "but no jobs.sqlite3"),
    "database: gone with its WAL": (removed("jobs.sqlite3", "jobs.sqlite3-wal"), "but no jobs.sqlite3"),
    "database: a text": (written("jobs.sqlite3", b"no database" * 1000), NOT_OURS),
    "database: random bytes": (written("jobs.sqlite3", random.Random(0).randbytes(9 * PAGE)), NOT_OURS),
    "database: another program's": (other_database("CREATE TABLE moz_places (id)"), NOT_OURS),
    "database: another program's, with its id": (other_database("PRAGMA application_id = 7"), NOT_OURS),
    "database: another program's, with its version": (
        other_database("CREATE TABLE places (id)", "PRAGMA user_version = 2"),
        NOT_OURS,
    ),
    "database: another program's, with a table of our name": (
        other_database("CREATE TABLE files (id)", "PRAGMA user_version = 1"),
        NOT_OURS,
    ),
    "database: a ledger": (
        both(removed("jobs.sqlite3-wal"), lambda f, k: shutil.copy(f / LEDGER, database(f))),
        NOT_OURS,
    ),
    "database: without tables": (other_database("PRAGMA user_version = 0", "VACUUM"), "jobs.sqlite3"),
    "database: without tables, in WAL mode": (other_database("PRAGMA journal_mode = WAL"), "has no tables"),
    "database: new": (
        both(removed("jobs.sqlite3", "jobs.sqlite3-wal"), lambda f, _: BatchStore(database(f)).close()),
        "never contained any data",
    ),
    "database: cut in half": (cut("jobs.sqlite3", 0.5), "is corrupt"),
    "database: cut to its first page": (lambda f, _: os.truncate(database(f), PAGE), "is corrupt"),
    "database: its first page": (page("jobs.sqlite3", 0), NOT_OURS),
    "database: a page of the schema's tables": (page("jobs.sqlite3", 2), "is corrupt"),
    "database: an index without its rows": (index_page, "is corrupt"),
    "database: a table dropped": (sql("DROP TABLE batches"), "no table batches"),
    "database: a row that is not JSON": (sql("UPDATE files SET record = x'7b' WHERE id = 'file-two'"), "is corrupt"),
    "database: a row of another file": (sql("UPDATE files SET id = 'file-2' WHERE id = 'file-two'"), "is corrupt"),
    "database: of a newer version": (sql("PRAGMA user_version = 99"), "newer cppbatch"),
    "database: the WAL of a ledger": (lambda f, _: shutil.copy(f / LEDGER_WAL, wal(f)), "is corrupt"),
    "0.1.0, killed: without its WAL": (old_version(removed("jobs.sqlite3-wal")), "has no tables"),
    "0.1.0, killed: a frame of its WAL cut off": (old_version(cut("jobs.sqlite3-wal", 0.1)), "has no tables"),
    "files: gone": (removed("files"), NONE_OF),
    "files: empty": (both(removed("files"), lambda f, _: (f / "files").mkdir()), NONE_OF),
    "files: a file": (both(removed("files"), written("files", b"mine")), NONE_OF),
    "batches: a file": (both(removed("batches"), written("batches", b"mine")), "batches"),
}
"""The damage, and the text of the refusal."""
SAID: dict[str, tuple[Damage, str]] = {
    "database: an earlier copy": (earlier("jobs.sqlite3"), ASIDE),
    "0.1.0, killed: a frame of its WAL flipped": (old_version(flipped_frame), ASIDE),
    "0.1.0, killed: its WAL cut": (old_version(cut("jobs.sqlite3-wal", 0.9)), ASIDE),
    "files: one gone": (removed("files/file-two"), "file-two: No such file"),
    "files: one shorter": (cut("files/file-two", 0.5), "file-two: has 1500 bytes instead of 3000"),
    "files: one longer": (written("files/file-two", b"x" * 4000), "file-two: has 4000 bytes"),
    "files: a folder in the place of one": (
        both(removed("files/file-two"), folder_of("files/file-two")),
        "file-two: is not a file",
    ),
    "files: a pipe in the place of one": (
        both(removed("files/file-two"), lambda f, _: os.mkfifo(f / "files" / "file-two")),
        "file-two: is not a file",
    ),
    "files: the results of a batch gone": (removed("files/file-b-out"), "file-b-out: No such file"),
    "files: a stray file": (written("files/mine", b"mine"), ASIDE),
    "files: a stray folder": (folder_of("files/mine"), ASIDE),
    "files: a stray link to a folder": (link("files/mine", "files"), ASIDE),
    "files: a link to nothing": (link("files/mine", "nowhere"), ASIDE),
    "files: a pipe": (lambda f, _: os.mkfifo(f / "files" / "pipe"), ASIDE),
    "files: a socket": (unix_socket, ASIDE),
    "files: an unreadable file": (unreadable, ASIDE),
    "incoming: a stray folder": (folder_of("incoming/file-mine"), ASIDE),
    "incoming: a stray file": (written("incoming/mine", b"mine"), ASIDE),
    "batches: a stray folder": (folder_of("batches/mine"), ASIDE),
    "batches: a stray file": (written("batches/mine", b"mine"), ASIDE),
    "batches: a file in the place of one": (
        both(removed("batches/batch_a"), written("batches/batch_a", b"mine")),
        ASIDE,
    ),
    "batches: results of one that has ended": (
        lambda f, _: shutil.copytree(f / "batches/batch_a", f / "batches/batch_b"),
        ASIDE,
    ),
    "batches: an open one gone": (removed("batches/batch_a"), OVER),
    "ledger: gone": (removed(LEDGER, LEDGER_WAL), OVER),
    "ledger: 0 bytes": (both(removed(LEDGER_WAL), written(LEDGER, b"")), OVER),
    "ledger: a new one": (both(removed(LEDGER, LEDGER_WAL), lambda f, _: Ledger(f / LEDGER).close()), OVER),
    "ledger: without its WAL": (removed(LEDGER_WAL), "its last 20 lines were not committed"),
    "ledger: its WAL cut": (cut(LEDGER_WAL, 0.5), "lines were not committed"),
    "ledger: an earlier copy": (both(removed(LEDGER_WAL), earlier(LEDGER)), "its last 20 lines were not committed"),
    "ledger: a text": (both(removed(LEDGER_WAL), written(LEDGER, b"no database" * 1000)), UNREADABLE),
    "ledger: a page": (both(removed(LEDGER_WAL), page(LEDGER, 9)), UNREADABLE),
    "ledger: the jobs' database": (lambda f, _: shutil.copy(database(f), f / LEDGER), UNREADABLE),
    "ledger: a pipe": (both(removed(LEDGER, LEDGER_WAL), lambda f, _: os.mkfifo(f / LEDGER)), UNREADABLE),
    "results: a pipe": (both(removed(OUTPUT), lambda f, _: os.mkfifo(f / OUTPUT)), UNREADABLE),
    "results: a pipe for the errors": (lambda f, _: os.mkfifo(f / ERRORS), UNREADABLE),
    "results: cut": (cut(OUTPUT, 0.5), UNREADABLE),
    "results: gone": (removed(OUTPUT), UNREADABLE),
    "results: longer": (
        lambda f, _: (f / OUTPUT).write_bytes((f / OUTPUT).read_bytes() + b'{"a": 1}\n{"b'),
        "its last 1 lines were not committed",
    ),
}
"""The damage, and the text of the log."""
HARMLESS: dict[str, Damage] = {
    "nothing": lambda *_: None,
    "WAL: gone": removed("jobs.sqlite3-wal"),
    "WAL: random bytes": written("jobs.sqlite3-wal", random.Random(1).randbytes(3 * PAGE)),
    "incoming: half an upload": written("incoming/file-half", b"x"),
    "batches: the empty folder of one that has ended": lambda f, _: (f / "batches/batch_b").mkdir(),
    "incoming: gone": removed("incoming"),
}


def pieces(folder: Path) -> Counter[bytes]:
    """Everything that users have stored: files, and lines of results."""
    found: Counter[bytes] = Counter()
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_file() or ".sqlite3" in path.name or path.name == "file-half":
            continue
        data = path.read_bytes()
        found.update(line for line in data.splitlines(True) if line.endswith(b"\n")) if b"\n" in data else found.update(
            [data]
        )
    return found


def opened(folder: Path) -> BatchManager:
    return BatchManager(open_data_folder(folder), [URL])


@pytest.mark.parametrize("name", REFUSED)
async def test_a_damaged_folder_is_refused_and_not_touched(killed: Path, tmp_path: Path, name: str) -> None:
    damage, reason = REFUSED[name]
    folder = tmp_path / "data"
    shutil.copytree(killed, folder)
    damage(folder, killed)
    before, paths = pieces(folder), {path for path in folder.rglob("*") if ".sqlite3" not in path.name}
    for _ in range(2):  # the second start finds what the first one has left
        with pytest.raises(StorageError) as refused:
            opened(folder)
        said = str(refused.value)
        assert reason in said
        assert str(folder) in said
        assert any(remedy in said.lower() for remedy in ("restore", "move", "update", "check"))
    assert pieces(folder) == before
    assert {path for path in folder.rglob("*") if ".sqlite3" not in path.name} == paths


async def test_no_damaged_byte_of_the_database_is_a_traceback(killed: Path, tmp_path: Path) -> None:
    """The damage is found, or it is in a byte that nobody reads. Half of the bytes are in the texts of records."""
    data, chance = database(killed).read_bytes(), random.Random(1)
    texts = [found.end() - 1 for found in re.finditer(rb"(?:file|batch)[-_][a-z]", data)]
    found = []
    for number in range(40):
        folder, at = tmp_path / str(number), chance.choice(texts if number % 2 else range(len(data)))
        shutil.copytree(killed, folder)
        wal(folder).unlink()
        byte = 0xFF if number % 2 else data[at] ^ 1 << chance.randrange(8)
        database(folder).write_bytes(data[:at] + bytes([byte]) + data[at + 1 :])
        try:
            manager = opened(folder)
        except StorageError as error:
            found.append(str(error))
        else:
            assert (await manager.page(Page(limit=9)))[0]
            await manager.close()
        shutil.rmtree(folder)
    assert len(found) > 10
    assert all("jobs.sqlite3" in each for each in found)


async def test_a_wal_of_another_database_does_not_get_into_it(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    shutil.copy(tmp_path / LEDGER_WAL, wal(tmp_path))
    with pytest.raises(StorageError, match="is corrupt"):
        opened(tmp_path)
    wal(tmp_path).unlink()
    manager = opened(tmp_path)
    assert (await manager.file("file-five"))[0] == upload("five")
    await manager.close()


@pytest.mark.parametrize("name", SAID)
async def test_a_damaged_folder_is_opened_with_a_log_line_and_everything_kept(
    killed: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, line = SAID[name]
    folder = tmp_path / "data"
    shutil.copytree(killed, folder, symlinks=True)
    damage(folder, killed)
    before, target = pieces(folder), pieces(killed)
    with caplog.at_level(logging.WARNING):
        manager = opened(folder)
    assert line in caplog.text
    assert str(folder) in caplog.text
    await manager.close()
    assert pieces(folder) >= before
    assert pieces(killed) == target
    if line == ASIDE:
        (aside,) = folder.glob("unknown-*")
        assert str(aside) in caplog.text
    caplog.clear()
    again = opened(folder)
    assert ASIDE not in caplog.text  # it was said, once
    await again.close()
    assert pieces(folder) >= before


@pytest.mark.parametrize("name", HARMLESS)
async def test_harmless_losses_are_tolerated(
    killed: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(killed, folder)
    before = pieces(folder)
    HARMLESS[name](folder, killed)
    manager = opened(folder)
    for each in ("in", "two", "three", "four", "five"):
        assert (await manager.file(f"file-{each}"))[0] == upload(each)
        assert manager.data.content(f"file-{each}").read_bytes() == each.encode() * 1000
    assert (await manager.get("batch_b")).status == "completed"
    assert (await manager.get("batch_a")).request_counts.completed == N_RESULTS
    assert not caplog.records
    await manager.close()
    assert pieces(folder) == before


@pytest.mark.timeout(30)
def test_a_pipe_in_place_of_an_upload_is_a_changed_input(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "content")
    with pytest.raises(InputChanged, match="is not a regular file"):
        _check_upload(tmp_path / "content", 0, None)
