"""/v1/files and /v1/batches, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from cppbatch.errors import EngineClosed
from cppbatch.jobs import durable_files
from cppbatch.jobs.batches import active_batch
from cppbatch.jobs.batches.data_folder import DataFolder, open_data_folder
from cppbatch.jobs.batches.manager import BatchManager
from cppbatch.jobs.database import Database, Kind
from cppbatch.jobs.durable_files import DurableFile
from cppbatch.retries import Pauses
from cppbatch.server import storage
from cppbatch.server.api.batches.handler import URLS, BatchRequestHandler
from cppbatch.server.storage import STORAGE
from tests.support import tiny_models
from tests.support.app_thread import AppThread
from tests.support.batch_files import (
    Json,
    client_of,
    counts,
    line,
    lines,
    make_batch,
    results,
    start_server,
    wait_for,
    wait_until,
)

LONG: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True}

Start = Callable[..., AppThread]


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppThread]:
    server = start_server(tiny_llama, tmp_path_factory.mktemp("data"), max_file_mb=2)
    yield server
    server.stop()


@pytest.fixture
def start(tiny_llama: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a server over this test's own data, and stops what still runs at the end."""
    running: list[AppThread] = []

    def start(model: Path = tiny_llama, folder: Path = tmp_path / "data", **limits: Any) -> AppThread:
        running.append(start_server(model, folder, **limits))
        return running[-1]

    yield start
    for server in running:
        if server._thread.is_alive():
            server.stop()


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_comes_back_as_it_was(client: OpenAI) -> None:
    data = os.urandom(1_500_000) + b"\r\n--boundary\r\n"
    file = client.files.create(file=('naïve "name".bin', data), purpose="user_data")
    assert (file.bytes, file.purpose, file.object) == (len(data), "user_data", "file")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == data
    assert client.files.delete(file.id).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="not found"):
            ask(file.id)


def test_files_are_listed_page_by_page(client: OpenAI) -> None:
    ids = [client.files.create(file=(f"{i}.bin", b"x"), purpose="evals").id for i in range(5)]
    assert [file.id for file in client.files.list(purpose="evals", limit=2, order="asc")] == ids
    assert [file.id for file in client.files.list(purpose="evals", limit=2)] == ids[::-1]
    page = client.files.list(purpose="evals", order="asc", after=ids[1], limit=2)
    assert ([file.id for file in page.data], page.has_more) == (ids[2:4], True)
    for wrong, field in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "nobody"}, "after")):
        with pytest.raises(openai.BadRequestError) as refused:
            client.files.list(**wrong)
        assert refused.value.param == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"purpose": "fun"}, "purpose"),
        ({"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 60}}, "expires_after.seconds"),
        ({"purpose": "batch", "expires_after": {"anchor": "now", "seconds": 6000}}, "expires_after.anchor"),
    ],
)
def test_a_bad_upload_names_its_field_and_leaves_nothing(
    client: OpenAI, server: AppThread, fields: Any, field: str
) -> None:
    before = client.files.list().data
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=b"x", **fields)
    assert refused.value.param == field
    assert client.files.list().data == before


def post_form(server: AppThread, body: bytes, kind: str = "multipart/form-data; boundary=b") -> tuple[int, Any]:
    request = urllib.request.Request(f"{server.url}/v1/files", body, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


FILE_PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc\r\n'

EMPTY_PART = b"--b\r\nContent-Disposition: form-data; name=a\r\n\r\n\r\n"

PURPOSE_PART = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'


def test_parts_may_come_in_any_order(server: AppThread) -> None:
    for body in (FILE_PART + PURPOSE_PART + b"--b--\r\n", PURPOSE_PART + FILE_PART + b"--b--\r\n"):
        status, file = post_form(server, body)
        assert (status, file["bytes"], file["purpose"]) == (200, 3, "batch")


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (FILE_PART + b"--b--\r\n", "multipart/form-data; boundary=b", "purpose: is required"),
        (PURPOSE_PART + b"--b--\r\n", "multipart/form-data; boundary=b", "file: is required"),
        (FILE_PART + FILE_PART + PURPOSE_PART + b"--b--\r\n", "multipart/form-data; boundary=b", "twice"),
        (PURPOSE_PART + FILE_PART[:-4], "multipart/form-data; boundary=b", "not a complete multipart form"),
        (b"nonsense", "multipart/form-data; boundary=b", "not a complete multipart form"),
        (b"nonsense", "multipart/form-data", "not a complete multipart form"),
        (b"{}", "application/json", "multipart/form-data"),
        (PURPOSE_PART * 17 + b"--b--\r\n", "multipart/form-data; boundary=b", "Maximum segment count"),
        (EMPTY_PART * 10_000 + b"--b--\r\n", "multipart/form-data; boundary=b", "Maximum segment count"),
        (b"--b\r\n" + b"A: b\r\n" * 9, "multipart/form-data; boundary=b", "Maximum segment header count"),
        (b"--b\r\n" + b"A" * 5000, "multipart/form-data; boundary=b", "Maximum segment header"),
        (b"x" * 1000 + b"\r\n" + PURPOSE_PART + b"--b--\r\n", "multipart/form-data; boundary=b", "file: is required"),
    ],
)
def test_forms_that_are_none_are_refused_and_leave_nothing(
    server: AppThread, client: OpenAI, body: bytes, kind: str, says: str
) -> None:
    before = client.files.list().data
    status, answer = post_form(server, body, kind)
    assert (status, says in answer["error"]["message"]) == (400, True), answer
    assert client.files.list().data == before


def test_a_file_that_is_too_large_is_refused_before_and_while_it_comes(server: AppThread, client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="--max-file-mb") as refused:
        client.files.create(file=b"x" * (3 << 20), purpose="batch")
    assert refused.value.status_code == 413
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10) as connection:
        head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        connection.sendall(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n".encode())
        answer = b""
        try:
            for piece in (PURPOSE_PART, FILE_PART[:-2], *[b"x" * 65536] * 40):
                connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            answer = connection.recv(65536)
        except ConnectionError:
            pass
    assert not answer or b" 413 " in answer
    assert not list((server_data(server) / "incoming").iterdir())


@pytest.mark.parametrize(
    "piece",
    [EMPTY_PART, b"\n", FILE_PART + PURPOSE_PART + b"--b--\r\n" + b"x" * 1000],
    ids=["of parts", "before the first part", "behind the last part"],
)
def test_a_form_without_end_is_refused_and_delays_no_other_request(server: AppThread, piece: bytes) -> None:
    answer = b""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10) as connection:
        head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        connection.sendall(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n".encode())
        data = piece * (1 + 65536 // len(piece))
        for _ in range(100):
            connection.sendall(b"%x\r\n%s\r\n" % (len(data), data))
            urllib.request.urlopen(f"{server.url}/health", timeout=30).read()  # there was no answer at all
            if select.select([connection], [], [], 0)[0]:
                answer = connection.recv(65536)
                break
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 "))


def server_data(server: AppThread) -> Path:
    batches = server.app[STORAGE].batches
    assert batches
    return batches.data.folder


def test_an_upload_that_is_cut_off_leaves_nothing(server: AppThread, client: OpenAI) -> None:
    incoming = server_data(server) / "incoming"
    before = client.files.list().data
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10) as connection:
        head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n"
        connection.sendall(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n".encode())
        connection.sendall(PURPOSE_PART + FILE_PART + b"x" * 300_000)
        wait_until(lambda: bool(list(incoming.iterdir())))
    wait_until(lambda: not list(incoming.iterdir()))
    assert client.files.list().data == before


# --- batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_from_upload_to_download(client: OpenAI) -> None:
    batch = make_batch(client, lines(30), metadata={"for": "a test"})
    assert (batch.status, batch.endpoint, batch.metadata) == ("validating", "/v1/completions", {"for": "a test"})
    assert batch.expires_at == batch.created_at + 86400
    batch = wait_for(client, batch.id, "completed")
    assert counts(batch) == (30, 30, 0)
    assert batch.usage
    assert batch.usage.output_tokens > 30
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    assert (batch.model, batch.error_file_id, batch.errors) == ("tiny-llama", None, None)
    answers = results(client, batch.output_file_id)
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"item-{i}" for i in range(30))
    for answer in answers:
        assert (answer["response"]["status_code"], answer["error"]) == (200, None)
        alone = client.completions.create(
            model="tiny-llama", prompt=f"prompt {answer['custom_id']}", max_tokens=4, temperature=0
        )
        assert answer["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
    assert batch.output_file_id
    output = client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


def test_chats_and_plain_prompts_are_answered_too(client: OpenAI) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    data = b"\n".join([
        json.dumps({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat}).encode(),
        b'{"prompt": "Hello", "max_tokens": 3}',
    ])  # fmt: skip
    batch = wait_for(client, make_batch(client, data, endpoint="/v1/chat/completions").id, "completed")
    assert counts(batch) == (2, 2, 0)
    assert {answer["custom_id"] for answer in results(client, batch.output_file_id)} == {"chat", "line-2"}


def test_bad_lines_are_reported_with_their_numbers_and_the_others_are_answered(client: OpenAI) -> None:
    data = b"\n".join([
        line("good-1"),
        b"{no json",
        line("elsewhere", url="/v1/embeddings"),
        b"",
        line("good-2"),
        line("good-1"),
        line("too much", top_p=99),
        b"\xff\xfe",
    ])  # fmt: skip
    batch = wait_for(client, make_batch(client, data).id, "completed")
    assert batch.errors
    assert batch.errors.data
    assert [(error.line, error.code) for error in batch.errors.data][:2] == [
        (2, "invalid_json"),
        (3, "mismatched_endpoint"),
    ]
    assert counts(batch) == (7, 2, 5)
    assert {answer["custom_id"] for answer in results(client, batch.output_file_id)} == {"good-1", "good-2"}
    errors = {error["line"]: error for error in results(client, batch.error_file_id)}
    assert sorted(errors) == [2, 3, 6, 7, 8]
    assert "top_p" in errors[7]["response"]["body"]["error"]["message"]


@pytest.mark.parametrize("data", [b"", b"\n\n", b"no json\n", os.urandom(5000)])
def test_a_batch_with_nothing_to_answer_fails_and_says_why(client: OpenAI, data: bytes) -> None:
    batch = wait_for(client, make_batch(client, data).id, "failed")
    assert batch.errors
    assert batch.errors.data
    assert batch.errors.data[0].message
    assert batch.failed_at
    assert batch.output_file_id is None


def test_an_input_that_is_one_json_array_is_called_that(client: OpenAI) -> None:
    batch = wait_for(client, make_batch(client, b'[{"prompt": "a"},\n{"prompt": "b"}]\n').id, "failed")
    assert batch.errors
    assert batch.errors.data
    (error,) = batch.errors.data
    assert error.code == "invalid_json"
    assert str(error.message).startswith(
        "the input file is a JSON array, but a job reads one JSON value from each line"
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"endpoint": "/v1/nothing"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "999999999d"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
def test_a_bad_batch_names_its_field(client: OpenAI, fields: Any, field: str) -> None:
    file = client.files.create(file=b"{}", purpose="batch")
    good: dict[str, Any] = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(**{**good, **fields})
    assert refused.value.param == field


def test_only_files_for_batches_are_inputs(client: OpenAI) -> None:
    file = client.files.create(file=lines(1), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'"):
        client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


def test_batches_are_listed_page_by_page_the_newest_first(client: OpenAI) -> None:
    ids = [make_batch(client, lines(1)).id for _ in range(3)]
    page = client.batches.list(limit=2)
    assert ([batch.id for batch in page.data], page.has_more) == (ids[:0:-1], True)
    assert client.batches.list(after=ids[1], limit=1).data[0].id == ids[0]
    for batch_id in ids:
        wait_for(client, batch_id, "completed")


def test_results_before_a_cancel_are_kept(client: OpenAI) -> None:
    batch = make_batch(client, lines(10) + lines(400, **LONG).replace(b"item-", b"late-"))
    wait_until(lambda: counts(client.batches.retrieve(batch.id)).completed > 3)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = wait_for(client, batch.id, "cancelled")
    assert 3 < counts(batch).completed < 410
    assert len(results(client, batch.output_file_id)) == counts(batch).completed
    with pytest.raises(openai.ConflictError, match="cancelled"):
        client.batches.cancel(batch.id)
    with pytest.raises(openai.NotFoundError):
        client.batches.cancel("batch_none")


def part_of(server: AppThread, file_id: str, part: str) -> tuple[int, str | None, bytes]:
    """The status, the Content-Range and the body of an answer to the header `Range`."""
    request = urllib.request.Request(f"{server.url}/v1/files/{file_id}/content", headers={"Range": part})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers["Content-Range"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Range"], error.read()


def test_a_part_of_a_file_can_be_read(client: OpenAI, server: AppThread) -> None:
    file = client.files.create(file=("a.bin", b"0123456789"), purpose="user_data")
    for part, expected in (
        ("bytes=4-", (206, "bytes 4-9/10", b"456789")),
        ("bytes=0-0", (206, "bytes 0-0/10", b"0")),
        ("bytes=8-99", (206, "bytes 8-9/10", b"89")),
        ("bytes=-3", (206, "bytes 7-9/10", b"789")),
        ("lines=1-2", (200, None, b"0123456789")),
        ("bytes=0-1,4-5", (200, None, b"0123456789")),
    ):
        assert part_of(server, file.id, part) == expected, part
    status, _, body = part_of(server, file.id, "bytes=10-")
    assert status == 416
    assert "starts beyond the end of the file, which has 10 bytes" in json.loads(body)["error"]["message"]


def test_results_are_read_while_a_batch_runs(client: OpenAI, server: AppThread) -> None:
    data = b"no JSON\n" + lines(10) + lines(400, **LONG).replace(b"item-", b"late-")
    batch = make_batch(client, data)
    wait_until(lambda: counts(client.batches.retrieve(batch.id)).completed > 3)
    running = client.batches.retrieve(batch.id)
    assert (running.output_file_id, running.error_file_id) == (None, None)
    so_far: Json = running.to_dict()["results_so_far"]  # type: ignore[assignment]
    output_id, error_id = so_far["output_file_id"], so_far["error_file_id"]
    assert [error["error"]["code"] for error in results(client, error_id)] == ["invalid_json"]
    assert client.files.content(error_id).read().endswith(b"}\n")
    _, _, first = part_of(server, output_id, f"bytes=0-{so_far['output_bytes'] - 1}")
    assert len(first.splitlines()) >= 4
    assert all(json.loads(each)["response"]["status_code"] == 200 for each in first.splitlines())
    wait_until(lambda: client.files.retrieve(output_id).bytes > len(first))
    status, _, more = part_of(server, output_id, f"bytes={len(first)}-")
    assert (status, json.loads(more.splitlines()[0])["error"]) == (206, None)
    with pytest.raises(openai.NotFoundError):
        client.files.delete(output_id)
    client.batches.cancel(batch.id)
    ended = wait_for(client, batch.id, "cancelled")
    assert (ended.output_file_id, ended.error_file_id) == (output_id, error_id)
    assert "results_so_far" not in ended.to_dict()
    assert client.files.content(output_id).content.startswith(first + more)


def test_results_are_read_after_a_restart_before_the_batch_continues(start: Start, tmp_path: Path) -> None:
    first = start()
    batch = make_batch(client_of(first), lines(10) + lines(400, **LONG).replace(b"item-", b"late-"))
    wait_until(lambda: counts(client_of(first).batches.retrieve(batch.id)).completed > 3)
    first.stop()
    client = client_of(start(tiny_models.llama(tmp_path / "other.gguf")))  # the batch waits for its model
    wait_until(lambda: counts(client.batches.retrieve(batch.id)).completed > 3)
    so_far: Json = client.batches.retrieve(batch.id).to_dict()["results_so_far"]  # type: ignore[assignment]
    assert len(results(client, so_far["output_file_id"])) == counts(client.batches.retrieve(batch.id)).completed


def test_when_its_time_is_up_the_rest_is_in_the_error_file(client: OpenAI) -> None:
    batch = make_batch(client, lines(2) + lines(300, **LONG).replace(b"item-", b"late-"), window="1s")
    batch = wait_for(client, batch.id, "expired")
    assert batch.expired_at
    assert counts(batch).failed > 0
    assert counts(batch).completed + counts(batch).failed == 302
    errors = results(client, batch.error_file_id)
    assert {error["error"]["code"] for error in errors} == {"batch_expired"}
    answered = {answer["custom_id"] for answer in results(client, batch.output_file_id)}
    assert len(answered | {error["custom_id"] for error in errors}) == 302


def test_the_input_of_a_running_batch_cannot_be_deleted(client: OpenAI) -> None:
    batch = make_batch(client, lines(200, **LONG))
    with pytest.raises(openai.ConflictError, match=batch.id):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    wait_for(client, batch.id, "cancelled")
    assert client.files.delete(batch.input_file_id).deleted


def test_batches_are_in_the_figures_and_wait_for_interactive_requests(server: AppThread, client: OpenAI) -> None:
    batch = make_batch(client, lines(200, **LONG))
    wait_for(client, batch.id, "in_progress")
    client.completions.create(model="tiny-llama", prompt="Quick", max_tokens=2)
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts
    assert counts.completed < 200  # it did not wait for the whole batch

    assert server.get("/stats")["batches"]["open"] >= 1
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        page = answer.read().decode()
    assert "cppbatch_batches_open 1.0" in page
    assert 'cppbatch_generated_tokens_total{endpoint="/v1/batches"}' in page
    client.batches.cancel(batch.id)
    wait_for(client, batch.id, "cancelled")


# --- across starts ----------------------------------------------------------------------------------------------------


def test_a_batch_continues_after_a_restart(start: Start) -> None:
    first = start()
    batch = make_batch(client_of(first), lines(60, max_tokens=30))
    wait_until(lambda: counts(client_of(first).batches.retrieve(batch.id)).completed > 5)
    first.stop()
    client = client_of(start())
    batch = wait_for(client, batch.id, "completed")
    assert counts(batch) == (60, 60, 0)
    answered = [answer["custom_id"] for answer in results(client, batch.output_file_id)]
    assert sorted(answered) == sorted(f"item-{i}" for i in range(60))


def test_a_batch_waits_for_its_model(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = start()
    batch = make_batch(client_of(first), lines(100, **LONG))
    wait_for(client_of(first), batch.id, "in_progress")
    first.stop()
    other = start(tiny_models.llama(tmp_path / "other.gguf"))
    client = client_of(other)
    time.sleep(0.2)
    seen = client.batches.retrieve(batch.id)
    assert (seen.status, seen.model) == ("in_progress", "tiny-llama")
    assert counts(seen).total == 100
    assert any("is waiting for its model 'tiny-llama'" in record.getMessage() for record in caplog.records)
    client.batches.cancel(batch.id)
    wait_for(client, batch.id, "cancelled")


def test_expired_files_are_gone(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = start()
    client = client_of(first)
    expires: Any = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=b"x", purpose="user_data", expires_after=expires)
    kept = client.files.create(file=b"x", purpose="user_data")
    assert file.expires_at == file.created_at + 3600
    batch = make_batch(client, lines(2), output_expires_after=expires)
    batch = wait_for(client, batch.id, "completed")
    assert batch.output_file_id
    assert batch.output_file_id
    output = client.files.retrieve(batch.output_file_id)
    assert output.expires_at == output.created_at + 3600
    first.stop()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3601)
    client = client_of(start())
    wait_until(lambda: {each.id for each in client.files.list()} == {kept.id, batch.input_file_id})
    wait_until(
        lambda: {path.name for path in (tmp_path / "data" / "files").iterdir()} == {kept.id, batch.input_file_id}
    )


# --- an input that is not as it was uploaded --------------------------------------------------------------------------


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def shortened(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def changed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"prompt item-1", b"Prompt item-1"))


def gone(path: Path) -> None:
    path.unlink()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [emptied, shortened, changed, gone, pipe])
def test_a_batch_with_an_input_damaged_meanwhile_fails_and_keeps_its_results(
    start: Start, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    first = start()
    client_of(first).files.create(file=b"x", purpose="user_data")  # a folder without any file is refused
    batch = make_batch(client_of(first), lines(100, **LONG) + b"{}\n")
    wait_until(lambda: counts(client_of(first).batches.retrieve(batch.id)).completed > 3)
    first.stop()
    damage(tmp_path / "data" / "files" / batch.input_file_id)
    client = client_of(start())
    assert_failed(client, batch.id, "input_file_gone" if damage is gone else "input_file_changed")


def assert_failed(client: OpenAI, batch_id: str, code: str) -> None:
    batch = wait_for(client, batch_id, "failed")
    assert batch.failed_at
    assert batch.errors
    assert batch.errors.data
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, None), ("invalid_line", 101)]
    assert 3 < counts(batch).completed < 100
    assert len(results(client, batch.output_file_id)) == counts(batch).completed


def test_a_batch_with_an_input_emptied_while_it_is_read_fails_at_its_end(start: Start, tmp_path: Path) -> None:
    client = client_of(start())
    long_lines = lines(3000, max_tokens=1, user="x" * 1000)  # more than what is read ahead
    batch = make_batch(client, long_lines)
    wait_until(lambda: counts(client.batches.retrieve(batch.id)).completed > 3)
    emptied(tmp_path / "data" / "files" / batch.input_file_id)
    batch = wait_for(client, batch.id, "failed", seconds=60)
    assert batch.errors
    assert batch.errors.data
    assert batch.errors.data[0].code == "input_file_changed"
    assert "has 0 bytes instead of the" in str(batch.errors.data[0].message)
    assert 3 < counts(batch).completed < counts(batch).total == 3000
    assert len(results(client, batch.output_file_id)) == counts(batch).completed


def test_a_damaged_input_is_found_before_its_lines_are_counted(start: Start, tmp_path: Path) -> None:
    client = client_of(start())
    for damage in (emptied, shortened, pipe):
        file = client.files.create(file=("a.jsonl", lines(9)), purpose="batch")
        damage(tmp_path / "data" / "files" / file.id)
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        batch = wait_for(client, batch.id, "failed")
        assert batch.errors
        assert batch.errors.data
        assert [error.code for error in batch.errors.data] == ["input_file_changed"]
        with pytest.raises(openai.NotFoundError, match="is damaged"):
            client.files.content(file.id)


def test_the_counts_of_a_batch_are_known_at_once_after_a_kill(start: Start, tmp_path: Path) -> None:
    """Its ledger has them, not the record, which is stored when the server stops."""
    first = start()
    batch = make_batch(client_of(first), lines(100, **LONG))
    wait_until(lambda: counts(client_of(first).batches.retrieve(batch.id)).completed > 3)
    shutil.copytree(tmp_path / "data", tmp_path / "killed")
    first.stop()
    manager = BatchManager(open_data_folder(tmp_path / "killed"), URLS)  # no batch runs yet
    (open_batch,) = manager.open_batches
    assert open_batch.request_counts.completed > 3
    assert open_batch.usage.output_tokens >= 3 * LONG["max_tokens"]
    asyncio.run(manager.close())


# --- when the disk does not do ----------------------------------------------------------------------------------------


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_batch_pauses_while_the_disk_is_full(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_batch, "RETRIES", Pauses(0.1, 600.0))
    client = client_of(start())
    with monkeypatch.context() as patch:
        patch.setattr(DurableFile, "append", lambda *_: outputs_full())
        batch = make_batch(client, lines(10))
        wait_for(client, batch.id, "in_progress")
        time.sleep(0.5)
        assert client.batches.retrieve(batch.id).status == "in_progress"
    batch = wait_for(client, batch.id, "completed")
    assert len(results(client, batch.output_file_id)) == 10


def outputs_full() -> None:
    raise durable_files.storage_error(Path("output.jsonl"), OSError(28, "No space left on device"))


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_results_pauses_its_batch_and_the_server_still_ends(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(active_batch, "RETRIES", Pauses(0.1, 600.0))
    first = start()
    batch = make_batch(client_of(first), lines(50, **LONG))
    wait_until(lambda: counts(client_of(first).batches.retrieve(batch.id)).completed > 3)
    first.stop()
    (output,) = (tmp_path / "data").glob(f"batches/{batch.id}/out*")
    output.unlink()
    os.mkfifo(output)
    second = start()
    wait_until(lambda: "it is not a regular file" in caplog.text)
    assert client_of(second).batches.retrieve(batch.id).status == "in_progress"
    second.stop()


def test_a_batch_continues_when_the_engine_is_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_batch, "RETRIES", Pauses(0.1, 600.0))

    async def gone(*_: object) -> None:
        raise EngineClosed("the engine does not accept requests: it is failed")

    client = client_of(start())
    with monkeypatch.context() as patch:
        patch.setattr(BatchRequestHandler, "__call__", gone)
        batch = make_batch(client, lines(10))
        wait_for(client, batch.id, "in_progress")
        time.sleep(0.3)
        assert counts(client.batches.retrieve(batch.id)) == (10, 0, 0)
    assert counts(wait_for(client, batch.id, "completed")) == (10, 10, 0)


def test_an_upload_whose_boundary_is_no_text_is_refused(start: Start) -> None:
    headers = {"Content-Type": 'multipart/form-data; boundary="\xff"'}
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"{start().url}/v1/files", b"x", headers), timeout=30)
    with refused.value:
        assert refused.value.code == 400


def test_an_upload_to_a_full_disk_gets_an_error_that_says_so_and_leaves_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = client_of(start())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(openai.APIStatusError, match="free some space") as refused:
            client.files.create(file=b"x" * 100_000, purpose="batch")
    assert refused.value.status_code == 507
    assert not client.files.list().data
    assert not list((tmp_path / "data" / "files").iterdir())
    assert not list((tmp_path / "data" / "incoming").iterdir())
    assert client.files.create(file=b"x", purpose="batch").bytes == 1


def test_a_disk_that_is_full_at_the_start_is_tried_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An earlier batch continues as soon as there is room."""
    monkeypatch.setattr(storage, "RETRY_S", 0.2)
    first = start()
    batch = make_batch(client_of(first), lines(20, **LONG))
    wait_for(client_of(first), batch.id, "in_progress")
    first.stop()
    real, is_full = open_data_folder, True

    def open_when_there_is_room(folder: Path) -> DataFolder:
        if is_full:
            full_database(folder)
        return real(folder)

    monkeypatch.setattr(storage, "open_data_folder", open_when_there_is_room)
    client = client_of(start())
    assert client.completions.create(model="tiny-llama", prompt="a", max_tokens=2).choices
    with pytest.raises(openai.APIStatusError, match="disk is full") as refused:
        client.batches.retrieve(batch.id)
    assert refused.value.status_code == 503
    assert str(tmp_path) not in str(refused.value.body)
    is_full = False
    wait_until(lambda: is_kept(client))
    assert counts(wait_for(client, batch.id, "completed", seconds=150)) == (20, 20, 0)


def full_database(folder: Path) -> None:
    """What SQLite says when its file cannot grow."""
    database = Database(folder / "full.sqlite3", Kind(1, [["CREATE TABLE t (x)"]], "quick_check", 0))
    database.execute("PRAGMA max_page_count = 2")
    try:
        database.execute("INSERT INTO t VALUES (zeroblob(100000))")
    finally:
        database.close()


def is_kept(client: OpenAI) -> bool:
    try:
        return bool(client.batches.list())
    except openai.APIStatusError:
        return False


def test_disk_errors_do_not_show_the_servers_paths(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of(start())
    for error in (28, 13, 5):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", partial(failing, error))
            with pytest.raises(openai.APIStatusError) as refused:
                client.files.create(file=b"x", purpose="batch")
        assert refused.value.status_code == 507
        assert str(tmp_path) not in str(refused.value.body)
    assert any(str(tmp_path) in record.getMessage() for record in caplog.records)


# --- without a place to keep things -----------------------------------------------------------------------------------


def failing(error: int, *_: object) -> None:
    raise OSError(error, "no")


def test_a_server_without_a_data_folder_says_so(tiny_llama: Path) -> None:
    server = start_server(tiny_llama, None)
    client = client_of(server)
    for ask in (client.files.list, client.batches.list, lambda: client.files.create(file=b"x", purpose="batch")):
        with pytest.raises(openai.APIStatusError, match="--data-dir") as refused:
            ask()
        assert refused.value.status_code == 503
    assert client.models.list().data
    server.stop()
