"""A job's results as a table: the rows of the input in their order, with the answers beside them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cppbatch.errors import ConfigError
from cppbatch.jobs.input.format import detect_input_format
from cppbatch.jobs.input.reader import InputReader
from cppbatch.jobs.job_request import JobResponse, RejectedLine
from cppbatch.jobs.journal import rejection_line, response_line
from cppbatch.jobs.result_table import input_stamp, write_table

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def table(folder: Path, name: str, *, output: str, fails: str = "-", **message: Any) -> Path:
    """The table of a job that answers with the prompt in capitals. The lines are written in reverse order."""
    input_format = detect_input_format(folder / name, template="{text}")
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
    write_table(input_format, folder / "results", folder / "errors", folder / output, input_stamp(folder / name))
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
    stamp = input_stamp(tmp_path / "in.csv")
    table(tmp_path, "in.csv", output="out.csv")
    (tmp_path / "reversed").write_text("text\nb\na\n")
    (tmp_path / "reversed").replace(tmp_path / "in.csv")
    input_format = detect_input_format(tmp_path / "in.csv", template="{text}")
    with pytest.raises(ConfigError, match=r"in\.csv has changed while its lines were answered"):
        write_table(input_format, tmp_path / "results", tmp_path / "errors", tmp_path / "new.csv", stamp)
    assert not (tmp_path / "new.csv").exists()


def test_columns_that_a_table_cannot_hold_end_in_one_sentence(tmp_path: Path) -> None:
    columns = {"text": ["a"], "at": pa.array([1], pa.timestamp("ns"))}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match=r"cannot hold the columns of .*in\.parquet \(.*the results are in"):
        table(tmp_path, "in.parquet", output="out.csv")


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
    write_table(source, results, tmp_path / "none", tmp_path / "o.pq", input_stamp(tmp_path / "in.txt"))
    assert pq.read_table(tmp_path / "o.pq").to_pylist() == [
        {"prompt": "a", "embedding": [1.0, 0.5], "prompt_tokens": 1, "error": None},
        {"prompt": "b", "embedding": [3.0, 0.5], "prompt_tokens": 1, "error": None},
    ]
