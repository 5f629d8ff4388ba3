"""Server-sent events: how they are written, and a stream that starts while a request waits for its model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

from aiohttp import web

from cppbatch.typed_json import encode_line

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
LINES = "application/x-ndjson"
"""The content type of a stream of lines of JSON."""
PING = b": ping\n\n"
"""A comment, which clients skip."""
STARTED = web.RequestKey("started_stream", web.StreamResponse)
"""The stream whose headers a request was sent before its response was known."""


class ServerSentEvent(NamedTuple):
    """One event of a stream. `data` is sent as JSON, but a string is sent unchanged."""

    data: object
    event: str | None = None
    """The event's name; None: unnamed, as in OpenAI's completions."""

    def encode(self) -> bytes:
        """The lines of the event."""
        name = f"event: {self.event}\n".encode() if self.event else b""
        data = self.data.encode() if isinstance(self.data, str) else encode_line(self.data)
        return name + b"data: " + data + b"\n\n"

    def as_line(self) -> bytes:
        """The data as a line of JSON, in a stream of such lines."""
        return encode_line(self.data) + b"\n"


DONE = ServerSentEvent("[DONE]")
"""The last event of OpenAI's streams."""


@contextlib.asynccontextmanager
async def ping_while_waiting(request: web.Request, seconds: float) -> AsyncIterator[None]:
    """In the block, sends headers and a comment after `seconds`, and a comment after each further ones: clients and
    proxies give up when nothing arrives. 0 and less: never."""
    has_ended = asyncio.Event()

    async def ping() -> None:
        while not has_ended.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(has_ended.wait(), seconds)
                return
            if STARTED not in request:
                request[STARTED] = web.StreamResponse(headers=STREAM_HEADERS)
                await request[STARTED].prepare(request)
            await request[STARTED].write(PING)

    pings = asyncio.create_task(ping()) if seconds > 0 else None
    try:
        yield
    finally:
        has_ended.set()  # not cancelled: half a header would be left
        if pings:
            with contextlib.suppress(ConnectionResetError):  # then this request is cancelled
                await pings
