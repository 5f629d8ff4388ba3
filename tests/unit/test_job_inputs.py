"""Reading a job's input: every form, in order, in constant memory, and a bad line is bad alone."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cppbatch.errors import ConfigError
from cppbatch.jobs.input.format import MAX_LINE_BYTES, InputFormat, detect_input_format
from cppbatch.jobs.input.reader import InputReader
from cppbatch.jobs.job_request import JobRequest, RejectedLine, hash64
from cppbatch.json_bounds import MOST_NESTED

URLS = {"/v1/completions", "/v1/chat/completions", "/v1/embeddings"}

in_same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)


def read(path: Path, **options: Any) -> list[JobRequest | RejectedLine]:
    return list(InputReader(detect_input_format(path, **options), URLS))


@pytest.fixture
def reading(tmp_path: Path) -> Any:
    """Writes a file and reads it."""

    def write_and_read(name: str, data: bytes | str, **options: Any) -> list[JobRequest | RejectedLine]:
        path = tmp_path / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return read(path, **options)

    return write_and_read


def read_as(input_format: InputFormat) -> list[JobRequest | RejectedLine]:
    return list(InputReader(input_format, URLS))


def only(found: list[JobRequest | RejectedLine]) -> Any:
    (one,) = found
    return one


def codes(found: list[JobRequest | RejectedLine]) -> list[str]:
    """Of a file's lines: why each is refused, or the name of its item."""
    return [each.code if isinstance(each, RejectedLine) else each.custom_id for each in found]


def prompts(found: list[JobRequest | RejectedLine]) -> list[str]:
    return [each.body["prompt"] for each in found if isinstance(each, JobRequest)]


# --- OpenAI's form


def test_a_line_in_openais_form_is_taken_as_it_is(reading: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    line = json.dumps({"custom_id": "a-1", "method": "POST", "url": "/v1/chat/completions", "body": body})
    item = only(reading("in.jsonl", line))
    assert (item.line, item.custom_id, item.url, item.body, item.is_plain) == (
        1, "a-1", "/v1/chat/completions", body, False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"custom_id": None}, "invalid_custom_id", "None"),
        ({"custom_id": ""}, "invalid_custom_id", "''"),
        ({"custom_id": 7}, "invalid_custom_id", "7"),
        ({"custom_id": "x" * 513}, "invalid_custom_id", "512"),
        ({"method": "GET"}, "invalid_method", "'GET'"),
        ({"method": None}, "invalid_method", "None"),
        (
            {"url": "/chat/completions"},
            "invalid_url",
            "'/chat/completions' is not supported in batch jobs; it must be one of /v1",
        ),
        ({"url": "https://host/v1/completions"}, "invalid_url", "'https://host/v1/completions'"),
        ({"url": ["/v1/completions"]}, "invalid_url", "['/v1/completions']"),
        ({"body": "text"}, "invalid_body", "'text'"),
        ({"body": None}, "invalid_body", "None"),
    ],
)
def test_a_wrong_field_is_refused_with_its_value(reading: Any, change: dict[str, Any], code: str, said: str) -> None:
    good = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
    refused = only(reading("in.jsonl", json.dumps(good | change)))
    assert refused.code == code
    assert said in refused.message


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ({"url": "/v1/completions", "body": {}}, "missing_custom_id"),
        ({"custom_id": "a", "url": "/v1/completions"}, "missing_body"),
        ({"custom_id": "a", "body": {}}, "invalid_url"),
        ({"custom_id": "a", "method": "POST"}, "invalid_line"),
    ],
)
def test_a_missing_field_is_refused(reading: Any, line: dict[str, Any], code: str) -> None:
    assert codes(reading("in.jsonl", json.dumps(line))) == [code]


def test_a_refused_line_keeps_its_name_if_that_can_be_read(reading: Any) -> None:
    assert only(reading("in.jsonl", '{"custom_id": "a", "url": "/v1/completions", "body": 1}')).custom_id == "a"


def test_the_method_may_be_left_out_or_written_small(reading: Any) -> None:
    small = '{"custom_id": "a", "method": "post", "url": "/v1/completions", "body": {}}'
    without = small.replace('"method": "post", ', "")
    assert codes(reading("in.jsonl", f"{small}\n{without}")) == ["a", "a"]


# --- plain lines of JSON


@pytest.mark.parametrize(
    ("line", "options", "url", "body"),
    [
        ('"Hi"', {}, "/v1/completions", {"prompt": "Hi"}),
        ('{"prompt": "Hi", "top_k": 1}', {}, "/v1/completions", {"prompt": "Hi", "top_k": 1}),
        ('{"prompt": [1, 2]}', {"endpoint": "chat"}, "/v1/completions", {"prompt": [1, 2]}),
        ('{"messages": [], "n": 2}', {}, "/v1/chat/completions", {"messages": [], "n": 2}),
        ('{"input": ["a", "b"]}', {}, "/v1/embeddings", {"input": ["a", "b"]}),
        ('"Hi"', {"endpoint": "embeddings"}, "/v1/embeddings", {"input": "Hi"}),
        (
            '{"prompt": "Hi", "seed": 1}',
            {"endpoint": "chat"},
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "seed": 1},
        ),
        (
            '"Hi"',
            {"endpoint": "chat", "system": "Be brief."},
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
        ),
    ],
)
def test_a_plain_line_becomes_a_request(
    reading: Any, line: str, options: dict[str, str], url: str, body: dict[str, Any]
) -> None:
    item = only(reading("in.jsonl", line, **options))
    assert (item.custom_id, item.url, item.body, item.is_plain) == ("line-1", url, body, True)


def test_a_plain_line_is_named_by_custom_id_or_id_or_its_number(reading: Any) -> None:
    lines = ['{"prompt": "a", "custom_id": "x", "id": 1}', '{"prompt": "a", "id": 5}', '{"prompt": "a", "id": null}']
    found = reading("in.jsonl", "\n".join([*lines, '{"prompt": "a", "id": 1.5}', '{"prompt": "a", "id": true}']))
    assert codes(found) == ["x", "5", "line-3", "invalid_custom_id", "invalid_custom_id"]
    assert found[0].body == {"prompt": "a"}, "a name is not a field of the request"


@pytest.mark.parametrize(
    "line", ["{}", "[1]", "1", "null", '{"a": 1}', '{"prompt": 1}', '{"prompt": "a", "input": "b"}']
)
def test_an_ambiguous_line_is_refused(reading: Any, line: str) -> None:
    assert codes(reading("in.jsonl", line)) == ["invalid_line"]


@pytest.mark.parametrize(
    ("content", "kind", "program"),
    [
        ('[{"prompt": "a"}, {"prompt": "b"}]', "array", ".[]"),
        ('\n[\n  {"prompt": "a"}\n]\n', "array", ".[]"),
        ('["a",\n"b"]', "array", ".[]"),
        ('[{"prompt": "' + "a" * MAX_LINE_BYTES + '"}]', "array", ".[]"),
        ('{\n  "prompt": "a"\n}\n', "object", "."),
    ],
)
def test_a_file_that_is_one_json_value_is_called_that(reading: Any, content: str, kind: str, program: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"in\.json: is a JSON {kind}, .*convert it with jq -c '{re.escape(program)}'"
    ):
        reading("in.json", content)


def test_an_unknown_endpoint_is_refused_for_plain_lines_too(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('"Hi"\n{"messages": []}\n')
    found = list(InputReader(detect_input_format(path), {"/v1/embeddings"}))
    assert codes(found) == ["invalid_url", "invalid_url"]


# --- lines


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_are_ignored(reading: Any) -> None:
    found = reading("in.jsonl", b'\xef\xbb\xbf"a"\r\n\r\n  \n\t\n"b"')
    assert [(item.line, item.body) for item in found] == [(1, {"prompt": "a"}), (5, {"prompt": "b"})]
    assert prompts(reading("in.txt", b"\xef\xbb\xbf a\r\n\r\n\nb \n")) == [" a", "b "], "spaces belong to a prompt"


def test_a_line_keeps_its_hash_when_others_come_and_line_ends_change(reading: Any) -> None:
    before = reading("in.jsonl", b'"a"')
    after = reading("in.jsonl", b'"c"\r\n"a"\r\n')
    assert after[1].content_hash == before[0].content_hash != after[0].content_hash
    assert -(2**63) <= hash64(b"a") < 2**63
    assert hash64(b"a") == 3405396810240292928, "ledgers that were written earlier know their lines by it"


def test_bad_lines_are_refused_alone(reading: Any) -> None:
    bad = [b'{"a": 1', b"\xff\xfe\x00", b'"\xff"', b'{"prompt": "a"}}', b"[" * 100_000, b'"\\ud800"']
    found = reading("in.jsonl", b"".join(b'"ok"\n%s\n' % line for line in bad))
    assert codes(found) == [
        name for n in range(len(bad)) for name in (f"line-{2 * n + 1}", "invalid_json")
    ]  # fmt: skip
    assert "not valid JSON" in found[1].message
    assert "byte" in found[7].message
    assert all("not UTF-8 text" in found[n].message for n in (3, 5))
    assert all(len(each.message) < 150 for each in found if isinstance(each, RejectedLine))


@pytest.mark.parametrize("name", ["in.csv", "in.tsv"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_a_table_in_utf_16_is_refused_with_the_remedy(reading: Any, name: str, encoding: str) -> None:
    table = "prompt\tid\r\nabc\t1\r\n".replace("\t", "\t" if name == "in.tsv" else ",")
    with pytest.raises(ConfigError, match=r"not UTF-8 text, perhaps UTF-16: .*; save the file as UTF-8 with LF"):
        reading(name, table.encode(encoding))


def test_a_carriage_return_that_ends_a_line_of_a_table_is_named(reading: Any) -> None:
    message = "a carriage return (CR) outside quotes is not a line end; save the file as UTF-8 with LF or CRLF"
    with pytest.raises(ConfigError, match=re.escape(message)):
        reading("in.csv", "prompt,id\rabc,1\r")
    (found,) = reading("in.csv", "prompt,id\nabc,1\rxyz,2\n")
    assert found.message.startswith(f"cannot be read as CSV: {message}")


def test_nesting_that_later_code_could_not_walk_is_refused(reading: Any) -> None:
    def nested(depth: int) -> str:
        return '{"messages": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"

    found = reading("in.jsonl", f"{nested(MOST_NESTED)}\n{nested(MOST_NESTED + 1)}\n{nested(900)}")
    assert codes(found) == ["line-1", "invalid_json", "invalid_json"]
    flat = '{"prompt": [' + ",".join(["[1]"] * 1000) + "]}"
    assert codes(reading("in.jsonl", flat)) == ["line-1"]


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt"])
def test_a_line_that_is_too_long_is_refused_and_the_next_one_read(reading: Any, name: str) -> None:
    longest = b'"' + b"a" * (MAX_LINE_BYTES - 2) + b'"'
    for end in (b"\n", b"\r\n"):
        found = reading(name, longest + end + b"a" + longest + end + b'"b"' + end)
        assert codes(found) == ["line-1", "line_too_long", "line-3"]
    assert str(MAX_LINE_BYTES) in found[1].message


@in_same_folder
@given(
    data=st.binary(max_size=400)
    | st.lists(st.sampled_from([b'"a"', b"\n", b"{", b"\xef\xbb\xbf", b"\r"])).map(b"".join)
)
def test_whatever_the_bytes_each_line_gives_one_thing(tmp_path: Path, data: bytes) -> None:
    for name, content in (("in.jsonl", b'"the first line"\n' + data), ("in.txt", data)):
        lines = [n for n, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1) if line.strip()]
        (tmp_path / name).write_bytes(content)
        assert [each.line for each in read(tmp_path / name)] == lines


def test_a_text_file_has_a_prompt_on_each_line(reading: Any) -> None:
    found = reading("in.txt", "Hé\n{1}\n".encode() + b"\xff\nnul\0\n\nlast")
    assert codes(found) == ["line-1", "line-2", "invalid_text", "invalid_text", "line-6"]
    assert prompts(found) == ["Hé", "{1}", "last"]
    assert (found[2].custom_id, "\\xff" in found[2].message) == ("line-3", True)


# --- CSV


def test_a_csv_files_columns_are_named_by_its_first_line(reading: Any) -> None:
    found = reading("in.csv", '\nid, prompt\n7,"a, ""b"""\n,c\n\n9,"two\nlines"\n10,last')
    assert codes(found) == ["7", "line-4", "9", "10"]
    assert prompts(found) == ['a, "b"', "c", "two\nlines", "last"]
    assert [each.line for each in found] == [3, 4, 6, 8], "where each begins"


@pytest.mark.parametrize(
    ("name", "text"),
    [("in.csv", "x;prompt\n1;a, b\n"), ("in.tsv", "x\tprompt\n1\ta, b\n"), ("in.csv", 'x,prompt\n1,"a, b"\r\n')],
)
def test_the_delimiter_is_found(reading: Any, name: str, text: str) -> None:
    assert prompts(reading(name, text)) == ["a, b"]


@pytest.mark.parametrize("first", ["sep=;", '"sep=;"', "SEP=;\r", "\nsep=;"])
def test_a_first_line_of_excel_names_the_delimiter(reading: Any, first: str) -> None:
    found = reading("in.csv", f"{first}\nx, y;prompt\n1;a, b\n")
    assert prompts(found) == ["a, b"]
    assert found[0].line == first.count("\n") + 3


def test_empty_rows_of_a_spreadsheet_are_blank_lines(reading: Any) -> None:
    found = reading("in.csv", 'id;x;prompt\n1;;a\n;;\n ; ;\r\n2;;b\n3;;\n;;""\n')
    assert codes(found) == ["1", "2", "empty_prompt", "empty_prompt"]
    assert [each.line for each in found] == [2, 5, 6, 7]


def test_another_column_can_be_chosen(reading: Any) -> None:
    assert prompts(reading("in.csv", "prompt,id\na,b\n", column="id")) == ["b"]
    with pytest.raises(ConfigError, match=r"column 'text' not found; available: 'prompt', 'id'"):
        reading("in.csv", "prompt,id\na,b\n", column="text")
    with pytest.raises(ConfigError, match="2 columns named 'prompt'"):
        reading("in.csv", "prompt,prompt\na,b\n")


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xff\xfep\0", b'"prompt\n', b"x" * (MAX_LINE_BYTES + 9)])
def test_a_csv_file_without_names_of_columns_is_an_error(reading: Any, data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"first line(: | must name the columns)"):
        reading("in.csv", data)


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (b"1", "invalid_record"),
        (b"1,a,b", "invalid_record"),
        (b'1,"say "hi" now"', "invalid_record"),
        (b"1,\xff", "invalid_text"),
        (b"1,a\0", "invalid_text"),
        (b"1,", "empty_prompt"),
        (b'1,"  "', "empty_prompt"),
        (b"\xff,a", "invalid_custom_id"),
        (b"1" * 513 + b",a", "invalid_custom_id"),
        (b"1,a\rb", "invalid_record"),
        (b'1,"never closed', "invalid_record"),
        (b"1," + b"a" * MAX_LINE_BYTES, "line_too_long"),
    ],
)
def test_a_bad_record_is_refused_and_the_next_ones_are_read(reading: Any, row: bytes, code: str) -> None:
    if code == "invalid_text" and b"\0" in row and sys.version_info < (3, 11):
        code = "invalid_record"  # csv itself refuses NULs there
    found = reading("in.csv", b"id,prompt\n0,before\n" + row + b"\n2,after\n3,last\n")
    assert codes(found) == ["0", code, "2", "3"]
    assert found[1].line == 3


def test_lines_after_an_open_quote_are_read_though_it_is_megabytes_to_the_end(reading: Any) -> None:
    found = reading("in.csv", "prompt\n" + '"open\n' + "a\n" * 1000 + "b" * (MAX_LINE_BYTES + 1) + "\nc\n")
    assert codes(found) == ["invalid_record", *[f"line-{n}" for n in range(3, 1003)], "line_too_long", "line-1004"]


def test_a_csv_file_made_to_be_read_again_and_again_comes_to_an_end(reading: Any) -> None:
    found = reading("in.csv", "prompt,x\n" + 'a","\n' * 100_000)  # each line opens a quote, wherever reading starts
    assert set(codes(found)) == {"invalid_record"}
    assert "skipping the lines up to 100001" in found[-1].message


@in_same_folder
@given(
    data=st.lists(st.sampled_from([b"a", b",", b'"', b"\n", b"\r", b"\0", b"\xff", b" ", b";"]), max_size=60).map(
        b"".join
    )
)
def test_a_csv_file_is_read_to_its_end_whatever_its_records_are(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "in.csv").write_bytes(b"prompt,x\n" + data + b'"\n1,1\nlast,1\n')
    found = read(tmp_path / "in.csv")
    assert prompts(found)[-1] == "last"
    assert [each.line for each in found] == sorted({each.line for each in found})


# --- Parquet


def test_rows_of_a_parquet_file_are_items(tmp_path: Path) -> None:
    table = pa.table({"id": [1, None, 3, 4], "prompt": ["a", "b", None, ""], "a.b": ["w", "x", "y", "z"]})
    pq.write_table(table, tmp_path / "in.parquet")
    found = read(tmp_path / "in.parquet")
    assert codes(found) == ["1", "line-2", "empty_prompt", "empty_prompt"]
    assert prompts(found) == ["a", "b"]
    assert [each.line for each in found] == [1, 2, 3, 4]
    assert prompts(read(tmp_path / "in.parquet", column="a.b")) == ["w", "x", "y", "z"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_every_kind_of_text_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    pq.write_table(pa.table({"prompt": pa.array(["a", "b", "a"]).cast(kind)}), tmp_path / "in.pq")
    assert prompts(read(tmp_path / "in.pq")) == ["a", "b", "a"]


def test_a_parquet_file_may_have_no_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "in.parquet")
    assert read(tmp_path / "in.parquet") == []


def test_invalid_text_in_parquet_is_refused_alone(tmp_path: Path) -> None:
    offsets = pa.array([0, 1, 2, 3], pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"a\xffb")])
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "in.parquet")
    assert codes(read(tmp_path / "in.parquet")) == ["line-1", "invalid_text", "line-3"]


def test_a_folder_is_not_an_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r": is a folder; give a file$"):
        detect_input_format(tmp_path)


def test_columns_of_the_wrong_kind_are_errors(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": [1], "x": ["a"]}), tmp_path / "number.parquet")
    with pytest.raises(ConfigError, match="must be text, but is int64"):
        read(tmp_path / "number.parquet")
    with pytest.raises(ConfigError, match=r"column 'y' not found; available: 'prompt', 'x'"):
        read(tmp_path / "number.parquet", column="y")
    pq.write_table(pa.table({"prompt": ["a"], "id": [1.5]}), tmp_path / "name.parquet")
    with pytest.raises(ConfigError, match="column 'id' for custom IDs must be text, but is double"):
        read(tmp_path / "name.parquet", id_column="id")


@pytest.mark.parametrize(
    ("column", "ids", "problem"),
    [
        ("id", [1, 2], None),
        ("id", ["a", None], None),
        ("id", [7, 7], "lines 1 and 2 have the same"),
        ("id", [1.0, None], "its type is double"),
        ("id", pa.array([None, None], pa.float64()), "its type is double"),
        ("id", [b"a", b"b"], "its type is binary"),
        ("id", ["x" * 513, "b"], "id: 'x.*is not a string of 1 to 512 characters"),
        ("custom_id", ["7", "7"], None),  # of the batch format: the second line is an error
        ("key", [7, 7], None),
    ],
)
def test_a_column_id_that_cannot_name_results_has_a_reason(
    tmp_path: Path, column: str, ids: Any, problem: str | None
) -> None:
    pq.write_table(pa.table({column: ids, "prompt": ["a", "b"]}), tmp_path / "in.parquet")
    assert_id_problem(tmp_path / "in.parquet", problem)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("in.csv", "id,prompt\n1,a\n2,b\n,c\n,d\n", None),
        ("in.csv", "id,prompt\n1.23E+15,a\n8,b\n1.23E+15,c\n", "lines 2 and 4 have the same"),
        ("in.jsonl", '{"id": 1, "prompt": "a"}\n"b"\n{"id": "2", "prompt": "c"}\n', None),
        ("in.jsonl", '{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}\n', "lines 1 and 2 have the same"),
        ("in.jsonl", '{"id": 1.0, "prompt": "a"}\n', "id: 1.0 is not a string"),
        ("in.jsonl", '{"custom_id": "a", "id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n', None),
        ("in.jsonl", '{"custom_id": "a", "url": "", "body": {}}\n{"id": 1.0, "prompt": "b"}\n', None),
        ("in.txt", '{"id": 1.0}\n', None),
    ],
)
def test_ids_that_cannot_name_results_are_found_in_every_format(
    tmp_path: Path, name: str, content: str, problem: str | None
) -> None:
    (tmp_path / name).write_text(content)
    assert_id_problem(tmp_path / name, problem)


def assert_id_problem(path: Path, problem: str | None) -> None:
    input_format = detect_input_format(path)
    found = InputReader(input_format, URLS).id_problem()
    assert re.match(problem, found) if problem and found else problem == found
    if problem:
        by_line = read_as(replace(input_format, by_line=True))
        assert codes(by_line) == [f"line-{each.line}" for each in by_line]
    wanted = replace(input_format, id_column="id")
    assert InputReader(wanted, URLS).id_problem() is None, "who asks for it gets it, or errors"


def test_bytes_are_not_part_of_a_prompt(tmp_path: Path) -> None:
    kinds = (pa.binary(), pa.binary(2), pa.list_(pa.large_binary()), pa.dictionary(pa.int32(), pa.binary()))
    for kind in kinds:
        values = pa.array([[b"ab"]], kind) if pa.types.is_list(kind) else pa.array([b"ab"]).cast(kind)
        pq.write_table(pa.table({"text": ["a"], "image": values}), tmp_path / "in.parquet")
        assert prompts(read(tmp_path / "in.parquet", template="{text}")) == ["a"]
        with pytest.raises(ConfigError, match=r"column 'image' in --template is .*binary.*, not text"):
            read(tmp_path / "in.parquet", template="{text} {image}")


def test_missing_values_are_errors_of_their_rows_and_other_numbers_are_text(tmp_path: Path) -> None:
    numbers = [1.5, float("nan"), None, float("-inf")]
    pq.write_table(pa.table({"n": numbers}), tmp_path / "in.parquet")
    found = read(tmp_path / "in.parquet", template="{n}")
    assert codes(found) == ["line-1", "missing_field", "missing_field", "line-4"]
    assert prompts(found) == ["1.5", "-inf"]
    assert [each.message for each in found if isinstance(each, RejectedLine)] == ["'n' is NaN", "'n' is null"]


@pytest.mark.parametrize(
    ("values", "prompt"),
    [
        (pa.array([1], pa.timestamp("ns")), "1970-01-01 00:00:00.000000001"),
        (pa.array([1000], pa.timestamp("ns")), "1970-01-01T00:00:00.000001"),
        (pa.array([0], pa.timestamp("us", tz="Mars/Phobos")), "1970-01-01 00:00:00.000000Z"),
        (pa.array([10_000_000], pa.date32()), "29349-01-26"),
    ],
)
def test_values_that_python_cannot_hold_are_text_in_a_prompt(tmp_path: Path, values: pa.Array, prompt: str) -> None:
    pq.write_table(pa.table({"at": values}), tmp_path / "in.parquet")
    assert prompts(read(tmp_path / "in.parquet", template="{at}")) == [prompt]


def test_a_broken_parquet_file_is_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["text"] * 1000}), tmp_path / "in.parquet", use_dictionary=False)
    whole = (tmp_path / "in.parquet").read_bytes()
    for data in (b"", b"PAR1 no PAR1", whole[:-20], whole[:4] + b"\xff" * 40 + whole[44:]):
        (tmp_path / "in.parquet").write_bytes(data)
        with pytest.raises(ConfigError, match="cannot be read as Parquet"):
            read(tmp_path / "in.parquet")


def test_without_pyarrow_the_message_shows_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r'requires pyarrow: pip install "cppbatch\[parquet\]"'):
        read(tmp_path / "in.parquet")


# --- files


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "in.csv", "in.parquet"])
def test_a_missing_file_or_a_folder_is_an_error_when_it_is_read(tmp_path: Path, name: str) -> None:
    reader = InputReader(detect_input_format(tmp_path / name), URLS)
    with pytest.raises(ConfigError, match=rf"{name}: cannot be read: No such file"):
        next(iter(reader))
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=rf"{name}: cannot be read: Is a directory"):
        next(iter(reader))


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "in.csv", "in.parquet"])
@pytest.mark.timeout(30)
def test_a_pipe_is_an_error_when_it_is_read(tmp_path: Path, name: str) -> None:
    input_format = detect_input_format(tmp_path / name)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"{name}: cannot be read: it is not a regular file"):
        read_as(input_format)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("in.gz", {}, r"format '\.gz'; .* one of \.jsonl, "),
        ("in", {}, "must be one of"),
        ("in.jsonl", {"column": "prompt"}, "--column 'prompt'.*for CSV"),
        ("in.txt", {"system": "Be brief."}, "requires --endpoint chat.*completions"),
        ("in.txt", {"system": "\udcff", "endpoint": "chat"}, r"--system is not UTF-8 text: b'\\xff'"),
        ("in.csv", {"template": "\udcff {a}"}, "--template is not UTF-8 text"),
    ],
)
def test_options_that_do_not_apply_to_the_format_are_an_error_at_once(
    name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        detect_input_format(name, **options)


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "in.csv", "in.parquet"])
def test_entries_are_counted_without_reading_them_as_requests(tmp_path: Path, name: str) -> None:
    n = 3000
    if name == "in.parquet":
        pq.write_table(pa.table({"prompt": ["a"] * n}), tmp_path / name)
    elif name == "in.csv":
        (tmp_path / name).write_text("prompt\n" + '"a\n\nb"\n\n' * n)
    else:
        (tmp_path / name).write_text('"a"\n\n  \n' * n)
    reader = InputReader(detect_input_format(tmp_path / name), URLS)
    assert reader.count() == n == len(list(reader))
    assert reader.count(lambda: True) is None


def test_records_that_cannot_be_read_are_counted_too(reading: Any, tmp_path: Path) -> None:
    found = reading("in.csv", 'id,prompt\n1,a\n2\n3,b,c\n4,"open\n5,d\n')
    assert len(found) > 3
    assert InputReader(detect_input_format(tmp_path / "in.csv"), URLS).count() == len(found)


def test_a_reader_can_be_left_and_restarted(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a\nb\n")
    reader = InputReader(detect_input_format(tmp_path / "in.txt"), URLS)
    assert next(iter(reader)).line == 1
    assert [each.line for each in reader] == [1, 2]
    reader.close()


# --- templates ------------------------------------------------------------------------------------------------------

ROWS = {
    "in.csv": "key,text,stars\na,good,5\nb,bad,1\n",
    "in.tsv": "key\ttext\tstars\na\tgood\t5\nb\tbad\t1\n",
    "in.jsonl": '{"key": "a", "text": "good", "stars": 5}\n{"key": "b", "text": "bad", "stars": 1}\n',
}


@pytest.mark.parametrize("name", [*ROWS, "in.parquet"])
def test_a_template_makes_prompts_of_the_columns(reading: Any, tmp_path: Path, name: str) -> None:
    options = {"template": "{{{stars}}} stars: {text}?", "id_column": "key"}
    if name == "in.parquet":
        pq.write_table(pa.table({"key": ["a", "b"], "text": ["good", "bad"], "stars": [5, 1]}), tmp_path / name)
        found = read(tmp_path / name, **options)
    else:
        found = reading(name, ROWS[name], **options)
    assert prompts(found) == ["{5} stars: good?", "{1} stars: bad?"]
    assert codes(found) == ["a", "b"]
    assert [item.body for item in found if isinstance(item, JobRequest)] == [{"prompt": p} for p in prompts(found)]


def test_a_template_makes_chats_too_and_of_a_text_files_lines(reading: Any) -> None:
    one = only(reading("in.txt", "sea\n", template="A poem about the {prompt}:", endpoint="chat", system="Be brief."))
    assert [message["content"] for message in one.body["messages"]] == ["Be brief.", "A poem about the sea:"]


def test_a_row_without_a_value_is_an_error_of_that_row_only(reading: Any) -> None:
    lines = '{"text": "a"}\n{"txt": "b"}\n{"text": null}\n"c"\n{"text": "d"}\n'
    found = reading("in.jsonl", lines, template="x {text}")
    assert codes(found) == ["line-1", "missing_field", "missing_field", "missing_field", "line-5"]
    assert found[1].message == "'text' does not exist; available: 'txt'"
    assert found[2].message == "'text' is null"
    assert codes(reading("in.jsonl", '{"text": "a"}\n', template="{text}", id_column="key")) == ["missing_custom_id"]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("Classify:", "does not name a column"),
        ("{}", "{} does not name a column"),
        ("{text!r}", "has a format specification"),
        ('{"label": 1} {text}', "has a format specification"),
        ("{text", "expected '}'"),
        ("text}", "Single '}'"),
    ],
)
def test_an_invalid_template_is_an_error_at_once(template: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        detect_input_format("in.csv", template=template)


def test_columns_that_a_template_names_must_exist(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,review\n1,a\n")
    with pytest.raises(ConfigError, match=r"column 'text' not found; available: 'id', 'review' \(--template\)"):
        read(tmp_path / "in.csv", template="{text}")
    with pytest.raises(ConfigError, match=r"column 'key' not found; .* \(--id-column\)"):
        read(tmp_path / "in.csv", column="review", id_column="key")
    with pytest.raises(ConfigError, match="give only one of them"):
        detect_input_format("in.csv", column="review", template="{review}")
    with pytest.raises(ConfigError, match=r"use \{prompt\} for the line"):
        detect_input_format("in.txt", template="{text}")
