"""The application on a real port, and clients that violate the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from aiohttp import web

from cppbatch import GenerationEvent, GenerationRequest, LocalEngine
from cppbatch.server.address import Address
from cppbatch.server.listener import Listener, listen

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HeldEngine(LocalEngine):
    """Begins no request before `go_on` is set. `is_held`: whether it starts like this."""

    def __init__(self, *args: Any, is_held: bool = True, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.go_on = asyncio.Event()
        if not is_held:
            self.go_on.set()
        self.n_held = 0

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.n_held += 1
        try:
            await self.go_on.wait()
        finally:
            self.n_held -= 1
        async with contextlib.aclosing(super().submit(request)) as events:
            async for event in events:
                yield event


@contextlib.asynccontextmanager
async def listening(
    app: web.Application,
    *,
    most: int = 1000,
    idle_timeout: float = 60,
    head_timeout: float = 20,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Listener]:
    address = Address(port=0, tls=tls)
    async with await listen(
        app, address, max_open=most, idle_timeout=idle_timeout, head_timeout=head_timeout
    ) as listener:
        yield listener


async def connect(listener: Listener, **options: Any) -> Streams:
    host, port = listener.url.split("://")[1].split(":")
    return await asyncio.open_connection(host, int(port), **options)


def head(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def post_bytes(path: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    return head("POST", path, f"Content-Length: {len(data)}") + data


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


async def ended(reader: asyncio.StreamReader, seconds: float = 15) -> bytes:
    """The bytes that came before the server closed the connection; it must, sooner than with its default timeouts."""
    came = bytearray()

    async def read() -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                came.extend(data)

    await asyncio.wait_for(read(), seconds)
    return bytes(came)
