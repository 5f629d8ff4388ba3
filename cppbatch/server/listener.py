"""The listening socket: address, TLS, and aiohttp's settings for connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket

from aiohttp import web

from cppbatch.errors import ConfigError
from cppbatch.server.address import Address
from cppbatch.server.connections import HEAD_SECONDS, Connection, Connections

_KEEPALIVE_SECONDS = 75  # between requests; longer than the usual proxy keeps its own
_LINGER_SECONDS = 2  # reading goes on after an early refusal, so that the client receives it
_MAX_HEADER = 8190  # bytes of one header; a request may have 128
_SHUTDOWN_SECONDS = 2  # for the last responses to be sent
_BACKLOG = 128  # asyncio accepts this many at once, and they must not use up the file descriptors


class Listener:
    """A listening server. `async with` closes it."""

    def __init__(
        self, runner: web.AppRunner, servers: list[asyncio.Server], watch: asyncio.Task[None], tls: bool
    ) -> None:
        self._runner, self._servers, self._watch, self._tls = runner, servers, watch, tls

    @property
    def url(self) -> str:
        """The server's URL, at the first of its addresses."""
        return self.urls[0]

    @property
    def urls(self) -> list[str]:
        """Its URLs, one for each of `Address.hosts`."""
        return [self._url(*server.sockets[0].getsockname()[:2]) for server in self._servers]

    def _url(self, host: str, port: int) -> str:
        return f"{'https' if self._tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach it."""
        hosts = [each.getsockname()[0] for server in self._servers for each in server.sockets]
        return all(ipaddress.ip_address(host.partition("%")[0]).is_loopback for host in hosts)

    async def close(self) -> None:
        """Closes every connection, once responses have had a moment to be sent."""
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
        access_log=None,  # server/logs.py has one
        auto_decompress=False,  # 0.3 MB may become 300 MB, so `admission_middleware` refuses compressed bodies
        keepalive_timeout=_KEEPALIVE_SECONDS,
        lingering_time=_LINGER_SECONDS,
        max_line_size=_MAX_HEADER,
        max_field_size=_MAX_HEADER,
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    await runner.setup()
    http = runner.server
    assert http is not None  # set up
    connections = Connections(max_open, idle_timeout=idle_timeout, head_timeout=head_timeout)
    servers: list[asyncio.Server] = []
    port = address.port
    for host in dict.fromkeys(address.hosts):
        try:
            server = await asyncio.get_running_loop().create_server(
                lambda: Connection(connections, http()),
                host,
                port,
                ssl=address.tls,
                ssl_handshake_timeout=head_timeout if address.tls else None,
                backlog=_BACKLOG,
            )
        except (OSError, OverflowError) as error:
            for listening in servers:
                listening.close()
            await runner.cleanup()
            reason = error.strerror if isinstance(error, OSError) else str(error)
            remedy = "Choose another --port, or stop the program that uses this one"
            if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
                remedy = "Set --host to an address of this machine, such as 127.0.0.1, or to 0.0.0.0 for all addresses"
            elif isinstance(error, PermissionError):
                remedy = "Choose a --port of at least 1024"
            raise ConfigError(f"cannot listen on {host}:{port} ({reason}). {remedy}") from error
        servers.append(server)
        port = server.sockets[0].getsockname()[1]  # with --port 0 the first one is chosen
    return Listener(runner, servers, asyncio.create_task(connections.watch()), address.tls is not None)
