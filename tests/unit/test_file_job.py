"""Which files a job treats as its own: it never truncates or removes others."""

from __future__ import annotations

import os
import sqlite3
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from cppbatch.errors import ConfigError, StorageError
from cppbatch.jobs.durable_files import uncommitted_path
from cppbatch.jobs.file_job import FileJob, as_begun, begun_with, check_model, named, open_job
from cppbatch.jobs.input.format import InputFormat, detect_input_format
from cppbatch.jobs.journal import Journal
from cppbatch.models.digest import model_digest
from tests.support.job_results import ids_of, item, result


def a_job(folder: Path, **others: Path) -> FileJob:
    (folder / "in.txt").write_text("a\nb\n")
    return FileJob(
        input_format=detect_input_format(folder / "in.txt"),
        output=others.get("output", folder / "out.jsonl"),
        errors=others.get("errors", folder / "out.errors.jsonl"),
    )


def opened(job: FileJob, *, overwrite: bool = False) -> Journal:
    return open_job(job, "model.gguf", overwrite=overwrite, say=lambda _: None)


def begun(folder: Path) -> None:
    journal = opened(a_job(folder))
    journal.register([item(1), item(2)])
    journal.record([result(item(1)), result(item(2), status=500)])
    journal.close()


def test_another_adapter_of_the_same_name_does_not_continue_a_job(tmp_path: Path) -> None:
    journal = opened(a_job(tmp_path))
    check_model(journal, "model.gguf", "1", {"a/style.gguf": "2"})
    journal.register([item(1)])
    journal.record([result(item(1))])
    check_model(journal, "model.gguf", "1", {"b/style.gguf": "2", "mmproj.gguf": "3"})  # lines with images have failed
    with pytest.raises(ConfigError, match=r"was started with another file named style\.gguf than a/style\.gguf"):
        check_model(journal, "model.gguf", "1", {"a/style.gguf": "4"})
    journal.close()


def test_another_model_of_the_same_name_does_not_continue_a_job(tmp_path: Path) -> None:
    models = [tmp_path / name / "model.gguf" for name in "ab"]
    for model in models:
        model.parent.mkdir()
        model.write_bytes(model.parent.name.encode() * 100)
    journal = opened(a_job(tmp_path))
    for model in models:  # no result depends on the first one
        check_model(journal, str(model), model_digest(model))
    journal.register([item(1)])
    journal.record([result(item(1))])
    check_model(journal, str(models[1]), model_digest(models[1]))
    with pytest.raises(ConfigError, match=r"was started with another file named model\.gguf"):
        check_model(journal, str(models[0]), model_digest(models[0]))
    journal.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE notes SET value = CAST(replace(CAST(value AS TEXT), ':', ' ') AS BLOB)",
        "UPDATE notes SET value = x'ff'",
        "UPDATE notes SET value = x'313233'",
        "UPDATE notes SET value = 7",
        "UPDATE numbers SET value = 'many'",
        "UPDATE numbers SET value = CAST(x'ff' AS TEXT)",
    ],
)
def test_a_damaged_value_of_a_ledger_is_a_corrupt_ledger(tmp_path: Path, damage: str) -> None:
    begun(tmp_path)
    db = sqlite3.connect(a_job(tmp_path).ledger)
    db.execute(damage)
    db.commit()
    db.close()
    with pytest.raises(StorageError, match=r"\.job is corrupt: restore it from a backup, or move it away"):
        begun_with(a_job(tmp_path))


def test_an_input_that_can_be_read_only_once_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in.jsonl")
    with pytest.raises(ConfigError, match="is not a regular file"):
        detect_input_format(tmp_path / "in.jsonl")


@pytest.mark.parametrize("is_output_gone", [False, True])
def test_another_file_for_errors_is_left_as_it_is(tmp_path: Path, is_output_gone: bool) -> None:
    begun(tmp_path)
    notes = tmp_path / "notes.jsonl"
    notes.write_text("mine\n")
    if is_output_gone:
        (tmp_path / "out.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"notes\.jsonl"):
        opened(a_job(tmp_path, errors=notes))
    assert notes.read_text() == "mine\n"


def test_a_job_continues_in_a_moved_folder(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    begun(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    journal = opened(a_job(tmp_path / "there"))
    assert (journal.n_completed, journal.n_failed) == (1, 1)
    journal.close()


def test_a_job_with_deleted_results_starts_over(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "out.jsonl").unlink()
    journal = opened(a_job(tmp_path))
    assert (journal.n_completed, journal.n_failed) == (0, 0)
    assert not (tmp_path / "out.errors.jsonl").exists()
    journal.close()


def test_results_are_not_overwritten_for_a_missing_input(tmp_path: Path) -> None:
    begun(tmp_path)
    job = a_job(tmp_path)
    (tmp_path / "in.txt").unlink()
    with pytest.raises(ConfigError, match=r"in\.txt: cannot be read"):
        opened(job, overwrite=True)
    assert (tmp_path / "out.jsonl").stat().st_size


@pytest.mark.parametrize("name", ["output", "errors"])
def test_a_loop_of_links_is_named(tmp_path: Path, name: str) -> None:
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    with pytest.raises((ConfigError, StorageError), match=r"loop\.jsonl"):  # Python 3.13 reports it when it is opened
        opened(a_job(tmp_path, **{name: loop})).close()


def test_an_output_that_is_a_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(StorageError, match="out cannot be written"):
        opened(a_job(tmp_path, output=tmp_path / "out"), overwrite=True)


def with_defaults(job: FileJob, *assumed: str) -> FileJob:
    """The job as a later version starts it, with two new defaults of which the user has given none or some."""
    return replace(job, defaults={"compact_json": True}, plain_max_tokens=512, assumed=frozenset(assumed))


def test_a_job_started_by_an_earlier_version_continues_with_its_defaults(tmp_path: Path) -> None:
    """Plain prompts had another maximum, or none."""
    begun(tmp_path)
    said: list[str] = []
    job = as_begun(with_defaults(a_job(tmp_path), "max_tokens", "compact_json"), say=said.append)
    assert (job.plain_max_tokens, job.defaults) == (None, {})
    assert said == [
        "the job was started with compact_json unset and max_tokens unset, the default of an earlier version, and "
        "continues with it"
    ]
    opened(job).close()
    assert begun_with(job)["endpoint"] == "completions"


def test_a_job_does_not_continue_with_other_settings_that_change_the_model(tmp_path: Path) -> None:
    journal = opened(msgspec.structs.replace(a_job(tmp_path), model_changes={"rope_freq_base": 500.0}))
    journal.register([item(1)])
    journal.record([result(item(1))])
    journal.close()
    with pytest.raises(ConfigError, match=r"was started with rope_freq_base 500.0, but rope_freq_base is now unset"):
        opened(a_job(tmp_path))


def test_a_setting_that_is_given_must_be_that_of_the_first_run(tmp_path: Path) -> None:
    begun(tmp_path)
    job = as_begun(with_defaults(a_job(tmp_path), "compact_json"), say=lambda _: None)
    with pytest.raises(ConfigError, match="was started with max_tokens unset, but max_tokens is now 512"):
        opened(job)


def test_a_job_without_results_takes_the_current_defaults(tmp_path: Path) -> None:
    opened(a_job(tmp_path)).close()
    job = with_defaults(a_job(tmp_path), "max_tokens", "compact_json")
    assert as_begun(job, say=pytest.fail) == job


def test_a_job_of_another_model_shows_how_to_name_it(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(ConfigError, match=r"use -m models/model\.gguf to resume"):
        open_job(a_job(tmp_path), "models/model-BF16.gguf", say=lambda _: None)


@pytest.mark.parametrize("uncommitted", ["", "an uncommitted line\n"])
def test_retrying_failed_lines_warns_only_of_lines_that_were_not_committed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, uncommitted: str
) -> None:
    begun(tmp_path)
    job = a_job(tmp_path)
    with job.errors.open("a") as file:
        file.write(uncommitted)
    journal = open_job(job, "model.gguf", retry_failed=True, say=lambda _: None)
    assert (journal.n_completed, journal.n_failed, job.errors.read_text()) == (1, 0, "")
    journal.close()
    kept = uncommitted_path(job.errors)
    assert (kept.read_text() if kept.exists() else "") == uncommitted
    assert ["its last 1 lines were not committed" in line for line in caplog.messages] == [True] * bool(uncommitted)


def test_failed_lines_are_retried_after_their_file_was_emptied(tmp_path: Path) -> None:
    begun(tmp_path)
    job = a_job(tmp_path)
    job.errors.write_text("")
    journal = open_job(job, "model.gguf", retry_failed=True, say=lambda _: None)
    assert (journal.n_completed, journal.n_failed) == (1, 0)
    journal.close()


# --- files that are never deleted or replaced -------------------------------------------------------------------------


def answered(job: FileJob) -> None:
    """One line is answered and one fails."""
    journal = opened(job, overwrite=True)
    journal.register([item(1), item(2)])
    journal.record([result(item(1)), result(item(2), status=500)])
    journal.close()


@contextmanager
def a_pipe(path: Path) -> Iterator[int]:
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield reader
    os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)


def written_to(reader: int, folder: Path) -> list[str]:
    (folder / "read").write_bytes(os.read(reader, 1 << 16))
    return ids_of(folder / "read")


@pytest.mark.timeout(30)
def test_results_and_errors_are_written_to_a_pipe(tmp_path: Path) -> None:
    with a_pipe(tmp_path / "pipe") as reader:
        answered(a_job(tmp_path, output=tmp_path / "pipe", errors=tmp_path / "pipe"))
        assert written_to(reader, tmp_path) == ["id-1", "id-2"]
        answered(a_job(tmp_path, output=tmp_path / "pipe"))
        assert written_to(reader, tmp_path) == ["id-1"]
        answered(a_job(tmp_path, errors=tmp_path / "pipe"))
        assert written_to(reader, tmp_path) == ["id-2"]
    assert not (tmp_path / "pipe.job").exists()


@pytest.mark.parametrize("name", ["output", "errors"])
def test_a_device_is_written_to_and_not_replaced(tmp_path: Path, name: str) -> None:
    """Also if its path is a link, as /dev/stdout is."""
    device = tmp_path / "null.jsonl"
    device.symlink_to(os.devnull)
    answered(a_job(tmp_path, **{name: device}))
    assert device.readlink() == Path(os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    other = tmp_path / ("out.errors.jsonl" if name == "output" else "out.jsonl")
    assert ids_of(other) == ["id-2" if name == "output" else "id-1"]


@pytest.mark.parametrize("name", ["output", "errors"])
def test_a_file_that_is_open_elsewhere_is_written_to_by_its_number(tmp_path: Path, name: str) -> None:
    """As /dev/stdout is, if the shell writes it to a file: the file is neither deleted nor are others put beside it."""
    with (tmp_path / "open").open("w+b") as file:
        path = Path(f"/dev/fd/{file.fileno()}")
        answered(a_job(tmp_path, **{name: path}))
    assert ids_of(tmp_path / "open") == ["id-1" if name == "output" else "id-2"]


@pytest.mark.parametrize(
    ("file", "others"),
    [
        ("out.jsonl.job", {}),
        ("out.jsonl.job-wal", {}),
        ("out.jsonl.uncommitted", {}),
        ("out.csv", {"output": "out.csv"}),
        ("out.csv.jsonl", {"output": "out.csv"}),
        ("errors.jsonl", {"output": "out.csv", "errors": "errors.jsonl"}),
    ],
)
@pytest.mark.timeout(30)
def test_other_files_of_a_job_cannot_be_pipes(tmp_path: Path, file: str, others: dict[str, str]) -> None:
    with a_pipe(tmp_path / file), pytest.raises(ConfigError, match=rf"{file}, which is not a regular file"):
        a_job(tmp_path, **{name: tmp_path / value for name, value in others.items()})


@pytest.mark.parametrize("name", ["output", "errors"])
@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_model_is_never_overwritten(tmp_path: Path, name: str, link: Any) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF\x03\0\0\0")
    link(model, tmp_path / "results.jsonl")
    for path in (model, tmp_path / "results.jsonl"):
        with pytest.raises(ConfigError, match="a model file, which is never overwritten"):
            a_job(tmp_path, **{name: path})


@pytest.mark.parametrize("link", [os.link, os.symlink])
@pytest.mark.parametrize(
    ("file", "same"),
    [("in.txt", "the input and -o"), ("out.jsonl.job", "-o and the ledger"), ("out.errors.jsonl", "-o and --errors")],
)
def test_one_file_under_two_names_is_recognised(tmp_path: Path, link: Any, file: str, same: str) -> None:
    (tmp_path / file).write_text("a\n")
    a_job(tmp_path)
    link(tmp_path / file, tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match=f"{same} are the same file"):
        a_job(tmp_path)


def test_an_input_that_is_deleted_with_old_results_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.uncommitted").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"the input and the file of uncommitted results are the same file"):
        FileJob(
            input_format=InputFormat(path=tmp_path / "out.jsonl.uncommitted", kind="jsonl"),
            output=tmp_path / "out.jsonl",
            errors=tmp_path / "errors.jsonl",
        )


def test_overwriting_keeps_links_and_the_files_that_share_the_contents(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("old\n")
    os.link(tmp_path / "results", tmp_path / "copy")
    (tmp_path / "out.jsonl").symlink_to("results")
    answered(a_job(tmp_path))
    assert (tmp_path / "out.jsonl").is_symlink()
    assert ids_of(tmp_path / "results") == ["id-1"]
    assert (tmp_path / "copy").read_text() == "old\n"


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_that_are_not_utf_8_are_those_of_any_other_job(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    job = a_job(folder, errors=tmp_path / os.fsdecode(b"\xfe.jsonl"))
    open_job(job, os.fsdecode(b"\xff.gguf"), say=lambda _: None).close()
    journal = open_job(job, os.fsdecode(b"\xff.gguf"), say=lambda _: None)
    journal.register([item(1)])
    journal.record([result(item(1))])
    journal.close()
    with pytest.raises(ConfigError, match=r'errors is now "out.errors.jsonl"'):
        open_job(a_job(folder), os.fsdecode(b"\xff.gguf"), say=lambda _: None)


@pytest.mark.parametrize("length", [248, 300])
@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_a_name_too_long_for_a_file_of_the_job_is_found_at_once(tmp_path: Path, name: str, length: int) -> None:
    with pytest.raises(ConfigError, match="is too long for its folder; give another name"):
        a_job(tmp_path, output=tmp_path / name.rjust(length, "x"))
    assert os.listdir(tmp_path) == ["in.txt"]
    answered(a_job(tmp_path, output=tmp_path / name.rjust(200, "x")))


# --- the column id ----------------------------------------------------------------------------------------------------


def test_a_job_keeps_the_names_of_its_results_when_rows_are_appended(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    said: list[str] = []

    def of(text: str) -> FileJob:
        source.write_text(text)
        job = replace(a_job(tmp_path), input_format=detect_input_format(source))
        return named(job, overwrite=False, say=said.append)

    job = of("id,prompt\n7,a\n7,b\n")
    assert job.input_format.by_line
    assert said[0].startswith("id: lines 2 and 3 have the same; the results are named by line instead")
    answered(job)
    assert of("id,prompt\n1,a\n2,b\n").input_format.by_line
    assert begun_with(job)["ids"] == "line"
    (tmp_path / "out.jsonl.job").unlink()
    job = of("id,prompt\n7,a\n8,b\n")
    answered(job)
    job = of("id,prompt\n7,a\n8,b\n8,c\n")
    assert not job.input_format.by_line
    opened(job).close()
    assert len(said) == 1
