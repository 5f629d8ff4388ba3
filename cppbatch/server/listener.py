"""The listening socket: address, TLS, and aiohttp's settings for connections."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web
from yarl import URL

from cppbatch.server.address import Address, cannot_listen
from cppbatch.server.http.connections import HEAD_SECONDS, Connection, Connections

_KEEPALIVE_SECONDS = 75  # between requests; longer than proxies usually keep idle connections
_LINGER_SECONDS = 2  # keep reading after an early refusal, so that the client receives it
_MAX_HEADER_BYTES = 8190  # bytes of one header; a request may have 128
_SHUTDOWN_SECONDS = 2  # for the last responses to be sent


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
        auto_decompress=False,  # 0.3 MB may expand to 300 MB, so `limits_middleware` refuses compressed bodies
        keepalive_timeout=_KEEPALIVE_SECONDS,
        lingering_time=_LINGER_SECONDS,
        max_line_size=_MAX_HEADER_BYTES,
        max_field_size=_MAX_HEADER_BYTES,
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
            "backlog": 128,  # asyncio accepts all at once, and they must not use up the file descriptors
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
