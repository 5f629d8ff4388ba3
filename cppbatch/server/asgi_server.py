"""The server as an ASGI application, for hosts such as Ray Serve.

The server is an aiohttp application, which speaks HTTP and not ASGI. So it listens on a Unix socket that only this user
can open, and each ASGI request is forwarded to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, MutableMapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from cppbatch.cluster.engines.client import EngineClient
from cppbatch.server.api.batches.handler import URLS
from cppbatch.server.app import create_app
from cppbatch.server.settings import ServerSettings
from cppbatch.server.storage import open_storage

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# hop-by-hop headers: they apply to only one of the two connections
_HOP_BY_HOP = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade"}


class AsgiServer:
    """An ASGI application. The server runs from the lifespan's startup to its shutdown."""

    def __init__(
        self,
        start_engine: Callable[[], EngineClient],
        settings: ServerSettings,
        *,
        without_headers: Collection[bytes] = (b"date", b"server"),
    ) -> None:
        """`start_engine` is called in the event loop at startup; the engine is closed at shutdown. `without_headers`:
        response headers that the host adds itself, in lower case."""
        self._start_engine, self._settings, self._without = start_engine, settings, without_headers

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handles one HTTP request, or the lifespan."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:  # there are no WebSocket routes
            await send({"type": "websocket.close", "code": 1000})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with contextlib.AsyncExitStack() as stack:
            try:
                await self._start(stack)
            except Exception as error:
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                raise
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cppbatch-"))  # readable by this user only
        socket = str(Path(folder) / "http")
        engine = self._start_engine()
        stack.push_async_callback(engine.close)
        storage = open_storage(self._settings.data_dir, URLS)
        runner = web.AppRunner(
            create_app(engine, self._settings, storage),
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            shutdown_timeout=2,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.UnixSite(runner, socket).start()
        self._session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(socket, limit=0),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None),
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        )

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        """Forwards the request. If the client disconnects, the forwarded request is cancelled too."""
        first = await receive()
        is_read = asyncio.Event()
        body = _body(first, receive, is_read) if first.get("body") or first.get("more_body") else None
        if body is None:
            is_read.set()
        answering = asyncio.ensure_future(self._pass_on(scope, body, send))
        leaving = asyncio.ensure_future(_disconnected(receive, is_read))
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _pass_on(self, scope: Message, body: AsyncIterator[bytes] | None, send: Send) -> None:
        raw_path = (scope.get("raw_path") or scope["path"].encode()).decode("ascii", "replace").partition("?")[0]
        path = raw_path.removeprefix(scope.get("root_path", "")) or "/"
        query = scope["query_string"].decode("ascii", "replace")
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in _end_to_end(scope["headers"])]
        async with self._session.request(
            scope["method"],
            URL(f"http://localhost{path}{'?' if query else ''}{query}", encoded=True),
            headers=headers,
            data=body,
            allow_redirects=False,
        ) as response:
            headers_of_answer = [(name.lower(), value) for name, value in _end_to_end(response.raw_headers)]
            answered = [header for header in headers_of_answer if header[0] not in self._without]
            await send({"type": "http.response.start", "status": response.status, "headers": answered})
            async for part in response.content.iter_any():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _end_to_end(headers: Any) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]


async def _body(message: Message, receive: Receive, is_read: asyncio.Event) -> AsyncIterator[bytes]:
    """The body of a request, from its first message on."""
    while message["type"] == "http.request":
        if part := message.get("body"):
            yield part
        if not message.get("more_body"):
            is_read.set()
            return
        message = await receive()
    raise ConnectionResetError("the client has disconnected")


async def _disconnected(receive: Receive, is_read: asyncio.Event) -> None:
    await is_read.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
