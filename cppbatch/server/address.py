"""Where a server listens: addresses and TLS."""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

import msgspec

from cppbatch.errors import ConfigError


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses to listen on."""

    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    """0: any free port."""
    tls: ssl.SSLContext | None = None
    reuse_port: bool = False
    """Whether several processes may listen on the port."""
    prefix: str = ""
    """The path before those of the server: "/api"; "": none. Requests elsewhere are answered with 404."""

    def __post_init__(self) -> None:
        if self.prefix and not _PREFIX.fullmatch(self.prefix):
            raise ConfigError(f"--api-prefix is {self.prefix!r:.80}; it must start with /, and not end with one: /api")

    def check(self) -> None:
        """Raises `ConfigError` if this machine cannot listen there now: the server listens only after it has made a
        plan for its model, which may take long."""
        for host in () if self.reuse_port else self.hosts:
            if host.endswith(".sock"):
                continue
            try:
                found = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
                for family, kind, protocol, _, place in found:
                    _bind(socket.socket(family, kind, protocol), place)
            except (OSError, OverflowError) as error:
                raise cannot_listen(host, self.port, error) from error


_OLLAMA_PORTS = {"": 11434, "http": 80, "https": 443}


def ollama_host() -> tuple[str, int] | None:
    """The host and port of $OLLAMA_HOST, as for Ollama's server, except that a missing host is 127.0.0.1; None: it is
    not set. Raises `ConfigError`."""
    if not (given := os.environ.get("OLLAMA_HOST", "").strip()):
        return None
    scheme, _, rest = given.rpartition("://")
    try:
        place = urlsplit(f"//{rest}")
        port = _OLLAMA_PORTS[scheme.lower()] if place.port is None else place.port
    except (KeyError, ValueError):
        form = "it must be HOST, HOST:PORT, :PORT or http://HOST:PORT, with an IPv6 address in brackets"
        raise ConfigError(f"OLLAMA_HOST is {given!r:.100}; {form}") from None
    return place.hostname or "127.0.0.1", port


def _bind(connection: socket.socket, place: Any) -> None:
    """Binds and closes it, with the options of asyncio's servers."""
    with connection:
        if os.name == "posix":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if connection.family == socket.AF_INET6:
            connection.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        connection.bind(place)


def cannot_listen(host: str, port: int, error: OSError | OverflowError) -> ConfigError:
    """The error for an address on which this machine cannot listen, with the remedy."""
    reason = getattr(error, "strerror", None) or str(error)
    where, remedy = f"{host}:{port}", "Choose another --port, or stop the program that uses this one"
    # Python 3.14 gives no errno for an address of another machine.
    if isinstance(error, OSError) and (
        isinstance(error, socket.gaierror) or error.errno in (None, errno.EADDRNOTAVAIL)
    ):
        remedy = "Set --host to an address of this machine, such as 127.0.0.1, or to 0.0.0.0 for all addresses"
    elif isinstance(error, PermissionError):
        remedy = "Choose a --port of at least 1024"
    if host.endswith(".sock"):
        where, remedy = host, "Set --host to a path in a folder that exists and may be written"
    return ConfigError(f"cannot listen on {where} ({reason}). {remedy}")


_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")


def tls_context(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """The TLS context for a certificate, whose key may be in the same file; None: no TLS. Raises `ConfigError`."""
    if not certfile:
        if keyfile:
            raise ConfigError("--ssl-keyfile requires --ssl-certfile, the matching certificate")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(
            certfile, keyfile, password=""
        )  # otherwise OpenSSL asks for the password at the terminal
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = f"{certfile} and {keyfile}" if keyfile else certfile
        raise ConfigError(f"cannot use the TLS certificate in {files} ({_reason(error)})") from error
    return context


def _reason(error: Exception) -> str:
    """A readable reason; most of OpenSSL's errors have none."""
    if isinstance(error, ssl.SSLError):
        reasons = {"KEY_VALUES_MISMATCH": "the key does not match the certificate"}
        without_password = "they must be a certificate and its key in PEM format, without a password"
        return reasons.get(error.reason or "", without_password)
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
