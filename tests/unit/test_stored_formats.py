"""Databases that version 0.1.0 has written are read, and upgraded."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from cppbatch.jobs.batches.data_folder import open_data_folder
from cppbatch.jobs.batches.store import BatchStore
from cppbatch.jobs.job_request import RejectedLine
from cppbatch.jobs.journal import Journal
from cppbatch.jobs.ledger import Ledger
from tests.support.job_results import ids_of, item, result

FILE = (
    '{"id":"file-in","object":"file","bytes":2,"created_at":1795331178,"expires_at":1795338382,'
    '"filename":"input.jsonl","purpose":"batch","status":"processed"}'
)
IN_PROGRESS = (
    '{"shown":{"id":"batch_a","object":"batch","endpoint":"/v1/completions","model":"tiny-llama","errors":{"object":'
    '"list","data":[{"code":"invalid_json","message":"is not JSON","line":201,"param":null}]},"input_file_id":'
    '"file-in","completion_window":"24h","status":"in_progress","output_file_id":null,"error_file_id":null,"created_at":1795331184,'
    '"in_progress_at":1795331184,"expires_at":1795417584,"finalizing_at":null,"completed_at":null,"failed_at":null,'
    '"expired_at":null,"cancelling_at":null,"cancelled_at":null,"request_counts":{"total":203,"completed":0,"failed":0},'
    '"usage":{"input_tokens":0,"input_tokens_details":{"cached_tokens":0},"output_tokens":0,"output_tokens_details":'
    '{"reasoning_tokens":0},"total_tokens":0},"metadata":{"a":"b"}},"output_id":"file-out","errors_id":"file-err",'
    '"output_life":7200,"ending":null}'
)
FINALIZING = (
    IN_PROGRESS.replace('"batch_a"', '"batch_b"')
    .replace('"status":"in_progress"', '"status":"finalizing"')
    .replace('"ending":null', '"ending":"expired"')
)
JOBS = """
CREATE TABLE files (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, purpose TEXT NOT NULL,
    expires_at INTEGER, record BLOB NOT NULL);
CREATE INDEX expiring_files ON files (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE batches (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, input_file_id TEXT NOT NULL,
    is_open INTEGER NOT NULL, record BLOB NOT NULL);
CREATE INDEX open_batches ON batches (input_file_id) WHERE is_open;
PRAGMA user_version = 1;
"""
LEDGER = """
CREATE TABLE items (line INTEGER PRIMARY KEY, id INTEGER UNIQUE, content INTEGER NOT NULL, state INTEGER NOT NULL);
CREATE INDEX open_items ON items (line) WHERE state = 0;
CREATE TABLE held (line INTEGER PRIMARY KEY, result BLOB NOT NULL);
CREATE TABLE numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE notes (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
PRAGMA user_version = 1;
"""
HASHES = [  # of `item(1)` to `item(4)`: of the custom_id, and of the content
    (-3303862755467153830, 5033012808493016019),
    (3470997744342346565, -877069965078850478),
    (-6296445769870285196, -7121918824252571433),
    (-2153533963852029522, 3383104504664591386),
]


def database(path: Path, schema: str, **tables: list[tuple[object, ...]]) -> Path:
    db = sqlite3.connect(path)
    db.executescript(schema)
    for table, rows in tables.items():
        db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
    db.commit()
    db.close()
    return path


def schema_of(path: Path) -> list[tuple[object, ...]]:
    """Tables and columns, and the indices' conditions."""
    db = sqlite3.connect(path)
    columns = (
        "SELECT t.name, c.* FROM sqlite_schema t, pragma_table_info(t.name) c WHERE t.type = 'table' ORDER BY 1, 2"
    )
    indices = (
        "SELECT name, tbl_name, substr(sql, instr(sql, 'WHERE')) FROM sqlite_schema WHERE type = 'index' ORDER BY 1"
    )
    found = [
        *db.execute(columns),
        *db.execute(indices),
        *db.execute("PRAGMA user_version"),
        *db.execute("PRAGMA application_id"),
    ]
    db.close()
    return found


async def test_a_data_folder_of_0_1_0_is_read_and_every_key_sees_what_is_in_it(tmp_path: Path) -> None:
    path = database(
        tmp_path / "jobs.sqlite3",
        JOBS,
        files=[(1, "file-in", "batch", 1795338382, FILE.encode())],
        batches=[(1, "batch_a", "file-in", 1, IN_PROGRESS.encode()), (2, "batch_b", "file-in", 1, FINALIZING.encode())],
    )
    for name in ("incoming", "files", "batches/batch_a"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "files" / "file-in").write_bytes(b"{}")
    data = open_data_folder(tmp_path)
    first, second = data.open_batches
    assert (first.batch.status, first.output_file_id, first.error_file_id) == ("in_progress", "file-out", "file-err")
    assert (first.output_lifetime_s, first.final_status, second.final_status) == (7200, None, "expired")
    assert data.content("file-in").exists()
    assert data.batch("batch_a").exists()
    for record in (first, second):
        await data.query(BatchStore.update_batch, record)
    await data.query(BatchStore.add_file, await data.query(BatchStore.file, "file-in", "key:a"))
    assert (await data.query(BatchStore.batch, "batch_a", "key:a")).status == "in_progress"
    data.close()
    db = sqlite3.connect(path)
    assert [record for (record,) in db.execute("SELECT record FROM batches ORDER BY number")] == [
        record.replace('"ending":', '"owner":"","key":null,"is_begun":false,"ending":').encode()
        for record in (IN_PROGRESS, FINALIZING)
    ]
    db.close()


@pytest.mark.parametrize("ordered", [False, True])
def test_a_ledger_of_0_1_0_is_read(tmp_path: Path, ordered: bool) -> None:
    lines = [item(i) for i in range(1, 5)]
    written = result(lines[0]).data
    (tmp_path / "out.jsonl").write_bytes(written + b'{"half a')
    (tmp_path / "errors.jsonl").write_bytes(b"{}\n")
    path = database(
        tmp_path / "job",
        LEDGER,
        items=[(1, *HASHES[0], 1), (2, *HASHES[1], 2), (3, *HASHES[2], 0), *([(4, *HASHES[3], 1)] if ordered else [])],
        held=[(4, result(lines[3]).data)] if ordered else [(99, b"")],
        numbers=[("output_bytes", len(written)), ("error_bytes", 3), ("prompt_tokens", 7), ("completion_tokens", 9)],
        notes=[("settings", b'{"model":"tiny.gguf","chat template":null,"ordered":true}')],
    )
    ledger = Ledger(path)
    assert ledger.note("settings") == {"model": "tiny.gguf", "chat template": None, "ordered": True}
    journal = Journal(ledger, tmp_path / "out.jsonl", tmp_path / "errors.jsonl", ordered=ordered)
    assert (journal.n_completed, journal.n_failed) == (1 + ordered, 1)
    assert (journal.tokens["prompt_tokens"], journal.tokens["completion_tokens"]) == (7, 9)
    assert journal.register(lines) == (lines[2:3] if ordered else lines[2:])
    journal.record([result(each) for each in lines[2:3] + ([] if ordered else lines[3:])])
    journal.reject([RejectedLine(line=9, code="c", message="m", content_hash=1)])
    journal.close()
    assert ids_of(tmp_path / "out.jsonl") == ["id-1", "id-3", "id-4"]
    db = sqlite3.connect(path)
    assert list(db.execute("SELECT * FROM items ORDER BY line")) == [
        (line, *hashes, state) for line, hashes, state in zip((1, 2, 3, 4), HASHES, (1, 2, 1, 1), strict=True)
    ]
    names = {name for (name,) in db.execute("SELECT name FROM numbers")}
    assert names == {
        *("output_bytes", "error_bytes", "prompt_tokens", "completion_tokens"),
        *("n_completed", "n_failed", "n_held"),
    }
    db.close()


@pytest.mark.parametrize(("schema", "kind"), [(JOBS, BatchStore), (LEDGER, Ledger)])
def test_new_databases_have_the_schema_of_upgraded_ones(
    tmp_path: Path, schema: str, kind: Callable[[Path], BatchStore | Ledger]
) -> None:
    kind(tmp_path / "new").close()
    kind(database(tmp_path / "old", schema)).close()
    assert schema_of(tmp_path / "new") == schema_of(tmp_path / "old")
