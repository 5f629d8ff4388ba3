"""The server's settings, and the addresses where it listens; the engine's settings are in `cppbatch.config`."""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from cppbatch.engine.params import SamplingParams
from cppbatch.errors import ConfigError, InvalidRequest
from cppbatch.server.auth.rules import Keys
from cppbatch.server.http.hosts import ANY_ORIGIN, LOCAL, HostNames, MediaDomains, check_origin
from cppbatch.server.http.limits import Limits
from cppbatch.server.video import VideoSettings

_MAX_DRAIN = 86400
MOST_NORM = 100
"""The highest order of a norm of embeddings: a higher one is as good as the largest number."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Raises `ConfigError` for values out of range, naming the flag."""

    keys: Keys = Keys()
    """The valid API keys; empty: no key is required."""
    limits: Limits = Limits()
    cors_origins: tuple[str, ...] | None = None
    """The origins whose web pages may use the server, and special values (`cors`). None: the default."""
    cors_methods: str = "GET, POST, DELETE, OPTIONS"
    """The methods that these pages may use."""
    cors_headers: str = "*"
    """The request headers that they may send; *: any."""
    cors_credentials: bool = True
    """Whether they may send cookies and the like; always with * as origin, as in llama-server."""
    allowed_hosts: tuple[str, ...] = ()
    """Additional host names under which clients may reach the server (`HostNames`)."""
    own_names: tuple[str, ...] = ()
    """The server's own host names (`cross_site.names_of`)."""
    aliases: tuple[str, ...] = ()
    """Names of the model. Responses show the alphabetically first one instead of the file name, as in
    llama-server."""
    tags: tuple[str, ...] = ()
    """Tags of the model, shown in `/v1/models` only."""
    metrics: bool = True
    """Whether `/metrics` is served."""
    webui: bool = True
    """Whether the web page is served."""
    static_path: Path | None = None
    """A folder of files that is served in place of the web page."""
    prompts_dir: Path | None = None
    """A folder to which each prompt is written, for debugging; None: none is."""
    slots: bool = True
    """Whether `/slots` is served."""
    slot_save_path: Path | None = None
    """The folder for slot files; None: slots cannot be saved, restored or erased."""
    allowed_media_domains: tuple[str, ...] = ()
    """The hosts from which images and audio may be fetched (`MediaDomains`); empty: none."""
    media_path: Path | None = None
    """The folder of images and audio that requests may reference as file:// URLs; None: no such URLs."""
    video: VideoSettings = VideoSettings()
    """How videos are read."""
    predict_path: str | None = None
    """The path of Vertex AI's predictions; None: not served."""
    props: bool = False
    """Whether `POST /props` is answered."""
    strict_model: bool = False
    """Refuse requests that name another model."""
    drain_timeout: float = 30
    """Seconds for running requests to finish when the server shuts down."""
    chat_template: str | None = None
    """The text of a chat template; None: the model's own."""

    system: str | None = None
    """The system message of conversations without one; None: none."""
    template_variables: dict[str, Any] = {}
    """Chat template variables for requests that do not set them (--chat-template-kwargs, --reasoning)."""
    thinking_tokens: int | None = None
    """Maximum reasoning tokens for chats that set no limit (--reasoning-budget); None: no limit."""
    parse_special: bool = False
    """Read the texts of control tokens in messages and tools as control tokens, for requests that do not say."""
    thinking_message: str = ""
    """Text before the end of reasoning whose limit is reached."""
    reasoning_format: str = "auto"
    """none: reasoning is part of the content, with its tags."""
    skip_chat_parsing: bool = False
    """Return the whole text as content, with reasoning and tool calls."""
    prefill_assistant: bool = True
    """Continue a last message of the assistant, for requests that do not say."""
    spm_infill: bool = False
    """Put the suffix before the prefix in prompts of /infill."""
    embd_normalize: int = 2
    """The norm of vectors: -1 as computed, 0 the largest number is 32,760, 2 the length is 1."""
    sampling_defaults: dict[str, Any] = {}
    """Fields of `SamplingParams` for requests that do not set them (--temp, -n ...)."""

    sse_ping_interval: int = 30
    """Seconds of silence after which a stream sends a ping; -1: never."""
    data_dir: Path | None = None
    """The folder for files and batches; None: the user's data folder, if it is usable."""

    def __post_init__(self) -> None:
        MediaDomains(self.allowed_media_domains)  # checks them
        HostNames(self.allowed_hosts, "--allowed-hosts")
        for origin in self.origins:
            check_origin(origin)
        if not 0 <= self.drain_timeout <= _MAX_DRAIN:
            raise ConfigError(f"--drain-timeout is {self.drain_timeout}; it must be from 0 to {_MAX_DRAIN} seconds")
        if not -1 <= self.embd_normalize <= MOST_NORM:
            raise ConfigError(
                f"--embd-normalize is {self.embd_normalize}; it must be from -1 (as computed) to {MOST_NORM}"
            )
        try:
            SamplingParams(**self.sampling_defaults)
        except InvalidRequest as error:
            raise ConfigError(f"the server's default of {error.field} {error.message}") from error

    @property
    def media_domains(self) -> MediaDomains:
        """`allowed_media_domains`, validated."""
        return MediaDomains(self.allowed_media_domains)

    @property
    def host_names(self) -> HostNames | None:
        """The host names that requests may give. None: any, because a key is required, which a page using DNS rebinding
        does not know."""
        if self.keys and not self.allowed_hosts:
            return None
        return HostNames([*self.allowed_hosts, *self.own_names], "--allowed-hosts")

    @property
    def origins(self) -> tuple[str, ...]:
        """`cors_origins`, or the default: all if a key is required, otherwise only pages of this machine."""
        if self.cors_origins is not None:
            return self.cors_origins
        return (ANY_ORIGIN if self.keys else LOCAL,)


# --- address ---------------------------------------------------------------------------------------------------------
# Where a server listens: addresses and TLS.


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
