"""Runs `cppbatch serve`: listen, load the model, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web
from yarl import URL

from cppbatch.server.admission import IN_FLIGHT
from cppbatch.server.api.batches.handler import URLS
from cppbatch.server.app import create_app
from cppbatch.server.http.connections import HEAD_SECONDS, Connection, Connections, max_connections
from cppbatch.server.models.served import ServedModels
from cppbatch.server.process import IMMEDIATE_EXIT_CODE, ShowLoading, hide_loading, set_on_signals
from cppbatch.server.settings import Address, ServerSettings, cannot_listen
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


# --- listener --------------------------------------------------------------------------------------------------------
# The listening socket: address, TLS, and aiohttp's settings for connections.


_KEEPALIVE_SECONDS = 75  # between requests; longer than proxies usually keep idle connections
_LINGER_SECONDS = 2  # keep reading after an early refusal, so that the client receives it
_MAX_HEADER = 8190  # bytes of one header; a request may have 128
_SHUTDOWN_SECONDS = 2  # for the last responses to be sent
_BACKLOG = 128  # asyncio accepts this many at once, and they must not use up the file descriptors


def _make_request(make: Callable[..., web.BaseRequest], prefix: str, message: Any, *others: Any) -> web.BaseRequest:
    """A request without the prefix (--api-prefix) in its path; elsewhere it gets a path that is never served."""
    path = message.path
    inside = path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in ("", "/", "?")
    stripped = path[len(prefix) :] if inside else f"/-{path}"
    stripped = stripped if stripped.startswith("/") else f"/{stripped}"
    return make(message._replace(path=stripped, url=URL(stripped, encoded=True)), *others)


class Listener:
    """A listening server. `async with` closes it."""

    def __init__(
        self, runner: web.AppRunner, servers: list[asyncio.Server], watch: asyncio.Task[None], address: Address
    ) -> None:
        self._runner, self._servers, self._watch = runner, servers, watch
        self._tls, self._prefix = address.tls is not None, address.prefix

    @property
    def url(self) -> str:
        """The server's URL, with the first of its addresses."""
        return self.urls[0]

    @property
    def urls(self) -> list[str]:
        """The server's URLs, one per entry of `Address.hosts`."""
        return [self._url(server.sockets[0].getsockname()) for server in self._servers]

    def _url(self, address: str | tuple[Any, ...]) -> str:
        if isinstance(address, str):
            return f"--unix-socket {address} http://localhost{self._prefix}"  # for curl
        host, port = address[:2]
        return f"{'https' if self._tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}{self._prefix}"

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach it."""
        addresses = [each.getsockname() for server in self._servers for each in server.sockets]
        hosts = [address[0] for address in addresses if not isinstance(address, str)]
        return all(ipaddress.ip_address(host.partition("%")[0]).is_loopback for host in hosts)

    async def close(self) -> None:
        """Closes every connection, after a short time for pending responses."""
        for server in self._servers:
            server.close()
        await self._runner.cleanup()
        self._watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watch

    async def __aenter__(self) -> Listener:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def listen(
    app: web.Application, address: Address, *, max_open: int, idle_timeout: float, head_timeout: float = HEAD_SECONDS
) -> Listener:
    """Serves the application, with at most `max_open` connections. Raises `ConfigError` if an address is in use."""
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a closed connection cancels its request, streamed or not
        access_log=None,  # server/app.py has one
        auto_decompress=False,  # 0.3 MB may expand to 300 MB, so `admission_middleware` refuses compressed bodies
        keepalive_timeout=_KEEPALIVE_SECONDS,
        lingering_time=_LINGER_SECONDS,
        max_line_size=_MAX_HEADER,
        max_field_size=_MAX_HEADER,
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    await runner.setup()
    http = runner.server
    assert http is not None  # set up
    if address.prefix:
        http.request_factory = partial(_make_request, http.request_factory, address.prefix)
    connections = Connections(max_open, idle_timeout=idle_timeout, head_timeout=head_timeout)
    servers: list[asyncio.Server] = []
    port = address.port
    for host in dict.fromkeys(address.hosts):
        options: dict[str, Any] = {
            "ssl": address.tls,
            "ssl_handshake_timeout": head_timeout if address.tls else None,
            "backlog": _BACKLOG,
        }
        loop = asyncio.get_running_loop()
        try:
            if host.endswith(".sock"):  # as in llama-server
                server = await loop.create_unix_server(lambda: Connection(connections, http()), host, **options)
                servers.append(server)
                continue
            options["reuse_port"] = address.reuse_port or None
            server = await loop.create_server(lambda: Connection(connections, http()), host, port, **options)
        except (OSError, OverflowError) as error:
            for listening in servers:
                listening.close()
            await runner.cleanup()
            raise cannot_listen(host, port, error) from error
        servers.append(server)
        port = server.sockets[0].getsockname()[1]  # with --port 0 the first one is chosen
    return Listener(runner, servers, asyncio.create_task(connections.watch()), address)
