"""The command line for users of Ollama: `run`, words without flags, names of its library, `models show|rm|ps`."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import gguf
import pytest

from cppbatch.cli.chat_command import chat
from cppbatch.cli.generate_command import generate
from cppbatch.cli.main import cli
from cppbatch.cli.serve_command import serve
from cppbatch.errors import CppBatchError, ModelError
from cppbatch.models import batch_gain
from cppbatch.models.file_header import FILE_TYPES
from cppbatch.models.find import short_name
from cppbatch.models.inspect import inspect_model
from cppbatch.models.pull import choose_model, local_model
from tests.support import tiny_models


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CPPBATCH_MODELS", str(tmp_path))
    return tmp_path


def call(*arguments: str) -> None:
    cli.main(list(arguments), standalone_mode=False)


def renamed(command: click.Command, arguments: list[str]) -> list[str]:
    """What the command makes of its arguments before click reads them."""
    seen: list[list[str]] = []
    original = click.Command.parse_args
    click.Command.parse_args = lambda self, ctx, args: seen.append(list(args)) or []  # type: ignore[method-assign,func-returns-value]
    try:
        command.parse_args(click.Context(command), arguments)
    finally:
        click.Command.parse_args = original  # type: ignore[method-assign]
    return seen[0]


def test_a_word_without_a_flag_is_the_model_to_serve_and_the_prompt_to_answer() -> None:
    assert renamed(serve, ["llama.gguf", "-np", "4"]) == ["-m", "llama.gguf", "-np", "4"]
    assert renamed(serve, ["--port", "11434", "a", "b"]) == ["--port", "11434", "-m", "a", "-m", "b"]
    assert renamed(serve, ["-m", "a", "--no-webui", "--host=0.0.0.0"]) == ["-m", "a", "--no-webui", "--host=0.0.0.0"]
    assert renamed(generate, ["Hello there", "-n", "5", "again"]) == ["-p", "Hello there", "-n", "5", "-p", "again"]
    assert renamed(generate, ["-f", "-", "--raw"]) == ["-f", "-", "--raw"]


def test_chat_with_a_word_says_which_command_takes_one() -> None:
    with pytest.raises(click.UsageError, match=r"name the model with -m, .*`cppbatch run MODEL`.*generate PROMPT"):
        call("chat", "hello")


def test_run_is_the_chat_and_with_a_prompt_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str]]] = []
    for command in (chat, generate):
        name = str(command.name)
        monkeypatch.setattr(command, "main", lambda args, name=name, **_: seen.append((name, list(args))))
    call("run", "llama3.2")
    call("run", "llama3.2", "--temp", "0")
    call("run", "llama3.2", "Why is", "the sky blue?", "-n", "9")
    assert seen == [
        ("chat", ["-m", "llama3.2"]),
        ("chat", ["-m", "llama3.2", "--temp", "0"]),
        ("generate", ["-m", "llama3.2", "--chat", "-p", "Why is the sky blue?", "-n", "9"]),
    ]
    with pytest.raises(click.UsageError, match="--temp comes before the model"):
        call("run", "--temp", "0", "llama3.2")


def test_a_name_of_ollamas_library_says_how_the_model_is_named_here(folder: Path) -> None:
    for name in ("llama3.2", "llama3.2:latest"):
        with pytest.raises(ModelError, match=re.escape("the model is -m bartowski/Llama-3.2-3B-Instruct-GGUF on the")):
            choose_model(name)
    tiny_models.llama(folder / "llama3.2.gguf")
    assert choose_model("llama3.2") == folder / "llama3.2.gguf"


def test_a_listed_name_works_in_every_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_gain, "kernel_report", lambda _: SimpleNamespace(as_json=dict))  # which needs llama.cpp
    (folder / "owner" / "repo").mkdir(parents=True)
    path = tiny_models.llama(folder / "owner" / "repo" / "tiny-Q4_K_M.gguf")
    for name in (short_name(path), "tiny", str(path)):
        assert local_model(name) == path
        for command in ("inspect", "show"):
            call("models", command, name, "--json")
            assert json.loads(capsys.readouterr().out)["path"] == str(path)
    with pytest.raises(ModelError, match="file not found"):
        call("models", "inspect", "nothing")


def test_the_type_of_a_file_is_what_its_metadata_says(tmp_path: Path) -> None:
    names = {int(each): each.name.removeprefix("MOSTLY_").removeprefix("ALL_") for each in gguf.LlamaFileType}
    assert {number: names[number] for number in FILE_TYPES if number in names}.items() <= FILE_TYPES.items()
    assert FILE_TYPES[15] == "Q4_K_M"
    facts = inspect_model(tiny_models.llama(tmp_path / "tiny.gguf"))  # which does not say
    assert facts.file_type == facts.main_type


def test_rm_deletes_a_model_of_the_folder_only(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    path, other = tiny_models.llama(folder / "tiny.gguf"), tmp_path_factory.mktemp("other") / "mine.gguf"
    other.write_bytes(path.read_bytes())
    with pytest.raises(ModelError, match="is not a model of"):
        call("models", "rm", str(other))
    call("models", "rm", "tiny")
    assert capsys.readouterr().out == f"deleted {path}\n"
    assert (path.exists(), other.exists()) == (False, True)
    with pytest.raises(ModelError, match="tiny is not a model of"):
        call("models", "rm", "tiny")


@pytest.fixture
def serve_json() -> Iterator[Callable[[int, object], str]]:
    """Starts a server with one answer to everything, and returns its address."""
    servers: list[http.server.HTTPServer] = []

    def start(status: int, body: object) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_arguments: object) -> None:
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_ps_lists_what_a_server_has_loaded(
    serve_json: Callable[[int, object], str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"name": "tiny", "size": 98_000_000, "details": {"quantization_level": "Q4_K_M"}, "context_length": 8192}
    times = {"tiny": "2316-09-19T23:51:00.592072Z", "other": "2026-01-02T03:04:05.000000Z"}
    models = [{**model, "name": name, "expires_at": time} for name, time in times.items()]
    call("models", "ps", "--url", serve_json(200, {"models": models}))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["tiny", "98.0", "MB", "Q4_K_M", "8,192", "never"]
    assert rows[2][0] == "other"
    assert rows[2][-2].startswith("2026-01-0")
    with pytest.raises(CppBatchError, match="answers with status 401"):
        call("models", "ps", "--url", serve_json(401, {"error": "missing"}))
    with pytest.raises(CppBatchError, match="Start `cppbatch serve`, or give its --url"):
        call("models", "ps", "--url", "http://127.0.0.1:9")
