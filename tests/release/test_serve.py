"""`cppbatch serve` with the default model, as its users run it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import free_port

from tests.support.batch_files import client_of, wait_until
from tests.support.fixtures import server_process
from tests.support.server_process import ServerProcess, answers

IGNORE_EOS = {"ignore_eos": True}

server = server_process("default_model", "-np", "16")


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return client_of(server)


def test_the_model_is_listed_under_its_file_name(client: openai.OpenAI, default_model: Path) -> None:
    assert [model.id for model in client.models.list()] == [default_model.stem]
    assert client.models.retrieve(default_model.stem).object == "model"


def test_a_chat_answer_is_a_whole_openai_object(client: openai.OpenAI, default_model: Path) -> None:
    answer = client.chat.completions.create(
        model=default_model.stem, messages=[{"role": "user", "content": "What is 2+2?"}], temperature=0, max_tokens=12
    )
    assert "4" in (answer.choices[0].message.content or "")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_gives_the_same_text_and_its_usage_last(client: openai.OpenAI, default_model: Path) -> None:
    asked: Any = {
        "model": default_model.stem,
        "messages": [{"role": "user", "content": "Count to five."}],
        "temperature": 0,
        "max_completion_tokens": 8,  # the model is quantised: later the two best tokens are nearly equal
        "extra_body": {"speculate": False},  # the first answer drafts the second: steps of more rows round otherwise
    }
    whole = client.chat.completions.create(**asked)
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert whole.usage
    assert last.usage
    assert last.usage.prompt_tokens_details
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1  # asked a second time


def test_a_streamed_completion_gives_the_same_text_as_a_whole_one(client: openai.OpenAI, default_model: Path) -> None:
    arguments: dict[str, Any] = {
        "model": default_model.stem,
        "prompt": "Once upon a time",
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = client.completions.create(**arguments)
    chunks = list(client.completions.create(stream=True, **arguments))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_several_prompts_with_several_choices_answer_in_order(client: openai.OpenAI, default_model: Path) -> None:
    answer = client.completions.create(
        model=default_model.stem, prompt=["2, 4, 6,", "a, b, c,"], n=2, temperature=0, max_tokens=4
    )
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert "8" in texts[0]
    assert "d" in texts[2]


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(client: openai.OpenAI, default_model: Path) -> None:
    answer = client.completions.create(
        model=default_model.stem, prompt="1, 2, 3, 4, 5,", temperature=0, max_tokens=40, stop=["9, 10"]
    )
    assert answer.choices[0].text == " 6, 7, 8, "
    assert answer.choices[0].finish_reason == "stop"


def test_the_same_seed_gives_the_same_text(client: openai.OpenAI, default_model: Path) -> None:
    def ask(seed: int) -> str:
        answer = client.completions.create(
            model=default_model.stem, prompt="My favourite", temperature=1, max_tokens=16, seed=seed,
            extra_body={"speculate": False},  # the first answer drafts the second: steps of more rows round otherwise
        )  # fmt: skip
        return answer.choices[0].text

    assert ask(7) == ask(7) != ask(8)


def test_16_concurrent_streams_share_their_steps(server: ServerProcess, default_model: Path) -> None:
    before = server.wait_idle()
    finish_reasons = asyncio.run(stream_together(server.url, default_model.stem, n=16))
    after = server.wait_idle()
    assert finish_reasons == ["length"] * 16
    rows, steps = (after[name] - before[name] for name in ("decode_rows", "decode_steps"))
    print(f"\n{rows} rows in {steps} decode steps: {rows / steps:.2f} sequences a step")
    assert rows / steps >= 12


async def stream_together(url: str, model: str, n: int) -> list[str | None]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def one(i: int) -> str | None:
            stream = await client.completions.create(
                model=model, prompt=f"Fact number {i}:", max_tokens=32, stream=True, extra_body=IGNORE_EOS
            )
            return [chunk.choices[0].finish_reason async for chunk in stream][-1]

        return await asyncio.gather(*(one(i) for i in range(n)))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_cells_within_a_second(server: ServerProcess, stream: bool) -> None:
    server.wait_idle()
    body = json.dumps({"prompt": "Tell me", "max_tokens": 1000, "ignore_eos": True, "stream": stream})
    with raw_post(server, "/v1/completions", body) as connection:
        wait_until(lambda: server.get("/stats")["kv_cells_used"] > 5)
        steps = server.get("/stats")["steps"]
        connection.shutdown(socket.SHUT_RDWR)
    stats = server.wait_idle()
    assert stats["kv_cells_used"] == 0
    assert stats["seq_ids_free"] + stats["prefixes_in_cells"] == stats["seq_ids"]
    n_more = 20 if stream else 200  # whether a client that sends nothing more still reads is asked after 0.1 s
    assert stats["steps"] - steps < n_more, "it continued generating for a client that had left"


def raw_post(server: ServerProcess, path: str, body: str) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    return connection


def test_ctrl_c_finishes_running_requests_and_exits_0(tiny_llama: Path) -> None:
    with ServerProcess("-m", tiny_llama, module="tests.support.paced_server") as server:
        server.wait_ready()
        body = {"prompt": "A long story:", "max_tokens": 50, "ignore_eos": True, "stream": True}
        with server.stream("/v1/completions", body) as answer:
            answer.readline()
            server.interrupt()
            rest = answer.read().decode()
        assert '"finish_reason":"length"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        assert server.wait() == 0
        assert any("finishing 1 request" in line for line in server.lines)


def test_ctrl_c_while_the_model_loads_exits_at_once(default_model: Path) -> None:
    with ServerProcess("-m", default_model, "-c", "262144", "-np", "64") as server:
        wait_until(lambda: server.lines)
        server.interrupt()
        assert server.wait() in (130, -2)
        assert "Traceback" not in server.stop()


def test_a_port_in_use_is_one_line_before_the_model_is_looked_for(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with ServerProcess("-m", "nosuch.gguf", "--port", port, "--data-dir", tmp_path) as server:
            assert server.wait() == 2
            (line,) = server.stop().splitlines()
    assert "cannot listen on 127.0.0.1" in line
    assert "Choose another --port" in line


def proxy_configuration(name: str, port: int, url: str, folder: Path) -> str:
    """The file of deploy/ for this server, without TLS and for a process that is not root's."""
    text = (Path(__file__).parents[2] / "deploy" / name).read_text().replace("127.0.0.1:8080", url.partition("//")[2])
    if name == "Caddyfile":
        return f"{{\n admin off\n}}\n{text.replace('llm.example.org {', f'http://127.0.0.1:{port} {{')}"
    text = re.sub(r"ssl_certificate.*\n", "", text.replace("listen 443 ssl", f"listen 127.0.0.1:{port}"))
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"pid {folder}/pid; daemon off; error_log stderr; events {{}} http {{ access_log off; {paths} {text} }}"


@pytest.mark.parametrize(
    ("name", "command"),
    [("nginx.conf", ["nginx", "-c"]), ("Caddyfile", ["caddy", "run", "--adapter", "caddyfile", "--config"])],
)
def test_a_reverse_proxy_passes_streams_on_as_they_come(
    server: ServerProcess, tmp_path: Path, name: str, command: list[str]
) -> None:
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    port, file = free_port(), tmp_path / name
    file.write_text(proxy_configuration(name, port, server.url, tmp_path))
    with subprocess.Popen([*command, str(file)], stderr=subprocess.DEVNULL) as proxy:
        try:
            wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"))
            server.wait_idle()
            body = json.dumps({"prompt": "Once", "max_tokens": 400, "stream": True, **IGNORE_EOS}).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as stream:
                first = stream.readline()
                assert server.get("/stats")["running"] == 1, "the proxy holds the stream back"
                lines = stream.read().splitlines()
            assert first.startswith(b"data: ")
            assert lines[-2:] == [b"data: [DONE]", b""]
        finally:
            proxy.terminate()
