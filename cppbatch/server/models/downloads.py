"""Downloads of models that a server with several models has not got yet: each starts with its first use."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable

from cppbatch.errors import CppBatchError, ModelLoadFailed

log = logging.getLogger("cppbatch.models")


class Downloads:
    """Must be created in a running event loop."""

    def __init__(self, fetch: Callable[[str], object], use: Callable[[], Awaitable[None]]) -> None:
        """`fetch`: downloads the files of a model; runs on another thread. `use`: called when they are there. Both
        raise `CppBatchError`."""
        self._fetch, self._use = fetch, use
        self._running: dict[str, asyncio.Task[None]] = {}
        self.errors: dict[str, str] = {}
        """Why the last download of a model failed."""

    def __contains__(self, name: str) -> bool:
        """Whether this model is being downloaded."""
        return name in self._running

    def start(self, name: str) -> asyncio.Task[None]:
        """The running download of a model, which raises `ModelLoadFailed`; nothing needs to wait for it."""
        if name not in self._running:
            task = self._running[name] = asyncio.ensure_future(self._run(name))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._running[name]

    async def _run(self, name: str) -> None:
        log.info("downloading %s: it is used for the first time", name)
        self.errors.pop(name, None)
        try:
            await _on_a_thread(self._fetch, name)
            await self._use()
        except (CppBatchError, OSError) as error:
            self.errors[name] = str(error)
            log.error("%s could not be downloaded: %s. The next request retries", name, error)
            text = f"model {name!r} could not be downloaded: {error}"
            raise ModelLoadFailed(text, retry_after=1.0) from error
        finally:
            del self._running[name]

    def close(self) -> None:
        """Stops waiting for them. The process may end meanwhile: a later download continues."""
        for task in self._running.values():
            task.cancel()


async def _on_a_thread(function: Callable[[str], object], name: str) -> None:
    """Runs `function` on a thread that does not keep the process alive."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function(name)
        except BaseException as error:  # raised below
            errors.append(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="cppbatch-download", daemon=True).start()
    await done.wait()
    for error in errors:
        raise error
