"""The two ends of the link between the server's process and a worker: one ZeroMQ socket for each direction.

Each side binds the socket it reads and connects the one it writes: a connecting socket takes messages before the other
side is there, a bound one would not.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import zmq
import zmq.asyncio

from cppbatch.cluster.worker_messages import (
    FromWorker,
    Hello,
    ToWorker,
    WorkerSetup,
    decode_for_worker,
    decode_from_worker,
    encode,
)

_LONGEST_PATH = 100  # of a socket in the file system; about 107 may be
_PATIENCE_MS = 5000
_FLUSH_S = 0.2
_LOOPBACK = "tcp://127.0.0.1:*"

Keys = tuple[str, str, str, str]
"""CURVE key pairs, public and secret: the server's, then the worker's."""


def can_use_files(folder: Path) -> bool:
    """Whether the link can be a socket in this folder; else it is loopback, encrypted, since any user may connect."""
    return bool(zmq.has("ipc")) and len(str(folder)) < _LONGEST_PATH


def _endpoint(socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> str:
    endpoint = socket.last_endpoint
    assert isinstance(endpoint, bytes)
    return endpoint.decode()


def _unbounded(socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
    """Neither side ever waits for the other: what may be in flight is bounded by the requests that are taken."""
    socket.set_hwm(0)
    socket.linger = 0


class ServerLink:
    """The server's end, on its event loop."""

    def __init__(self, folder: Path, *, use_files: bool) -> None:
        self.keys: Keys | None = None
        if not use_files:
            public, secret = (key.decode() for key in zmq.curve_keypair())
            theirs, their_secret = (key.decode() for key in zmq.curve_keypair())
            self.keys = public, secret, theirs, their_secret
        context = zmq.asyncio.Context.instance()
        self._incoming = context.socket(zmq.PULL)
        _unbounded(self._incoming)
        if self.keys:
            self._incoming.curve_server = True
            self._incoming.curve_publickey, self._incoming.curve_secretkey = (key.encode() for key in self.keys[:2])
        self._incoming.bind(f"ipc://{folder}/up" if use_files else _LOOPBACK)
        self._outgoing: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        _unbounded(self._outgoing)

    @property
    def endpoint(self) -> str:
        """Where the worker sends to."""
        return _endpoint(self._incoming)

    def connect(self, hello: Hello) -> None:
        """From here on `send` may be used."""
        if self.keys:
            public, secret, theirs, _ = (key.encode() for key in self.keys)
            self._outgoing.curve_publickey, self._outgoing.curve_secretkey = public, secret
            self._outgoing.curve_serverkey = theirs
        self._outgoing.connect(hello.endpoint)

    def send(self, message: ToWorker) -> None:
        """Never waits. Raises `UnicodeEncodeError` for text that no file could hold either (half a surrogate pair)."""
        self._outgoing.send(encode(message), zmq.NOBLOCK)

    async def receive(self) -> FromWorker:
        """The next message. Raises `msgspec.DecodeError` for what is none."""
        return decode_from_worker(await self._incoming.recv())

    def close(self) -> None:
        """What is still on the way is dropped."""
        self._incoming.close()
        self._outgoing.close()


class WorkerLink:
    """The worker's end. Any thread may send; one receives."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._lock = threading.Lock()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._outgoing = context.socket(zmq.PUSH)
        self._incoming = context.socket(zmq.PULL)
        for socket in (self._outgoing, self._incoming):
            _unbounded(socket)
        if setup.keys:
            server, public, secret = (key.encode() for key in setup.keys)
            self._outgoing.curve_publickey, self._outgoing.curve_secretkey = public, secret
            self._outgoing.curve_serverkey = server
            self._incoming.curve_server = True
            self._incoming.curve_publickey, self._incoming.curve_secretkey = public, secret
        self._outgoing.connect(setup.endpoint)
        self._incoming.bind(_LOOPBACK if setup.keys else f"ipc://{setup.folder}/down")
        self.send(Hello(_endpoint(self._incoming)))

    def send(self, message: FromWorker) -> None:
        """Never waits for the server."""
        data = encode(message)
        with self._lock:
            self._outgoing.send(data)

    def receive(self) -> ToWorker:
        """Waits for the next message."""
        return decode_for_worker(self._incoming.recv())

    def flush(self) -> None:
        """Sends what is still on the way; nothing more can be sent."""
        with self._lock:
            self._outgoing.close(linger=_PATIENCE_MS)
        time.sleep(_FLUSH_S)  # closing returns at once, and its own thread goes on sending
