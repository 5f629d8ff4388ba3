"""Where the server listens: the address, TLS, and what aiohttp is told about connections."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import ssl

import msgspec
from aiohttp import web

from cppbatch.errors import ConfigError
from cppbatch.server.connections import HEAD_SECONDS, Connection, Connections

_KEEPALIVE_SECONDS = 75  # between requests; longer than the usual proxy keeps its own
_LINGER_SECONDS = 2  # to read on after a refusal, so that the client gets to see it
_LONGEST_HEADER = 8190  # bytes; there may be 128 of them
_GOODBYE_SECONDS = 2  # for last answers to leave when the server goes down
_BACKLOG = 128  # asyncio accepts as many at once, and they may not use up the files


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where to listen."""

    host: str = "127.0.0.1"
    port: int = 8080
    """0: any free one."""
    tls: ssl.SSLContext | None = None


class Listener:
    """A server that listens. `async with` closes it."""

    def __init__(self, runner: web.AppRunner, server: asyncio.Server, watch: asyncio.Task[None], tls: bool) -> None:
        self._runner, self._server, self._watch, self._tls = runner, server, watch, tls

    @property
    def url(self) -> str:
        """Where to reach it."""
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{'https' if self._tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach it."""
        hosts = [socket.getsockname()[0] for socket in self._server.sockets]
        return all(ipaddress.ip_address(host.partition("%")[0]).is_loopback for host in hosts)

    async def close(self) -> None:
        """Ends every connection; answers have a moment to leave."""
        self._server.close()
        await self._runner.cleanup()
        self._watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watch

    async def __aenter__(self) -> Listener:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def listen(
    app: web.Application, address: Address, *, most: int, idle_timeout: float, head_timeout: float = HEAD_SECONDS
) -> Listener:
    """Listens for an application, with at most so many connections. Raises `ConfigError` if the address is taken."""
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that goes away cancels its request, streamed or not
        access_log=None,  # server/logs.py has its own
        auto_decompress=False,  # 0.3 MB may become 300: `admission_middleware` refuses them
        keepalive_timeout=_KEEPALIVE_SECONDS,
        lingering_time=_LINGER_SECONDS,
        max_line_size=_LONGEST_HEADER,
        max_field_size=_LONGEST_HEADER,
        shutdown_timeout=_GOODBYE_SECONDS,
    )
    await runner.setup()
    http = runner.server
    assert http is not None  # set up
    connections = Connections(most, idle_timeout=idle_timeout, head_timeout=head_timeout)
    try:
        server = await asyncio.get_running_loop().create_server(
            lambda: Connection(connections, http()),
            address.host,
            address.port,
            ssl=address.tls,
            ssl_handshake_timeout=head_timeout if address.tls else None,
            backlog=_BACKLOG,
        )
    except (OSError, OverflowError) as error:
        await runner.cleanup()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"cannot listen on {address.host}:{address.port} ({reason}). "
            "Choose another --port, or end the program that uses this one"
        ) from error
    return Listener(runner, server, asyncio.create_task(connections.watch()), address.tls is not None)


def tls_context(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """For a server with this certificate; its key may be in the same file. Raises `ConfigError`."""
    if not certfile:
        if keyfile:
            raise ConfigError("--ssl-keyfile is of no use without --ssl-certfile, the certificate that it belongs to")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certfile, keyfile, password="")  # a key with a password would ask at the terminal
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = f"{certfile} and {keyfile}" if keyfile else certfile
        raise ConfigError(f"cannot use the TLS certificate in {files} ({_reason(error)})") from error
    return context


def _reason(error: Exception) -> str:
    """OpenSSL has a reason to give for few of them."""
    if isinstance(error, ssl.SSLError):
        reasons = {"KEY_VALUES_MISMATCH": "the key does not belong to the certificate"}
        without_password = "they must be a certificate and its key without a password, as PEM"
        return reasons.get(error.reason or "", without_password)
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
