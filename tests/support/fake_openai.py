"""A server with OpenAI's API and no model: sends up to max_tokens words at set times, and fails on request."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web


class FakeOpenAI:
    """`app` is the application. All attributes may be set before the first request."""

    def __init__(self, **settings: Any) -> None:
        self.model = "fake"
        self.api_key: str | None = None
        self.first_after = 0.0
        """Seconds."""
        self.between = 0.0
        """Seconds."""
        self.has_chat = False
        """Whether it has /v1/chat/completions."""
        self.has_usage = True
        self.tokens_told: int | None = None
        """The number in its usage; None: the actual number."""
        self.known_fields: set[str] | None = None
        """Others are refused; None: all are known."""
        self.faults: dict[int, str] = {}
        """The fault, by the number of the completion."""
        self.requests_per_connection = 10**9
        """It then closes the connection at the next request."""
        for name, value in settings.items():
            setattr(self, name, value)
        self.bodies: list[dict[str, Any]] = []
        self.n_running = self.most_running = 0
        self._uses: dict[Any, int] = {}

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        if self.has_chat:
            app.router.add_post("/v1/chat/completions", self._complete)
        return app

    def _may(self, request: web.Request) -> bool:
        return self.api_key is None or request.headers.get("Authorization") == f"Bearer {self.api_key}"

    async def _models(self, request: web.Request) -> web.Response:
        if not self._may(request):
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": self.model}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self._uses[request.transport] = self._uses.get(request.transport, 0) + 1
        if self._uses[request.transport] > self.requests_per_connection:
            assert request.transport
            request.transport.close()
            return web.Response()
        self.bodies.append(body := await request.json())
        if body["model"] != self.model:
            return web.json_response({"error": {"message": f"no such model: {body['model']}"}}, status=404)
        if self.known_fields is not None and (unknown := sorted(set(body) - self.known_fields)):
            return web.json_response({"error": {"message": f"unknown argument: {unknown[0]}"}}, status=400)
        self.n_running += 1
        self.most_running = max(self.most_running, self.n_running)
        try:
            return await self._stream(request, body, self.faults.get(len(self.bodies) - 1, ""))
        finally:
            self.n_running -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any], fault: str) -> web.StreamResponse:
        if fault == "HTTP 500":
            return web.json_response({"error": {"message": "out of luck"}}, status=500)
        if fault == "no stream":
            return web.json_response({"choices": [{"text": "all at once"}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(self.first_after)
        if fault == "timeout":
            await asyncio.sleep(30)
        for i in range(0 if fault == "empty answer" else body["max_tokens"]):
            piece = {"delta": {"content": "word "}} if "messages" in body else {"text": "word "}
            await self._send(response, {"choices": [{"index": 0, **piece, "finish_reason": None}]})
            if i == 1 and fault == "connection closed":
                assert request.transport
                request.transport.close()
                return response
            if i == 1 and fault == "stream cut short":
                return response
            if i == 1 and fault == "error in the stream":
                await self._send(response, {"error": {"message": "the engine broke"}})
            if i == 1 and fault == "unreadable answer":
                await response.write(b"data: {broken\n\n")
            await asyncio.sleep(self.between)
        await self._send(response, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if self.has_usage:
            n_told = body["max_tokens"] if self.tokens_told is None else self.tokens_told
            prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
            usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": n_told}
            await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, chunk: object) -> None:
        await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")


@contextlib.contextmanager
def on_a_thread(app: web.Application) -> Iterator[str]:
    """Serves it, for clients with their own event loop, or none. Returns its URL."""
    ready, stop, url = threading.Event(), asyncio.Event(), ""
    loop: asyncio.AbstractEventLoop | None = None

    async def serve() -> None:
        nonlocal loop, url
        loop = asyncio.get_running_loop()
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(10)
    assert loop
    yield url
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
