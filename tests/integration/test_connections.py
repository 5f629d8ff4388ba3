"""Clients that send nothing, stop halfway, read nothing, or come by the thousand."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from cppbatch import LocalEngine
from cppbatch.errors import ConfigError
from cppbatch.jobs.batches.records import File
from cppbatch.server import listener as listener_module
from cppbatch.server.address import Address, tls_context
from cppbatch.server.api.batches.handler import URLS
from cppbatch.server.app import create_app
from cppbatch.server.http.connections import max_connections
from cppbatch.server.listener import Listener
from cppbatch.server.storage import open_storage
from tests.support.fixtures import engine_of
from tests.support.listening import HeldEngine, Streams, connect, ended, head, listening, post_bytes, until

HELLO: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}

engine = engine_of(HeldEngine)


async def is_served(listener: Listener) -> bool:
    reader, writer = await connect(listener)
    writer.write(head("GET", "/health"))
    line = await asyncio.wait_for(reader.readline(), 30)
    writer.close()
    return b" 200 " in line


@pytest.mark.parametrize("sent", [b"", b"GE", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
async def test_a_connection_without_a_whole_request_head_is_closed(engine: HeldEngine, sent: bytes) -> None:
    async with listening(create_app(engine), head_timeout=0.2) as listener:
        reader, writer = await connect(listener)
        writer.write(sent)
        assert await ended(reader) == b""
        assert await is_served(listener)


async def test_a_trickle_of_header_bytes_does_not_help(engine: HeldEngine) -> None:
    async with listening(create_app(engine), head_timeout=0.3) as listener:
        reader, writer = await connect(listener)
        writer.write(b"GET /health HTTP/1.1\r\nX: ")
        closing = asyncio.create_task(ended(reader))
        while not closing.done():
            writer.write(b"y")
            await asyncio.sleep(0.02)
        assert await closing == b""


async def test_a_body_that_stalls_is_given_up_and_a_slow_one_is_not(engine: HeldEngine) -> None:
    engine.go_on.set()
    async with listening(create_app(engine), idle_timeout=0.4) as listener:
        whole = post_bytes("/v1/completions", HELLO)
        reader, writer = await connect(listener)
        writer.write(whole[:-1])
        assert await ended(reader) == b""
        reader, writer = await connect(listener)
        for i in range(0, len(whole), 8):
            writer.write(whole[i : i + 8])
            await asyncio.sleep(0.01)
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)
        writer.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/files"])
async def test_a_body_that_trickles_is_given_up(
    engine: HeldEngine, tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Though never so long without a byte that it would count as stalled."""
    caplog.set_level(logging.INFO, "cppbatch")
    async with listening(create_app(engine, storage=open_storage(tmp_path, URLS)), idle_timeout=0.4) as listener:
        reader, writer = await connect(listener)
        kind = "Content-Type: multipart/form-data; boundary=b"
        writer.write(head("POST", path, "Content-Length: 10000", kind))
        closing = asyncio.create_task(ended(reader))
        while not closing.done():
            writer.write(b"-")
            await asyncio.sleep(0.05)
        assert await closing == b""
    assert any("at less than 500 bytes/s" in record.getMessage() for record in caplog.records)


async def test_an_upload_that_stalls_is_given_up_and_leaves_nothing(engine: HeldEngine, tmp_path: Path) -> None:
    async with listening(create_app(engine, storage=open_storage(tmp_path, URLS)), idle_timeout=0.4) as listener:
        reader, writer = await connect(listener)
        form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        kind = "Content-Type: multipart/form-data; boundary=b"
        writer.write(head("POST", "/v1/files", "Content-Length: 1000000", kind) + form + b"x" * 300_000)
        await until(lambda: list((tmp_path / "incoming").iterdir()))
        assert await ended(reader) == b""
        await until(lambda: not list((tmp_path / "incoming").iterdir()))


async def test_a_connection_that_is_idle_after_a_request_is_closed(
    engine: HeldEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "_KEEPALIVE_SECONDS", 0.3)
    async with listening(create_app(engine), head_timeout=0.1) as listener:
        reader, writer = await connect(listener)
        for _ in range(4):  # longer together than either limit
            writer.write(head("GET", "/health"))
            assert b" 200 " in await reader.readuntil(b"}")
            await asyncio.sleep(0.15)
        assert await ended(reader) == b""
        writer.close()


async def test_a_long_request_is_not_an_idle_connection(engine: HeldEngine) -> None:
    async with listening(create_app(engine), idle_timeout=0.1, head_timeout=0.1) as listener:
        reader, writer = await connect(listener)
        writer.write(post_bytes("/v1/completions", HELLO))
        await asyncio.sleep(0.5)
        engine.go_on.set()
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)
        writer.close()


async def test_many_silent_connections_lock_out_no_client(engine: HeldEngine) -> None:
    async with listening(create_app(engine), most=50) as listener:
        reader, busy = await connect(listener)
        busy.write(post_bytes("/v1/completions", HELLO))
        await until(lambda: engine.n_held == 1)
        silent = [await connect(listener) for _ in range(300)]
        assert await is_served(listener)
        gone = [asyncio.create_task(ended(reader)) for reader, _ in silent[:240]]
        await asyncio.gather(*gone)  # the oldest made room
        engine.go_on.set()
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)  # the one that was busy did not
        for _, writer in (*silent, (None, busy)):
            writer.close()


async def test_when_all_connections_are_busy_a_new_one_is_closed(engine: HeldEngine) -> None:
    async with listening(create_app(engine), most=3) as listener:
        busy = [await connect(listener) for _ in range(3)]
        for _, writer in busy:
            writer.write(post_bytes("/v1/completions", HELLO))
        await until(lambda: engine.n_held == 3)
        reader, writer = await connect(listener)
        assert await ended(reader) == b""
        engine.go_on.set()
        for reader, writer in busy:
            assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)
            writer.close()
        await asyncio.sleep(0.05)
        assert await is_served(listener)


def test_the_cap_leaves_files_for_the_process() -> None:
    import resource

    most = max_connections()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard
    assert 0 < most <= 8192


async def deaf(listener: Listener, body: object) -> Streams:
    """A client that reads only a few kilobytes ahead of its application, which reads nothing.

    Nor does the server's kernel hold megabytes for it, as it may else.
    """
    for listening_socket in listener._servers[0].sockets:
        listening_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    host, port = listener.url.split("://")[1].split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
    writer.write(post_bytes("/v1/completions", body))
    return reader, writer


async def test_a_download_that_the_client_does_not_read_is_cut_off(
    engine: HeldEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cppbatch")
    storage = open_storage(tmp_path, URLS)
    assert storage.batches
    data, size = storage.batches.data, 64 << 20
    data.incoming("file-a").write_bytes(bytes(size))
    await data.add_file(File(id="file-a", bytes=size, created_at=1, filename="a", purpose="batch"))
    async with listening(create_app(engine, storage=storage), idle_timeout=0.4) as listener:
        _, writer = await connect(listener, limit=4096)
        writer.write(head("GET", "/v1/files/file-a/content"))
        await until(lambda: "did not read its response" in caplog.text)
        writer.close()


async def test_a_client_that_does_not_read_is_cut_off_and_its_cells_are_freed(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cppbatch")
    async with (
        LocalEngine(tiny_llama, n_ctx=4096, n_parallel=4, n_threads=1, prefix_cache=False) as engine,
        listening(create_app(engine), idle_timeout=0.4) as listener,
    ):
        body = {"prompt": "Hello", "max_tokens": 900, "ignore_eos": True, "logprobs": 20, "n": 4, "stream": True}
        reader, writer = await deaf(listener, body)
        await until(lambda: "it did not read its response" in caplog.text)
        await until(lambda: not engine._by_id)
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.kv_cells_used) == (0, 0, 0)
        assert b"[DONE]" not in await ended(reader)
        assert "/v1/completions 499" in caplog.text
        assert await is_served(listener)
        writer.close()


async def test_a_whole_answer_that_is_not_read_is_given_up_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cppbatch")

    async def large(_request: web.Request) -> web.Response:
        return web.Response(body=bytes(32 << 20))

    app = web.Application()
    app.router.add_post("/v1/completions", large)
    async with listening(app, idle_timeout=0.3) as listener:
        reader, writer = await deaf(listener, {})
        await until(lambda: "it did not read its response" in caplog.text)
        assert len(await ended(reader)) < 16 << 20
        writer.close()


async def test_a_client_that_leaves_just_before_a_write_is_not_an_error(
    engine: HeldEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async def write_to_lost_connection(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        assert request.transport
        request.transport.abort()
        await response.write(b"x")
        raise AssertionError("written")

    app = create_app(engine)
    app.router.add_get("/lost", write_to_lost_connection)
    async with listening(app) as listener:
        reader, writer = await connect(listener)
        writer.write(head("GET", "/lost"))
        await ended(reader)
        assert await is_served(listener)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_client_that_reads_slowly_gets_all_of_it(tiny_llama: Path) -> None:
    async with (
        LocalEngine(tiny_llama, n_ctx=4096, n_parallel=4, n_threads=1) as engine,
        listening(create_app(engine), idle_timeout=0.5) as listener,
    ):
        body = {"prompt": "Hello", "max_tokens": 300, "ignore_eos": True, "logprobs": 20, "stream": True}
        reader, writer = await deaf(listener, body)
        came = b""
        while b"[DONE]" not in came[-100:]:
            data = await asyncio.wait_for(reader.read(16384), 30)
            assert data, "it was cut off"
            came += data
            await asyncio.sleep(0.005)
        events = [line for line in came.split(b"\n") if b"data: {" in line]
        assert json.loads(events[-1].split(b"data: ", 1)[1])["choices"][0]["finish_reason"] == "length"
        writer.close()


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost".split()
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(cert), "-keyout", str(key)]
    subprocess.run([*command, *names], check=True, capture_output=True)
    return cert, key


async def test_with_a_certificate_it_speaks_https(engine: HeldEngine, tmp_path: Path) -> None:
    engine.go_on.set()
    cert, key = certificate(tmp_path, "server")
    tls = tls_context(str(cert), str(key))
    async with listening(create_app(engine), tls=tls, head_timeout=0.5) as listener:
        assert listener.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(cert))
        async with aiohttp.ClientSession() as http:
            for body in (HELLO, {**HELLO, "stream": True}):
                async with http.post(f"{listener.url}/v1/completions", json=body, ssl=trusting) as answer:
                    assert answer.status == 200
                    assert "finish_reason" in await answer.text()
        reader, writer = await connect(listener)  # silent before the handshake
        assert await ended(reader) == b""
        writer.close()


def test_bad_certificates_are_errors_that_say_why(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "one")
    _, other = certificate(tmp_path, "two")
    (tmp_path / "text").write_text("no certificate")
    locked = tmp_path / "locked.key"
    command = ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", str(key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    for files, reason in (
        ((cert, other), "does not match"),
        ((cert, tmp_path / "none"), "No such file"),
        ((tmp_path / "text", None), "text"),
        ((cert, None), "one.pem"),  # without its key
        ((cert, locked), "locked.key"),
        ((None, key), "--ssl-keyfile"),
    ):
        with pytest.raises(ConfigError, match=reason) as error:
            tls_context(*(str(file) if file else None for file in files))
        print(error.value)
    assert tls_context(None, None) is None


async def test_an_address_of_another_machine_is_not_blamed_on_the_port() -> None:
    with pytest.raises(ConfigError, match="Set --host to an address of this machine"):
        await listener_module.listen(web.Application(), Address(hosts=("192.0.2.1",)), max_open=1, idle_timeout=1)
