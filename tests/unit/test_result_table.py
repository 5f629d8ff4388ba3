"""A job's results as a table: the rows of the input in their order, with the answers beside them."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cppbatch.errors import ConfigError, StorageError
from cppbatch.jobs import table_output
from cppbatch.jobs.input.files import find_inputs
from cppbatch.jobs.input.format import detect_input_format
from cppbatch.jobs.input.reader import InputReader
from cppbatch.jobs.job_request import JobResponse, RejectedLine
from cppbatch.jobs.journal import rejection_line, response_line
from cppbatch.jobs.result_table import input_stamp, write_answers, write_table

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def table(folder: Path, name: str, *, output: str, fails: str = "-", schema: object = None, **message: Any) -> Path:
    """The table of a job that answers with the prompt in capitals. The lines are written in reverse order."""
    source, files = find_inputs([folder / name], print) if (folder / name).is_dir() else (folder / name, None)
    input_format = detect_input_format(source, template="{text}", files=files)
    results, errors = [], []
    for entry in InputReader(input_format, {"/v1/completions"}):
        if isinstance(entry, RejectedLine):
            errors.append(rejection_line(entry).data)
        elif entry.body["prompt"] == fails:
            response = JobResponse(status=400, body={"error": {"message": "too long"}})
            errors.append(response_line(entry, response).data)
        else:
            said = {"content": entry.body["prompt"].upper(), **message}
            body = {"choices": [{"message": said, "finish_reason": "stop"}], "usage": USAGE}
            results.append(response_line(entry, JobResponse(status=200, body=body)).data)
    (folder / "results").write_bytes(b"".join(reversed(results)))
    (folder / "errors").write_bytes(b"".join(errors))
    if (folder / output).suffix:
        stamp = input_stamp(input_format)
        write_table(input_format, folder / "results", folder / "errors", folder / output, stamp, schema=schema)
    else:
        write_answers(input_format, folder / "results", folder / "errors", folder / output)
    assert not list(folder.glob("*.part"))
    return folder / output


def read_csv(path: Path, delimiter: str = ",") -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def test_rows_of_a_csv_file_get_their_answers_in_the_order_of_the_input(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('id,text,note\n7,"a, b",x\n8,"two\nlines",\n9,c,"say ""hi"""\n')
    rows = read_csv(table(tmp_path, "in.csv", output="out.csv"))
    assert list(rows[0]) == [
        "id", "text", "note", "answer", "finish_reason", "prompt_tokens", "completion_tokens", "error",
    ]  # fmt: skip
    assert [(row["id"], row["text"], row["note"], row["answer"]) for row in rows] == [
        ("7", "a, b", "x", "A, B"), ("8", "two\nlines", "", "TWO\nLINES"), ("9", "c", 'say "hi"', "C"),
    ]  # fmt: skip
    assert {(row["finish_reason"], row["prompt_tokens"], row["error"]) for row in rows} == {("stop", "3", "")}


def test_a_carriage_return_stays_within_its_field(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "a\rb", "note": "x\r\ny"}) + "\n")
    (row,) = read_csv(table(tmp_path, "in.jsonl", output="out.csv"))
    assert (row["text"], row["note"], row["answer"]) == ("a\rb", "x\r\ny", "A\rB")
    (again,) = read_csv(table(tmp_path, "out.csv", output="again.csv"))
    assert again["text"] == "a\rb"


def test_answers_of_lines_that_may_have_moved_are_in_no_table(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\na\nb\n")
    stamp = input_stamp(detect_input_format(tmp_path / "in.csv"))
    table(tmp_path, "in.csv", output="out.csv")
    (tmp_path / "reversed").write_text("text\nb\na\n")
    (tmp_path / "reversed").replace(tmp_path / "in.csv")
    input_format = detect_input_format(tmp_path / "in.csv", template="{text}")
    with pytest.raises(ConfigError, match=r"in\.csv has changed while its lines were answered"):
        write_table(input_format, tmp_path / "results", tmp_path / "errors", tmp_path / "new.csv", stamp)
    assert not (tmp_path / "new.csv").exists()


def test_columns_that_a_table_cannot_hold_end_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> str:
        raise ValueError("too large")

    (tmp_path / "in.csv").write_text("text\na\n")
    monkeypatch.setattr(table_output, "field_text", fail)
    with pytest.raises(ConfigError, match=r"cannot hold the columns of .*in\.csv \(ValueError: too large"):
        table(tmp_path, "in.csv", output="out.csv")


def invalid_text() -> pa.Array:
    offsets = pa.array([0, 1, 2], pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff")])


STRANGE = {
    "ns": pa.array([1, None], pa.timestamp("ns")),
    "time": pa.array([1, None], pa.time64("ns")),
    "duration": pa.array([1, None], pa.duration("ns")),
    "zone": pa.array([0, None], pa.timestamp("us", tz="Mars/Phobos")),
    "late": pa.array([10_000_000, None], pa.date32()),
    "early": pa.array([-99_999_999_999_000_000, None], pa.timestamp("us")),
    "invalid": invalid_text(),
    "list": pa.array([[1], None], pa.list_(pa.timestamp("ns"))),
    "struct": pa.array([{"at": 1}, None], pa.struct([("at", pa.timestamp("ns"))])),
    "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.timestamp("ns"))),
    "bytes": pa.array([b"\xff", None]),
    "numbers": pa.array([float("nan"), float("inf")]),
}
"""Columns whose values Python's types cannot hold, and others that are easily changed on the way."""


def strange_input(folder: Path) -> pa.Table:
    """Two columns have the same name."""
    columns = [pa.array(["a", "b"]), *STRANGE.values(), pa.array([1, 2]), pa.array([3, 4])]
    written = pa.Table.from_arrays(columns, names=["text", *STRANGE, "twice", "twice"])
    pq.write_table(written, folder / "in.parquet")
    return pq.ParquetFile(folder / "in.parquet").read()


def test_copied_columns_are_those_of_the_input_whatever_they_contain(tmp_path: Path) -> None:
    source = strange_input(tmp_path)
    found = pq.ParquetFile(table(tmp_path, "in.parquet", output="out.parquet")).read()
    assert found.column_names[: source.num_columns] == source.column_names
    for index, name in enumerate(source.column_names):
        ours, theirs = found.column(index).combine_chunks(), source.column(index).combine_chunks()
        assert ours.type == theirs.type
        if name not in ("invalid", "numbers"):  # NaN is unequal to itself
            assert ours.equals(theirs), name
    assert found.column("invalid").combine_chunks().buffers()[2].to_pybytes()[:2] == b"a\xff"
    assert found.column("answer").to_pylist() == ["A", "B"]


def test_values_that_python_cannot_hold_are_text_in_a_csv_file(tmp_path: Path) -> None:
    strange_input(tmp_path)
    with table(tmp_path, "in.parquet", output="out.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header[-7:-5] == ["twice", "twice"]
    first, second = (dict(zip(header, row, strict=True)) for row in rows)
    assert {name: first[name] for name in STRANGE} == {
        "ns": "1970-01-01 00:00:00.000000001",
        "time": "00:00:00.000000001",
        "duration": "1",
        "zone": "1970-01-01 00:00:00.000000Z",
        "late": "29349-01-26",
        "early": "-1199-02-15 14:13:21.000000",
        "invalid": "a",
        "list": '["1970-01-01 00:00:00.000000001"]',
        "struct": '{"at":"1970-01-01 00:00:00.000000001"}',
        "map": '[{"key":"k","value":"1970-01-01 00:00:00.000000001"}]',
        "bytes": "/w==",
        "numbers": "",
    }
    assert {second[name] for name in STRANGE} == {"", "\ufffd", "inf"}
    assert [row[-7:-5] for row in rows] == [["1", "3"], ["2", "4"]]


def test_a_failed_row_is_included_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n{"text": "c", "n": [1]}\n')
    rows = read_csv(table(tmp_path, "in.jsonl", output="out.tsv", fails="c"), "\t")
    assert [(row["text"], row["txt"], row["n"], row["answer"], row["error"]) for row in rows] == [
        ("a", "", "", "A", ""),
        ("", "b", "", "", "'text' does not exist; available: 'txt'"),
        ("c", "", "[1]", "", "too long"),
    ]


def test_an_output_can_be_the_input_of_the_next_job(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\na\n")
    table(tmp_path, "in.csv", output="once.csv")
    (row,) = read_csv(table(tmp_path, "once.csv", output="twice.csv"))
    assert (row["text"], row["answer"], row["answer_2"], row["finish_reason_2"]) == ("a", "A", "A", "stop")


def test_reasoning_and_calls_have_columns_if_any_result_has_them(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\na\n")
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    (row,) = read_csv(table(tmp_path, "in.csv", output="out.csv", reasoning_content="hm", tool_calls=calls))
    assert row["reasoning_content"] == "hm"
    assert json.loads(row["tool_calls"]) == calls


def test_columns_of_parquet_keep_their_types(tmp_path: Path) -> None:
    columns = {"text": ["a", "b"], "n": [1, None], "at": pa.array([0, 1], pa.timestamp("ms")), "tags": [["x"], []]}
    written = pa.table(columns | {"kind": pa.array(["k", "k"]).dictionary_encode()})
    pq.write_table(written, tmp_path / "in.parquet")
    found = pq.read_table(table(tmp_path, "in.parquet", output="out.parquet", fails="b"))
    for name in columns:
        assert found.column(name).combine_chunks().equals(written.column(name).combine_chunks()), name
    assert found.column("kind").to_pylist() == ["k", "k"]
    assert found.column("answer").to_pylist() == ["A", None]
    assert found.column("completion_tokens").to_pylist() == [2, None]
    assert found.column("error").to_pylist() == [None, "too long"]


@pytest.mark.parametrize(("name", "output"), [("in.csv", "out.parquet"), ("in.parquet", "out.csv")])
def test_formats_may_differ(tmp_path: Path, name: str, output: str) -> None:
    if name == "in.csv":
        (tmp_path / name).write_text("id,text\n1,a\n2,b\n")
    else:
        pq.write_table(pa.table({"id": [1, 2], "text": ["a", "b"]}), tmp_path / name)
    path = table(tmp_path, name, output=output)
    rows = read_csv(path) if output == "out.csv" else pq.read_table(path).to_pylist()
    assert [(row["id"], row["answer"]) for row in rows] == [("1", "A"), ("2", "B")]


def test_vectors_are_lists_of_numbers(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a\n\nb\n")
    lines = [{"custom_id": "x", "line": n, "embedding": [n, 0.5], "usage": {"prompt_tokens": 1}} for n in (3, 1)]
    (tmp_path / "results").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source, results = detect_input_format(tmp_path / "in.txt"), tmp_path / "results"
    write_table(source, results, tmp_path / "none", tmp_path / "o.pq", input_stamp(source))
    assert pq.read_table(tmp_path / "o.pq").to_pylist() == [
        {"prompt": "a", "embedding": [1.0, 0.5], "prompt_tokens": 1, "error": None},
        {"prompt": "b", "embedding": [3.0, 0.5], "prompt_tokens": 1, "error": None},
    ]


@pytest.mark.parametrize("vectors", [{"embeddings": [[0.5], [1.0]]}, {"embedding": "AAAAPw=="}])
def test_other_vectors_are_json(tmp_path: Path, vectors: dict[str, Any]) -> None:
    (tmp_path / "in.txt").write_text("a\nb\n")
    lines = [{"line": 1, "embedding": [0.5], "usage": {}}, {"line": 2, **vectors, "usage": {}}]
    (tmp_path / "results").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source, results = detect_input_format(tmp_path / "in.txt"), tmp_path / "results"
    write_table(source, results, tmp_path / "none", tmp_path / "o.pq", input_stamp(source))
    found = [json.loads(row["embeddings"]) for row in pq.read_table(tmp_path / "o.pq").to_pylist()]
    assert found == [[[0.5]], vectors.get("embeddings", ["AAAAPw=="])]


def test_a_table_replaces_the_file_of_a_link_and_nothing_but_files(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\na\n")
    (tmp_path / "real.csv").touch()
    (tmp_path / "out.csv").symlink_to("real.csv")
    table(tmp_path, "in.csv", output="out.csv")
    assert (tmp_path / "out.csv").is_symlink()
    assert read_csv(tmp_path / "real.csv")
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(StorageError, match=r"pipe\.csv cannot be written \(it is not a regular file\)"):
        table(tmp_path, "in.csv", output="pipe.csv")


def folder_of_texts(path: Path) -> None:
    (path / "in" / "sub").mkdir(parents=True)
    (path / "in" / "a.txt").write_text("first")
    (path / "in" / "b.csv").write_text("second")
    (path / "in" / "sub" / "c.md").write_text("third")


def test_answers_to_files_are_rows_with_their_names(tmp_path: Path) -> None:
    folder_of_texts(tmp_path)
    rows = read_csv(table(tmp_path, "in", output="out.csv", fails="second"))
    assert [(row["file"], row["answer"], row["error"]) for row in rows] == [
        ("a.txt", "FIRST", ""), ("b.csv", "", "too long"), ("sub/c.md", "THIRD", ""),
    ]  # fmt: skip


def test_answers_to_files_are_files_of_the_same_names(tmp_path: Path) -> None:
    folder_of_texts(tmp_path)
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "a.txt").write_text("of an earlier job")
    table(tmp_path, "in", output="answers", fails="-")
    found = {path.relative_to(tmp_path / "answers").as_posix(): path.read_text() for path in files_below(tmp_path)}
    assert found == {"a.txt": "FIRST", "b.csv.txt": "SECOND", "sub/c.md": "THIRD"}


def files_below(path: Path) -> list[Path]:
    return [each for each in (path / "answers").rglob("*") if each.is_file()]


LABELS = {"type": "string", "enum": ["POSITIVE", "NEGATIVE"]}
REVIEW = {"type": "object", "properties": {"MOOD": LABELS, "STARS": {"type": "integer"}, "GOOD": {"type": "boolean"}}}


def test_a_text_of_a_schema_is_a_cell_without_its_quotes(tmp_path: Path) -> None:
    write_csv(tmp_path / "in.csv", ['"positive"', '"POSI'])
    rows = read_csv(table(tmp_path, "in.csv", output="out.csv", schema=LABELS))
    assert [row["answer"] for row in rows] == ["POSITIVE", '"POSI'], "an answer that was cut off stays as it is"


def test_properties_of_a_schema_are_columns_of_their_types(tmp_path: Path) -> None:
    write_csv(tmp_path / "in.csv", ['{"mood":"positive","stars":4}', '{"mood":"neg'])
    rows = read_csv(table(tmp_path, "in.csv", output="out.csv", schema=REVIEW))
    assert [*rows[0]][:5] == ["text", "answer", "MOOD", "STARS", "GOOD"]
    assert [(row["MOOD"], row["STARS"], row["GOOD"]) for row in rows] == [("POSITIVE", "4", ""), ("", "", "")]
    typed = pq.read_table(table(tmp_path, "in.csv", output="out.parquet", schema=REVIEW))
    assert typed.column("STARS").to_pylist() == [4, None]
    assert typed.schema.field("GOOD").type == pa.bool_()


def write_csv(path: Path, texts: list[str]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])


def test_no_answer_to_a_file_replaces_that_to_another_one(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    texts = {"report": "one", "report.txt": "two", "report.pdf.txt": "three", "report.answer": "four"}
    for name, text in texts.items():
        (tmp_path / "in" / name).write_text(text)
    folder = table(tmp_path, "in", output="answers", fails="-")
    answers = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(answers.values()) == sorted(text.upper() for text in texts.values())
    assert answers["report.txt"] == "TWO"
