"""From loading to shutdown: what /health and /ready report, and which requests are finished."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner

from cppbatch.cli.main import cli
from cppbatch.cluster.engines.client import Health
from cppbatch.errors import ConfigError, CppBatchError
from cppbatch.server.app import create_app
from cppbatch.server.request_checks import IN_FLIGHT
from cppbatch.server.settings import ServerSettings
from tests.support.fixtures import engine_of
from tests.support.http_client import get, http_to
from tests.support.listening import HeldEngine, until
from tests.support.server_process import ServerProcess

Http = TestClient[Any, Any]
HELLO = {"prompt": "Hello", "max_tokens": 2}

engine = engine_of(HeldEngine, n_ctx=256, n_parallel=2)


@pytest.mark.parametrize(
    ("status", "code", "is_ready"),
    [
        ("ok", 200, True),
        ("sleeping", 200, True),
        ("restarting", 200, True),
        ("loading", 503, False),
        ("failed", 503, False),
        ("closed", 503, False),
    ],
)
async def test_health_and_ready_follow_the_engine(
    engine: HeldEngine, monkeypatch: pytest.MonkeyPatch, status: Any, code: int, is_ready: bool
) -> None:
    engine.go_on.set()
    async with http_to(engine) as http:
        monkeypatch.setattr(engine, "health", lambda: Health(status=status, progress=0.5, error="the reason"))
        health = {"status": status, "progress": 0.5, "error": "the reason"}
        assert await get(http, "/health") == (code, health)
        assert await get(http, "/ready") == (code, {"ready": is_ready, "status": status})
        async with http.post("/v1/completions", json=HELLO) as answer:
            assert answer.status == code
            assert ("Retry-After" in answer.headers) == (code == 503)
        monkeypatch.undo()


async def test_on_shutdown_running_requests_finish_and_new_ones_are_refused(engine: HeldEngine) -> None:
    app = create_app(engine)
    async with TestClient(TestServer(app)) as http:
        running = asyncio.create_task(http.post("/v1/completions", json=HELLO))
        await until(lambda: engine.n_held == 1)
        drained = asyncio.create_task(app[IN_FLIGHT].drain(30))
        await asyncio.sleep(0)
        assert await get(http, "/ready") == (503, {"ready": False, "status": "draining"})
        assert (await get(http, "/health"))[0] == 200
        async with http.get("/metrics") as metrics:
            assert metrics.status == 200
        async with http.post("/v1/completions", json=HELLO) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (503, "shutting_down")
            assert refused.headers["Retry-After"]
        assert not drained.done()
        engine.go_on.set()
        assert (await running).status == 200
        assert await drained == 0


async def test_a_drain_that_takes_too_long_reports_how_many_requests_are_left(engine: HeldEngine) -> None:
    app = create_app(engine)
    async with TestClient(TestServer(app)) as http:
        running = [asyncio.create_task(http.post("/v1/completions", json=HELLO)) for _ in range(2)]
        await until(lambda: engine.n_held == 2)
        assert await app[IN_FLIGHT].drain(0.05) == 2
        engine.go_on.set()
        await asyncio.gather(*running)
        assert await app[IN_FLIGHT].drain(0) == 0


def test_a_drain_timeout_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="--drain-timeout is -1"):
        ServerSettings(drain_timeout=-1)


ENDLESS: dict[str, Any] = {"prompt": "A long story:", "max_tokens": 1900, "ignore_eos": True}
SIZES = ("-c", "4096", "-np", "2", "-t", "1")


def paced_server(*arguments: str | Path, **options: Any) -> ServerProcess:
    """A server that takes 19 seconds for `ENDLESS`."""
    return ServerProcess(*arguments, *SIZES, module="tests.support.paced_server", **options)


def test_requests_that_outlast_the_drain_timeout_get_an_error_and_are_counted(tiny_llama: Path) -> None:
    with paced_server("-m", tiny_llama, "--drain-timeout", "2") as server:
        server.wait_ready()
        with server.stream("/v1/completions", {**ENDLESS, "stream": True}) as answer:
            answer.readline()
            server.process.send_signal(signal.SIGTERM)
            server.wait_line("finishing 1 request(s), for at most 2 s")
            with urllib.request.urlopen(f"{server.url}/health") as health:  # it still listens
                assert health.status == 200
            with pytest.raises(urllib.error.HTTPError) as refused:
                server.post("/v1/completions", ENDLESS)
            assert refused.value.code == 503
            rest = answer.read().decode()
        assert "the server is shutting down" in rest
        assert rest.endswith("data: [DONE]\n\n")
        assert server.wait() == 0
        server.wait_line("aborted 1 request(s) that did not finish within 2 s")


def test_a_second_signal_while_it_drains_ends_it_at_once(tiny_llama: Path) -> None:
    with paced_server("-m", tiny_llama) as server:
        server.wait_ready()
        with server.stream("/v1/completions", {**ENDLESS, "stream": True}) as answer:
            answer.readline()
            server.process.send_signal(signal.SIGTERM)
            server.wait_line("finishing 1 request(s), for at most 30 s; press Ctrl-C again to stop immediately")
            server.interrupt()
            assert server.wait() == 130


def test_running_requests_finish_when_the_terminal_is_closed(tiny_llama: Path) -> None:
    """It sends SIGHUP, to the whole group and often twice."""
    with paced_server("-m", tiny_llama, "--drain-timeout", "200", in_group=True) as server:
        server.wait_ready()
        with server.stream("/v1/completions", {**ENDLESS, "max_tokens": 100, "stream": True}) as answer:
            answer.readline()
            for _ in range(2):
                os.killpg(server.process.pid, signal.SIGHUP)
                time.sleep(0.1)
            chunks = [json.loads(line[6:]) for line in answer.read().splitlines() if line.startswith(b"data: {")]
        assert "choices" in chunks[-1], chunks[-1]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert server.wait(30) == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_server_without_access_control_logs_one_line_that_says_so(tiny_llama: Path, host: str) -> None:
    with ServerProcess("-m", tiny_llama, "-c", "256", "-np", "2", "--host", host) as server:
        server.wait_ready()
        server.interrupt()
        assert server.wait() == 0
        warnings = [line for line in server.stop().splitlines() if "--api-key" in line]
    assert len(warnings) == (host == "0.0.0.0")


def test_with_a_key_the_logs_are_json_and_the_key_is_not_in_them(tiny_llama: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("fr0m-the-file\n")
    options: list[str | Path] = [
        "--api-key",
        "fr0m-the-flag",
        "--api-key-file",
        keys,
        "--log-format",
        "json",
        "--host",
        "0.0.0.0",
        "-v",
    ]
    with ServerProcess("-m", tiny_llama, "-c", "256", "-np", "2", *options) as server:
        server.wait_ready()
        for key in ("fr0m-the-file", "fr0m-the-flag"):
            request = urllib.request.Request(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert urllib.request.urlopen(request).status == 200
        with pytest.raises(urllib.error.HTTPError, match="401"):
            server.get("/v1/models")
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"Authorization: Bearer fr0m-the-flag\x00\r\n\r\n")
            assert b"400" in connection.recv(1000)
        server.interrupt()
        assert server.wait() == 0
        lines = [json.loads(line) for line in server.stop().splitlines()]
    assert not [line for line in lines if "fr0m-the" in json.dumps(line) or "--api-key" in line["message"]]
    assert [line["status"] for line in lines if line["logger"] == "cppbatch.access"] == [200, 200, 401]
    assert [line["level"] for line in lines if line["logger"] == "aiohttp.server"] in ([], ["WARNING"])


def test_bad_settings_are_one_line_before_a_model_is_loaded(tmp_path: Path) -> None:
    for options, what in (
        (["--api-key-file", tmp_path / "none"], "none"),
        (["--max-n", "0"], "--max-n"),
        (["--cors-origin", "example.org"], "--cors-origin"),
        (["--ssl-certfile", tmp_path / "cert"], "cert"),
    ):
        refused = CliRunner().invoke(cli, ["serve", "-m", f"{tmp_path}/no.gguf", *map(str, options)])
        assert isinstance(refused.exception, CppBatchError)
        assert what in str(refused.exception)
        assert "\n" not in str(refused.exception)
