"""Bodies in many small chunks: those of ordinary clients are read, those that consist of framing are not.

A chunk takes the time of hundreds of bytes to parse, whatever is in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
import random
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from cppbatch import LocalEngine
from cppbatch.server import listener as listener_module
from cppbatch.server.address import tls_context
from cppbatch.server.api.batches.handler import URLS
from cppbatch.server.app import create_app
from cppbatch.server.http import connections
from cppbatch.server.http.connections import Connection, Connections
from cppbatch.server.listener import Listener
from cppbatch.server.storage import open_storage
from tests.integration.test_connections import certificate
from tests.support.fixtures import engine_of
from tests.support.listening import connect, ended, head, listening

CHUNKED = "Transfer-Encoding: chunked"
FORM = "Content-Type: multipart/form-data; boundary=b"
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'

engine = engine_of(n_ctx=8192)


def chunks(data: bytes, size: int, extension: bytes = b"") -> bytes:
    parts = (data[i : i + size] for i in range(0, len(data), size))
    return b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts)


async def answer(listener: Listener, data: bytes) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer to a request."""
    reader, writer = await connect(listener)
    writer.write(data)
    first = await asyncio.wait_for(reader.readline(), 30)
    length = int((await reader.readuntil(b"\r\n\r\n")).lower().partition(b"content-length: ")[2].split()[0])
    body: dict[str, Any] = json.loads(await reader.readexactly(length))
    writer.close()
    return int(first.split()[1]), body


def completion(n_bytes: int) -> bytes:
    """A body of this number of bytes, mostly spaces."""
    body = json.dumps({"prompt": "Hello", "max_tokens": 1}).encode()
    return body.replace(b" ", b" " * (n_bytes - len(body) + 1), 1)


@pytest.mark.parametrize(
    ("n", "size"), [(2_000, 1), (10_000, 1), (2_000, 5), (50_000, 24)], ids=lambda value: f"{value}"
)
async def test_a_body_in_thousands_of_small_chunks_is_read(engine: LocalEngine, n: int, size: int) -> None:
    async with listening(create_app(engine)) as listener:
        data = head("POST", "/v1/completions", CHUNKED) + chunks(completion(n * size), size) + b"0\r\n\r\n"
        status, body = await answer(listener, data)
        assert (status, body["usage"]["completion_tokens"]) == (200, 1)


async def test_json_that_a_client_writes_piece_by_piece_is_read(engine: LocalEngine) -> None:
    """As `json.JSONEncoder().iterencode` gives it: a piece for each token of the prompt."""
    request = {"prompt": [7] * 3_000, "max_tokens": 1}

    async def pieces() -> AsyncIterator[bytes]:
        for piece in json.JSONEncoder().iterencode(request):
            yield piece.encode()

    async with (
        listening(create_app(engine)) as listener,
        aiohttp.ClientSession() as http,
        http.post(f"{listener.url}/v1/completions", data=pieces()) as response,
    ):
        assert response.status == 200
        assert (await response.json())["usage"]["prompt_tokens"] == 3_000


@pytest.fixture
def short_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_REFUSAL_SECONDS", 0.2)
    monkeypatch.setattr(listener_module, "_LINGER_SECONDS", 0.2)


def attacks() -> Iterator[Any]:
    tiny, extended = chunks(b" " * 100_000, 1), chunks(b" " * 10_000, 1, b";name=value")
    for path, *more in (("/v1/completions",), ("/v1/files", FORM)):
        start = head("POST", path, CHUNKED, *more) + chunks(FILE, 1000)
        for name, sent in (("small", tiny), ("extended", extended), ("long_extension", b"1;" + b"a" * 500_000)):
            yield pytest.param(start + sent, id=f"{name}{path}")


@pytest.mark.parametrize("sent", list(attacks()))
@pytest.mark.usefixtures("short_lingering")
async def test_a_body_that_consists_of_framing_is_refused(
    engine: LocalEngine, tmp_path: Path, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cppbatch")
    async with listening(create_app(engine, storage=open_storage(tmp_path, URLS))) as listener:
        reader, writer = await connect(listener)
        writer.write(sent)
        came = await ended(reader)  # though the client has not closed anything
        assert came.startswith(b"HTTP/1.1 400 ")
        assert b"\r\nConnection: close\r\n" in came
        assert b"very small chunks; send larger chunks, or use Content-Length" in came
        assert not list((tmp_path / "incoming").iterdir())
        assert "refused the body of 127.0.0.1" in caplog.text
        assert "Traceback" not in caplog.text
        writer.close()


@pytest.mark.usefixtures("short_lingering")
async def test_framing_is_not_parsed_where_no_body_is_read(
    engine: LocalEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that sends it to an endpoint without a body, or after a refusal, is soon disconnected."""
    caplog.set_level(logging.INFO, "cppbatch")
    async with listening(create_app(engine)) as listener:
        for i, start in enumerate(
            (head("GET", "/health", CHUNKED), head("POST", "/v1/completions", CHUNKED, "Content-Encoding: gzip"))
        ):
            reader, writer = await connect(listener)
            writer.write(start + chunks(b" " * 100_000, 1))
            assert (await reader.readline()).split()[1] == (b"200", b"400")[i]
            assert b"very small chunks" not in await ended(reader)
            assert caplog.text.count("refused the body of 127.0.0.1") == i + 1
            assert "Traceback" not in caplog.text
            writer.close()


async def test_a_refused_body_costs_no_other_request(engine: LocalEngine) -> None:
    async with listening(create_app(engine)) as listener:
        _, writer = await connect(listener)
        writer.write(head("POST", "/v1/completions", CHUNKED) + chunks(b" " * 500_000, 1))
        good = completion(100)
        request = head("POST", "/v1/completions", f"Content-Length: {len(good)}") + good
        for status, _ in await asyncio.gather(*(answer(listener, request) for _ in range(8))):
            assert status == 200
        writer.close()


class TimedHttp:
    """Stands for aiohttp's protocol: parsing takes `seconds` per byte, by the clock that it turns on."""

    _request_count = 0

    def __init__(self) -> None:
        self.now, self.seconds, self.parsed = 0.0, 0.0, b""

    def time(self) -> float:
        return self.now

    def data_received(self, data: bytes) -> None:
        self.parsed += data
        self.now += self.seconds * len(data)


async def test_parsing_takes_turns_of_half_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    http: Any = TimedHttp()
    connection = Connection(Connections(10, idle_timeout=60), http)
    monkeypatch.setattr(connection, "_loop", http)

    def receive(n: int) -> list[int]:
        """The sizes of `n` turns of a client that sends as fast as it can."""
        sizes = []
        for _ in range(n):
            buffer = connection.get_buffer(-1)
            sizes.append(len(buffer))
            buffer[:] = b"x" * len(buffer)
            connection.buffer_updated(len(buffer))
        return sizes

    http.seconds = 1e-9  # a large file
    assert receive(20)[-1] >= 1 << 18
    http.seconds = 5e-7  # chunks of one byte
    assert receive(20)[-1] * http.seconds <= 0.0005
    http.seconds = 1.0  # no request is too slow to continue
    assert receive(20)[-1] == 512
    http.seconds = 1e-9
    assert receive(20)[-1] >= 1 << 18


@pytest.mark.parametrize("over_tls", [False, True], ids=["plain", "tls"])
async def test_bodies_that_arrive_at_once_are_not_mixed_up(tmp_path: Path, over_tls: bool) -> None:
    """All connections are read into one buffer."""

    async def digest(request: web.Request) -> web.Response:
        read = hashlib.sha256()
        async for part in request.content.iter_any():
            read.update(part)
            await asyncio.sleep(0)
        return web.Response(text=read.hexdigest())

    app = web.Application()
    app.router.add_post("/", digest)
    cert, key = certificate(tmp_path, "server")
    tls = tls_context(str(cert), str(key)) if over_tls else None
    trusting = ssl.create_default_context(cafile=str(cert))

    async def send(listener: Listener, http: aiohttp.ClientSession, chance: random.Random) -> None:
        data = chance.randbytes(4 << 20)
        async with http.post(listener.url, data=io.BytesIO(data), ssl=trusting) as response:
            assert await response.text() == hashlib.sha256(data).hexdigest()

    async with listening(app, tls=tls) as listener, aiohttp.ClientSession() as http:
        await asyncio.gather(*(send(listener, http, random.Random(i)) for i in range(6)))
