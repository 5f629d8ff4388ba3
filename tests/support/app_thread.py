"""The application on a real socket, for clients without asyncio: an engine and a server on a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

from cppbatch import LocalEngine
from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.server.address import Address
from cppbatch.server.listener import listen
from tests.support.blocking_client import BlockingClient


class AppThread(BlockingClient):
    """Serves `make_app(engine)` until `stop`."""

    def __init__(self, engine_settings: dict[str, Any], make_app: Callable[[LocalEngine], web.Application]) -> None:
        self._settings, self._make_app = engine_settings, make_app
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60), "the server does not get ready"

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with LocalEngine(**self._settings) as self.engine:
            self.app = self._make_app(self.engine)
            async with await listen(self.app, Address(port=0), max_open=1000, idle_timeout=60) as listener:
                self.url = listener.url
                self._ready.set()
                await self._stop.wait()

    def stats(self) -> EngineStats:
        """The engine's counters."""
        return asyncio.run_coroutine_threadsafe(self.engine.stats(), self._loop).result(10)

    def stop(self) -> None:
        """Ends server and engine."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server does not end"
