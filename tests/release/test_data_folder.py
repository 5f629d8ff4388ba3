"""`cppbatch serve` and a data folder that it cannot use."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import openai
import pytest

from cppbatch.jobs.batches.store import BatchStore
from tests.support.batch_files import client_of, start_server
from tests.support.server_process import ServerProcess


def test_a_named_folder_that_cannot_be_used_ends_the_server(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "jobs.sqlite3").write_bytes(b"no database" * 1000)
    (tmp_path / "newer").mkdir()
    BatchStore(tmp_path / "newer" / "jobs.sqlite3").close()
    newer = sqlite3.connect(tmp_path / "newer" / "jobs.sqlite3")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    for name in ("empty", "lost"):
        (tmp_path / name / "files").mkdir(parents=True)
        (tmp_path / name / "files" / "file-a").write_bytes(b"mine")
    (tmp_path / "empty" / "jobs.sqlite3").touch()
    says = {
        "file": "is a file",
        "broken": "not a database",
        "newer": "newer cppbatch",
        "data": "in use by another",
        "empty": "contains 'files' but an empty jobs.sqlite3",
        "lost": "contains 'files' but no jobs.sqlite3",
    }
    other = start_server(tiny_llama, tmp_path / "data")
    for name, part in says.items():
        with ServerProcess("-m", tiny_llama, "--data-dir", tmp_path / name) as process:
            assert process.wait() == 2
            assert part in process.stop()
        assert len(process.errors) == 1, process.errors
        assert str(tmp_path / name) in process.errors[0]
    assert (tmp_path / "empty" / "files" / "file-a").read_bytes() == b"mine"
    assert (tmp_path / "lost" / "files" / "file-a").read_bytes() == b"mine"
    other.stop()


def test_unknown_files_are_moved_aside_and_logged(tiny_llama: Path, tmp_path: Path) -> None:
    other = start_server(tiny_llama, tmp_path)
    mine = client_of(other).files.create(file=b"mine", purpose="user_data")
    other.stop()
    (tmp_path / "files" / "stray").mkdir()
    (tmp_path / "files" / "stray" / "file").write_bytes(b"stray")
    with ServerProcess("-m", tiny_llama, "--data-dir", tmp_path) as process:
        assert client_of(process.wait_ready()).files.content(mine.id).content == b"mine"
        log = process.stop()
    (aside,) = tmp_path.glob("unknown-*")
    assert (aside / "files" / "stray" / "file").read_bytes() == b"stray"
    assert f"to {aside}; nothing was deleted: files/stray" in log


def test_the_default_folder_may_be_in_use(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    other = start_server(tiny_llama, tmp_path / "cppbatch")
    with ServerProcess("-m", tiny_llama) as process:
        client = client_of(process.wait_ready())
        with pytest.raises(openai.APIStatusError, match="in use by another cppbatch") as refused:
            client.batches.list()
        assert refused.value.status_code == 503
        assert client.models.list().data
        assert "--data-dir" in process.stop()
    other.stop()
