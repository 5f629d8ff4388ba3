"""The addresses of RPC workers, and checks whether one answers: plain sockets, without llama.cpp.

An RPC worker (`cppbatch rpc-worker`, or llama.cpp's `rpc-server`) serves one connection at a time. The kernel accepts
further connections, which then wait.
"""

from __future__ import annotations

import re
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cppbatch.errors import ConfigError, RpcUnreachable
from cppbatch.retries import Pauses

PROTOCOL = "7.0.0"
"""The pinned llama.cpp's. Its client accepts other patch versions, although they number operations differently."""

DEFAULT_PORT = 50052
ANSWER_S = 5.0
"""A free worker answers at once; this allows for a slow network."""

_SILENCE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}
"""Seconds without traffic, seconds between probes, unanswered probes; ms without an acknowledgement."""

_HOST = re.compile(r"[A-Za-z0-9._-]+")
_HELLO = 14
_CAPABILITIES = 24  # bytes: none, so TCP
_REQUEST = struct.pack("<BQ", _HELLO, _CAPABILITIES) + bytes(_CAPABILITIES)
_ANSWER_BYTES = 4 + _CAPABILITIES
_PAUSES = Pauses(0.1, 2.0)


class Endpoint(NamedTuple):
    """Where a worker listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """The address in `HOST:PORT`. Raises `ConfigError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not _HOST.fullmatch(host):
        raise ConfigError(f"--rpc: {text!r} is not HOST:PORT, where HOST is a name or an IPv4 address")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ConfigError(f"--rpc: the port in {text!r} must be a number from 1 to 65535")
    return Endpoint(host, int(port))


def end_when_silent(connection: socket.socket) -> None:
    """Makes the system close a connection whose peer machine has not answered for 11 s.

    A peer that answers may compute for any length of time. On Linux, connections accepted by a listening socket inherit
    this. Options that the system lacks are skipped.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SILENCE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def check_worker(endpoint: Endpoint, seconds: float = ANSWER_S) -> None:
    """Raises `RpcUnreachable` if no RPC worker answers now, `ConfigError` if the listening program never will."""
    try:
        version = _ask_version(endpoint, seconds)
    except TimeoutError:
        raise RpcUnreachable(
            f"the RPC worker at {endpoint} did not answer within {seconds:g} s. A worker serves one engine at a time; "
            "it may be in use by another engine"
        ) from None
    except EOFError:  # from an SSH tunnel, if nothing listens at its other end
        raise RpcUnreachable(
            f"the connection to {endpoint} was closed by the other side: it may be a tunnel without an RPC worker at "
            "its end, or a worker of another version"
        ) from None
    except OSError as error:
        why = f"cannot connect to an RPC worker at {endpoint} ({error.strerror or error})"
        raise RpcUnreachable(f"{why}: start `cppbatch rpc-worker` there") from error
    if version != PROTOCOL:
        found = (
            f"speaks version {version} of llama.cpp's RPC"
            if version
            else ("is not an RPC worker, or has another version")
        )
        raise ConfigError(
            f"the program at {endpoint} {found}; this cppbatch requires {PROTOCOL}: install the same cppbatch version "
            "on both machines"
        )


def wait_for_workers(
    endpoints: Sequence[Endpoint],
    seconds: float,
    report: Callable[[str], object],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
    check: Callable[[Endpoint], None] = check_worker,
) -> None:
    """Waits up to `seconds` until all workers answer. Reports which one is missing, at once and then every 10 s.

    Raises as `check_worker`.
    """
    began = reported = clock()
    for endpoint in endpoints:
        for pause in _PAUSES:
            try:
                check(endpoint)
                break
            except RpcUnreachable as error:
                now = clock()
                if now - began >= seconds:
                    raise
                if pause == _PAUSES.first_s or now - reported >= 10.0:
                    report(f"waiting for up to {seconds:g} s: {error}")
                    reported = now
            sleep(pause)


def _ask_version(endpoint: Endpoint, seconds: float) -> str:
    """The protocol version in its answer to a hello; "" if the answer is not valid."""
    try:
        connection = socket.create_connection(endpoint, seconds)
    except TimeoutError:
        raise ConnectionError(f"no answer within {seconds:g} s") from None
    with connection:
        connection.sendall(_REQUEST)
        (size,) = struct.unpack("<Q", _read(connection, 8))
        return "{}.{}.{}".format(*_read(connection, size)) if size == _ANSWER_BYTES else ""


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
