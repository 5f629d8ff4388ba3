"""The server as an ASGI application: requests, bodies, streams, errors, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest_asyncio

from cppbatch import LocalEngine
from cppbatch.server.asgi_server import AsgiServer
from cppbatch.server.settings import ServerSettings


class Client:
    """An ASGI server for one application, as uvicorn or Serve's proxy is."""

    def __init__(self, app: AsgiServer) -> None:
        self._app = app
        self._to_lifespan: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._from_lifespan: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()

    async def lifespan(self, event: str) -> str:
        if event == "startup":
            call = self._app({"type": "lifespan"}, self._to_lifespan.get, self._from_lifespan.put)
            self._task = asyncio.ensure_future(call)
        self._to_lifespan.put_nowait({"type": f"lifespan.{event}"})
        answer = await self._from_lifespan.get()
        if event == "shutdown":
            await self._task
        return str(answer["type"])

    async def ask(
        self,
        method: str,
        path: str,
        *body: bytes,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        root_path: str = "",
        host: bytes = b"example.org",
        leave_after: int | None = None,
    ) -> tuple[int, dict[bytes, bytes], list[bytes]]:
        """Sends the parts of a body; returns status, headers and the parts of the answer.

        `leave_after`: the client disconnects after this number of parts of the answer.
        """
        incoming: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        for i, part in enumerate(body or (b"",)):
            incoming.put_nowait({"type": "http.request", "body": part, "more_body": i + 1 < len(body)})
        start: MutableMapping[str, Any] = {}
        parts: list[bytes] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["body"]:
                parts.append(message["body"])
                if len(parts) == leave_after:
                    incoming.put_nowait({"type": "http.disconnect"})

        route, _, query = path.partition("?")
        scope = {
            "type": "http", "method": method, "path": root_path + route, "raw_path": (root_path + route).encode(),
            "root_path": root_path, "query_string": query.encode(), "headers": [(b"host", host), *headers],
        }  # fmt: skip
        await self._app(scope, incoming.get, send)
        assert len(dict(start["headers"])) == len(start["headers"])  # no header twice
        return start["status"], dict(start["headers"]), parts


@pytest_asyncio.fixture
async def client(tiny_llama: Path) -> AsyncIterator[Client]:
    engines: list[LocalEngine] = []

    def start() -> LocalEngine:
        engines.append(LocalEngine(tiny_llama, n_ctx=4096, n_parallel=2, spec="off"))
        return engines[0]

    client = Client(AsgiServer(start, ServerSettings(allowed_hosts=("example.org",))))
    assert await client.lifespan("startup") == "lifespan.startup.complete"
    await engines[0].loaded()
    yield client
    assert await client.lifespan("shutdown") == "lifespan.shutdown.complete"
    assert engines[0].health().status == "closed"


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "The sky", "max_tokens": 4, "ignore_eos": True, **fields}).encode()


JSON = (b"content-type", b"application/json")


async def test_a_body_in_parts_with_and_without_its_length(client: Client) -> None:
    body = completion()
    for headers in (
        (JSON,),
        (JSON, (b"content-length", str(len(body)).encode())),
        (JSON, (b"transfer-encoding", b"chunked")),
    ):
        status, answered, parts = await client.ask("POST", "/v1/completions", body[:9], b"", body[9:], headers=headers)
        assert status == 200
        assert answered[b"content-type"] == b"application/json"
        assert json.loads(b"".join(parts))["usage"]["completion_tokens"] == 4


async def test_a_stream_comes_in_parts(client: Client) -> None:
    body = completion(stream=True, max_tokens=64)
    status, headers, parts = await client.ask("POST", "/v1/completions", body, headers=(JSON,))
    assert status == 200
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert len(parts) > 4
    assert b"".join(parts).endswith(b"data: [DONE]\n\n")


async def test_errors_queries_and_prefixes_are_passed_on(client: Client) -> None:
    status, headers, parts = await client.ask("GET", "/nowhere?a=%2F", root_path="/llm")
    assert status == 404
    assert b"GET /nowhere not found" in b"".join(parts)
    assert not {b"date", b"server", b"transfer-encoding", b"connection"} & headers.keys()
    status, _, parts = await client.ask("GET", "/v1/models", root_path="/llm")
    assert status == 200
    status, _, parts = await client.ask("POST", "/v1/completions", b"{", headers=(JSON,))
    assert status == 400


async def test_a_host_that_is_not_the_servers_is_refused(client: Client) -> None:
    status, _, parts = await client.ask("GET", "/v1/models", host=b"evil.example")
    assert (status, json.loads(b"".join(parts))["error"]["code"]) == (403, "host_not_allowed")


async def test_a_client_that_disconnects_cancels_its_request(client: Client) -> None:
    body = completion(stream=True, max_tokens=3000)
    await client.ask("POST", "/v1/completions", body, headers=(JSON,), leave_after=2)
    for _ in range(100):
        _, _, parts = await client.ask("GET", "/stats")
        stats = json.loads(b"".join(parts))
        if stats["running"] == 0:
            break
        await asyncio.sleep(0.05)
    assert stats["finished"].get("cancelled") == 1


async def test_the_web_page_is_served_below_a_prefix_and_refers_to_its_files_relatively(client: Client) -> None:
    status, headers, parts = await client.ask("GET", "/", root_path="/llm")
    assert (status, headers[b"content-type"]) == (200, b"text/html; charset=utf-8")
    assert b"default-src 'none'" in headers[b"content-security-policy"]
    files = re.findall(r'(?:src|href)="([^"]+)"', b"".join(parts).decode())
    assert len(files) > 3
    for file in files:
        assert not file.startswith("/")
        assert (await client.ask("GET", f"/{file}", root_path="/llm"))[0] == 200
    etag = headers[b"etag"]
    assert (await client.ask("GET", "/", headers=((b"if-none-match", etag),)))[0] == 304
