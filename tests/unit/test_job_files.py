"""Jobs whose prompts are whole files: of a folder, of a zip file, or several that are named."""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from cppbatch.errors import ConfigError, UnreadableFile
from cppbatch.jobs.file_job import FileJob, named, open_job
from cppbatch.jobs.input import files
from cppbatch.jobs.input.files import are_prompts, find_inputs
from cppbatch.jobs.input.format import detect_input_format
from cppbatch.jobs.input.reader import InputReader
from cppbatch.jobs.job_request import JobRequest, JobResponse, RejectedLine
from cppbatch.jobs.journal import response_line
from cppbatch.jobs.request_order import chunks

URLS = {"/v1/completions", "/v1/chat/completions"}


def say_nothing(_line: str) -> None:
    pass


def texts(folder: Path, **contents: str | bytes) -> Path:
    """A folder with these files; `_` in a name is its dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name.replace("_", ".")).write_bytes(data)
    return folder


def entries(*paths: Path, template: str | None = None) -> list[JobRequest | RejectedLine]:
    source, names = find_inputs(paths, say_nothing)
    return list(InputReader(detect_input_format(source, files=names, template=template), URLS))


def prompts(*paths: Path, template: str | None = None) -> dict[str, str]:
    return {
        entry.custom_id: entry.body["prompt"]
        for entry in entries(*paths, template=template)
        if isinstance(entry, JobRequest)
    }


def zipped(path: Path, **contents: str | bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name.replace("_", "."), content)
    return path


def test_each_file_of_a_folder_is_one_request_that_has_its_name(tmp_path: Path) -> None:
    texts(tmp_path / "in", b_txt="two\nlines", a_md="# A")
    texts(tmp_path / "in" / "sub", c_py="print()")
    assert prompts(tmp_path / "in") == {"a.md": "# A", "b.txt": "two\nlines", "sub/c.py": "print()"}


def test_a_template_has_the_text_and_the_name(tmp_path: Path) -> None:
    texts(tmp_path / "in", a_txt="one {two}")
    assert prompts(tmp_path / "in", template="{file}: {text}") == {"a.txt": "a.txt: one {two}"}
    with pytest.raises(ConfigError, match=r"use \{text\} for the text of a file and \{file\} for its name"):
        prompts(tmp_path / "in", template="{prompt}")


def test_several_files_are_requests_named_from_their_common_folder(tmp_path: Path) -> None:
    texts(tmp_path, a_txt="1", other_txt="not named")
    texts(tmp_path / "sub", b_txt="2")
    given = (tmp_path / "a.txt", tmp_path / "sub" / "b.txt", tmp_path / "a.txt")
    assert prompts(*given) == {"a.txt": "1", "sub/b.txt": "2"}


def test_a_zip_file_is_read_like_its_folder(tmp_path: Path) -> None:
    path = zipped(tmp_path / "in.zip", a_txt="1", b_md="2", logo_png=b"\0\1")
    assert prompts(path) == {"a.txt": "1", "b.md": "2"}


@pytest.mark.parametrize(
    ("name", "are"), [("a.pdf", True), ("a.zip", True), ("a.MD", True), ("a.txt", False), ("a.jsonl", False)]
)
def test_a_single_file_has_lines_unless_its_format_has_none(tmp_path: Path, name: str, are: bool) -> None:
    assert are_prompts([tmp_path / name]) is are
    assert are_prompts([tmp_path / name, tmp_path / "other.txt"])
    assert are_prompts([tmp_path])


def test_files_that_are_skipped_are_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    texts(tmp_path, a_txt="text", logo_png=b"\x89PNG\0", empty_txt=" \n", report_pdf=b"%PDF-1.4")
    texts(tmp_path / ".git", config="x")
    texts(tmp_path, _hidden="x")
    said: list[str] = []
    assert find_inputs([tmp_path], said.append) == (tmp_path, ("a.txt",))
    assert said == [
        "skipped 5 files: .git (hidden), .hidden (hidden), empty.txt (empty), logo.png (not text), report.pdf (a PDF "
        'file requires pypdf: pip install "cppbatch[pdf]")'
    ]


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    texts(tmp_path, logo_png=b"\x89PNG\0")
    with pytest.raises(ConfigError, match=r"has no text files; skipped 1 file: logo\.png \(not text\)"):
        find_inputs([tmp_path], say_nothing)


def test_inputs_that_are_not_several_texts_are_refused(tmp_path: Path) -> None:
    texts(tmp_path / "in", a_txt="1")
    with pytest.raises(ConfigError, match="give one folder, one zip file, or several files"):
        find_inputs([tmp_path / "in", tmp_path / "in" / "a.txt"], say_nothing)
    with pytest.raises(ConfigError, match=r"a\.jsonl: has a prompt in each line or row; give it alone"):
        find_inputs([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], say_nothing)
    with pytest.raises(ConfigError, match="file not found"):
        find_inputs([tmp_path / "b.txt", tmp_path / "in" / "a.txt"], say_nothing)


def test_a_file_that_cannot_be_read_is_an_error_of_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_text(_data: bytes) -> str:
        raise UnreadableFile("contains no text")

    monkeypatch.setattr(files, "pdf_text", no_text)
    monkeypatch.setattr(files, "require", lambda module, what: None)
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1 << 20)
    texts(tmp_path, a_txt="text", b_txt=b"x" * 5000 + b"\xff", c_pdf=b"%PDF-1.4", d_txt=b"x" * ((1 << 20) + 1))
    found = {entry.custom_id: entry for entry in entries(tmp_path)}
    messages = [each.message for each in found.values() if isinstance(each, RejectedLine)]
    assert messages == [
        "b.txt: is not UTF-8 text; save it as UTF-8",
        "c.pdf: contains no text",
        "d.txt: is longer than 1 MiB, the limit for one prompt; split it",
    ]
    assert isinstance(found["a.txt"], JobRequest)


def test_the_text_of_a_pdf_is_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "pdf_text", lambda data: f"{len(data)} bytes")
    monkeypatch.setattr(files, "require", lambda module, what: None)
    texts(tmp_path, a_pdf=b"%PDF-1.4\0\0")
    assert prompts(tmp_path) == {"a.pdf": "10 bytes"}


def test_a_zip_file_that_unpacks_to_too_much_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = zipped(tmp_path / "in.zip", a_txt=bytes(2 << 20), b_txt=bytes(2 << 20))
    monkeypatch.setattr(files, "_MAX_ZIP_BYTES", 3 << 20)
    with pytest.raises(ConfigError, match="unpacks to 4 MiB in 2 files; the limit is 3 MiB"):
        find_inputs([path], say_nothing)


def test_names_that_leave_the_folder_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "in.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("/etc/a", "../b", "c/../../d", "__MACOSX/e", "good.txt"):
            archive.writestr(name, "text")
    assert [*prompts(path)] == ["good.txt"]


def test_damaged_and_encrypted_zip_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "in.zip").write_bytes(b"PK\3\4 not a zip file")
    with pytest.raises(ConfigError, match="is not a valid zip file: "):
        find_inputs([tmp_path / "in.zip"], say_nothing)
    data = bytearray(zipped(tmp_path / "in.zip", a_txt="secret").read_bytes())
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        start = archive.start_dir
    data[start + 8] |= 1  # the flag of an encrypted file
    data[6] |= 1
    (tmp_path / "in.zip").write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.txt \(is encrypted; unpack the zip file and give the folder"):
        find_inputs([tmp_path / "in.zip"], say_nothing)


def job_of(folder: Path, output: Path) -> FileJob:
    source, names = find_inputs([folder], say_nothing)
    form = detect_input_format(source, files=names, whole_folder=True)
    job = FileJob(input_format=form, output=output, errors=output.with_name("errors.jsonl"))
    return named(job, overwrite=False, say=say_nothing)


def answered(job: FileJob) -> list[str]:
    """Runs the job. Returns the names of the files that were sent."""
    journal, sent = open_job(job, "model.gguf", say=say_nothing), []
    for chunk in chunks(InputReader(job.input_format, URLS)):
        for request in journal.register(chunk):
            sent.append(request.custom_id)
            body = {"choices": [{"text": "yes", "finish_reason": "stop"}], "usage": {}}
            journal.record([response_line(request, JobResponse(status=200, body=body))])
    journal.close()
    return sent


def test_a_folder_that_has_grown_is_recognised_and_only_new_files_are_sent(tmp_path: Path) -> None:
    texts(tmp_path / "in", b_txt="2", d_txt="4")
    out = tmp_path / "out.jsonl"
    assert answered(job_of(tmp_path / "in", out)) == ["b.txt", "d.txt"]
    assert answered(job_of(tmp_path / "in", out)) == []
    texts(tmp_path / "in", a_txt="1", c_txt="3")
    (tmp_path / "in" / "d.txt").unlink()
    assert answered(job_of(tmp_path / "in", out)) == ["a.txt", "c.txt"]
    lines = [msgspec.json.decode(line) for line in out.read_bytes().splitlines()]
    assert [(line["line"], line["custom_id"]) for line in lines] == [
        (1, "b.txt"), (2, "d.txt"), (3, "a.txt"), (4, "c.txt"),
    ]  # fmt: skip


def test_an_answered_file_that_has_changed_ends_the_job(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    answered(job_of(texts(tmp_path / "in", a_txt="1"), out))
    texts(tmp_path / "in", a_txt="changed")
    with pytest.raises(Exception, match="line 1 of the input has changed"):
        answered(job_of(tmp_path / "in", out))


def test_another_folder_does_not_continue_a_job(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    answered(job_of(texts(tmp_path / "in", a_txt="1"), out))
    with pytest.raises(ConfigError, match="was started with other files than"):
        job_of(texts(tmp_path / "other", b_txt="2"), out)


def test_a_job_does_not_write_into_the_folder_that_it_reads(tmp_path: Path) -> None:
    texts(tmp_path / "in", a_txt="1")
    with pytest.raises(ConfigError, match="which is in the input folder"):
        job_of(tmp_path / "in", tmp_path / "in" / "out.csv")
    with pytest.raises(ConfigError, match="the input and -o are the same file"):
        job_of(tmp_path / "in", tmp_path / "in")
    with pytest.raises(ConfigError, match="which has an input of the job"):
        job_of(tmp_path / "in", tmp_path)


def test_a_name_without_extension_is_a_folder_of_answers(tmp_path: Path) -> None:
    texts(tmp_path / "in", a_txt="1")
    (tmp_path / "old.answers").mkdir()
    assert job_of(tmp_path / "in", tmp_path / "answers").is_folder
    assert job_of(tmp_path / "in", tmp_path / "old.answers").is_folder
    assert not job_of(tmp_path / "in", tmp_path / "out.jsonl").is_folder
