"""Digests of weights: each bit counts, unchanged files are not read again, and a file that changes has none."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from cppbatch.errors import ModelError
from cppbatch.models import digest as digests
from cppbatch.models.digest import WeightFiles, file_digest, model_digest

MIB = 1 << 20


@pytest.fixture(autouse=True)
def cache(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own cache, in which files of all sizes count as large."""
    monkeypatch.setattr(digests, "_SMALL_BYTES", 0)
    monkeypatch.setattr(digests, "_SETTLED_NS", 0)
    return empty_cache / "digests"


@pytest.fixture
def n_read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read, in order."""
    found: list[Path] = []
    read = digests._hash

    def count(path: Path, *args: digests.IsStopped) -> str:
        found.append(path)
        return read(path, *args)

    monkeypatch.setattr(digests, "_hash", count)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(2 * MIB + 5))
    return path


def change(path: Path, at: int, *, keeps_time: bool = True) -> None:
    """Flips a bit, with the size and, unless told otherwise, the time of modification of before."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_single_bit_anywhere_changes_the_digest(model: Path, n_read: list[Path]) -> None:
    found = {file_digest(model)}
    for at in (0, MIB + 7, 2 * MIB + 4):
        change(model, at)
        found.add(file_digest(model))
    assert len(found) == len(n_read) == 4


def test_an_unchanged_file_is_read_once_under_all_its_names(model: Path, n_read: list[Path], tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    assert len({file_digest(model), file_digest(link), model_digest(link)}) == 1
    assert n_read == [model]
    files = WeightFiles(link)
    files.read_beside()
    assert files.are_known
    assert n_read == [model]


def test_a_link_that_leads_to_another_file_has_its_digest(model: Path, tmp_path: Path) -> None:
    link, other = tmp_path / "link.gguf", tmp_path / "other.gguf"
    other.write_bytes(model.read_bytes())
    change(other, MIB)
    link.symlink_to(model)
    first = file_digest(link)
    link.unlink()
    link.symlink_to(other)
    assert file_digest(link) == file_digest(other) != first


def test_a_digest_is_not_kept_if_the_file_may_change_within_the_resolution_of_its_times(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_SETTLED_NS", 60 * 10**9)
    file_digest(model)
    assert not cache.exists()
    monkeypatch.setattr(digests, "_SETTLED_NS", 0)
    file_digest(model)
    assert len(list(cache.iterdir())) == 1


def test_every_part_of_a_split_model_counts(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts:
        part.write_bytes(os.urandom(1000))
    found = {model_digest(parts[0])}
    for part in parts:
        change(part, 500)
        found.add(model_digest(parts[0]))
    assert len(found) == 4
    for part in parts[1:]:
        part.unlink()
    assert model_digest(parts[0]) == file_digest(parts[0]), "a whole model, in spite of its name"
    with pytest.raises(ModelError, match=r"none\.gguf cannot be read"):
        model_digest(tmp_path / "none.gguf")


def test_a_file_that_changes_while_it_is_read_has_no_digest(model: Path, cache: Path) -> None:
    def change_it() -> bool:
        change(model, 0)
        return False

    with pytest.raises(ModelError, match="changed while it was read"):
        file_digest(model, change_it)
    assert not cache.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="it has no named pipes in folders")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        model_digest(tmp_path / "pipe.gguf")


def test_reading_can_be_stopped(model: Path) -> None:
    with pytest.raises(ModelError, match="not read to its end"):
        file_digest(model, lambda: True)


def test_files_replaced_or_changed_since_they_were_loaded_have_no_digest(tmp_path: Path) -> None:
    def replace(path: Path) -> None:
        other = path.with_suffix(".new")
        other.write_bytes(path.read_bytes())
        os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
        other.replace(path)

    def edit(path: Path) -> None:
        change(path, 3, keeps_time=False)

    def delete(path: Path) -> None:
        path.unlink()

    for number, changed in enumerate((replace, edit, delete)):
        paths = [tmp_path / f"{number}-{name}.gguf" for name in ("model", "adapter")]
        for path in paths:
            path.write_bytes(b"weights")
        files = WeightFiles(paths[0], [paths[1]])
        files.read()
        os.link(paths[1], tmp_path / f"{number}-backup")  # changes nothing
        files.check()
        assert files.are_known
        changed(paths[1])
        with pytest.raises(ModelError, match=rf"{number}-adapter\.gguf has changed since it was loaded"):
            files.check()
        assert not files.are_known
        with pytest.raises(ModelError, match="has changed since it was loaded"):
            files.read()


def test_a_large_file_is_read_beside_other_work_and_closing_ends_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    gate, ended = threading.Event(), threading.Event()
    read = digests._hash

    def wait(path: Path, is_stopped: digests.IsStopped) -> str:
        gate.wait(10)
        try:
            return read(path, is_stopped)
        finally:
            ended.set()

    monkeypatch.setattr(digests, "_hash", wait)
    files = WeightFiles(model)
    began = time.monotonic()
    files.read_beside()
    files.wait(0.05)
    assert time.monotonic() - began < 1
    assert not files.are_known
    gate.set()
    files.wait(10)
    assert files.are_known

    cache.joinpath(next(cache.iterdir())).unlink()
    gate.clear()
    ended.clear()
    closed = WeightFiles(model)
    closed.read_beside()
    closed.close()
    gate.set()
    assert ended.wait(10)
    closed.wait(10)
    assert not closed.are_known
    assert not any(cache.iterdir())
