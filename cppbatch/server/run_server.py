"""Runs `cppbatch serve`: listen, load the model, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import threading
from collections.abc import Callable
from functools import partial

from aiohttp import web

from cppbatch.server.address import Address
from cppbatch.server.api.batches.handler import URLS
from cppbatch.server.app import create_app
from cppbatch.server.http.connections import max_connections
from cppbatch.server.listener import Listener, listen
from cppbatch.server.models.served import ServedModels
from cppbatch.server.process import IMMEDIATE_EXIT_CODE, ShowLoading, hide_loading, set_on_signals
from cppbatch.server.request_checks import IN_FLIGHT
from cppbatch.server.settings import ServerSettings
from cppbatch.server.storage import open_storage

log = logging.getLogger("cppbatch.server")

Say = Callable[[str], None]


async def run_server(
    start_models: Callable[[], ServedModels],
    settings: ServerSettings,
    address: Address,
    *,
    say: Say,
    find_advice: Callable[[], str | None],
    show_loading: ShowLoading = hide_loading,
) -> None:
    """Serves until SIGINT or SIGTERM, then finishes the running requests. A second signal ends the process at once.

    `start_models` is called in the event loop. The server listens while a model loads (`/health` shows the progress)
    and while it drains. `say` prints a line for the user at the terminal. `find_advice` runs on a thread meanwhile, so
    that startup does not wait for timing kernels or reading the file; its result is printed once the server is ready.
    `show_loading` shows the progress until then. Raises `ConfigError` if the address is in use, and the errors of
    loading the model.
    """
    stop = asyncio.Event()
    set_on_signals(stop)
    storage = open_storage(settings.data_dir, URLS)
    models = start_models()
    app = create_app(models, storage=storage)
    try:
        listener = await _listen(app, settings, address)
    except BaseException:
        await models.close()
        raise
    if storage.error:
        log.warning("this server does not store files: %s. Alternatively, use another --data-dir", storage.error)
    async with listener:
        advice = _on_daemon_thread(find_advice)
        try:
            await _wait_until_loaded(models, stop, show_loading)
            gc.freeze()  # existing objects are permanent, so garbage collection need not visit them
            for line in models.first_lines(listener.urls):
                say(line)
            advice.add_done_callback(partial(_say_advice, say))
            await stop.wait()
            await storage.stop()  # unfinished batches continue after the next start
            await _drain(app, settings.drain_timeout, say)
        finally:
            await models.close()  # before the connections, so that requests still running get an error


async def _listen(app: web.Application, settings: ServerSettings, address: Address) -> Listener:
    idle_timeout = settings.limits.idle_timeout
    listener = await listen(app, address, max_open=max_connections(), idle_timeout=idle_timeout)
    if not (listener.is_private or settings.keys):
        log.warning(
            "%s accepts requests from anyone who can reach it: set an --api-key, or listen on 127.0.0.1",
            " and ".join(listener.urls),
        )
    return listener


async def _wait_until_loaded(models: ServedModels, stop: asyncio.Event, show_loading: ShowLoading) -> None:
    """Waits for the model. A signal during loading ends the process: there are no requests to finish."""
    loading, stopping = asyncio.ensure_future(models.ready()), asyncio.ensure_future(stop.wait())
    with show_loading(lambda: models.health().progress):
        await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        os._exit(IMMEDIATE_EXIT_CODE)  # a normal exit would wait for the loading thread, which is inside llama.cpp
    stopping.cancel()
    loading.result()


def _on_daemon_thread(find_advice: Callable[[], str | None]) -> asyncio.Future[str | None]:
    """Runs `find_advice`. Unlike with `asyncio.to_thread`, the process does not wait for it at exit."""
    loop = asyncio.get_running_loop()
    advice: asyncio.Future[str | None] = loop.create_future()

    def run() -> None:
        try:
            found = partial(advice.set_result, find_advice())
        except Exception as error:
            found = partial(advice.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(found)

    threading.Thread(target=run, name="cppbatch-advice", daemon=True).start()
    return advice


def _say_advice(say: Say, advice: asyncio.Future[str | None]) -> None:
    if not advice.cancelled() and (line := advice.result()):
        say(f"hint: {line}")


async def _drain(app: web.Application, seconds: float, say: Say) -> None:
    """Accepts no new requests, and waits up to `seconds` for the running ones."""
    in_flight = app[IN_FLIGHT]
    if in_flight.n:
        say(f"finishing {in_flight.n} request(s), for at most {seconds:g} s; press Ctrl-C again to stop immediately")
    if left := await in_flight.drain(seconds):
        say(f"aborted {left} request(s) that did not finish within {seconds:g} s (--drain-timeout)")
