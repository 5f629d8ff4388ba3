"""The sockets between a server and its worker: messages of `cluster/link.py` over ZeroMQ, a socket per direction.

Each side binds the socket it reads from and connects the socket it writes to: a connecting socket queues messages
until the other side is available, a bound one does not.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from cppbatch.cluster.link import (
    FromWorker,
    Hello,
    Keys,
    ToWorker,
    WorkerSetup,
    decode_for_worker,
    decode_from_worker,
    encode,
    refusal,
)  # fmt: skip
from cppbatch.errors import InvalidRequest

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger("cppbatch.worker")

_LOOPBACK = "tcp://127.0.0.1:*"


def can_use_files(folder: Path) -> bool:
    """Whether the sockets can be files in this folder; otherwise they are encrypted loopback TCP, as any user can
    connect."""
    return bool(zmq.has("ipc")) and len(str(folder)) < 100  # a socket's path may have about 107 characters


def _with_readers(loop: asyncio.AbstractEventLoop) -> Any:
    """The loop, or on Windows, whose loop has no `add_reader`, a thread that has it.

    `zmq.asyncio` would do the same, but a message through it takes 0.1 ms more of the server's time.
    """
    if sys.platform == "win32":
        from tornado.platform.asyncio import SelectorThread

        return SelectorThread(loop)
    return loop


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    endpoint = socket.last_endpoint
    assert isinstance(endpoint, bytes)
    return endpoint.decode()


def _never_wait(socket: zmq.Socket[bytes]) -> None:
    """Unbounded queues and no linger. The number of requests in flight bounds what is queued."""
    socket.set_hwm(0)
    socket.linger = 0


class ServerLink:
    """The server's end, used on its event loop."""

    def __init__(self, folder: Path, *, use_files: bool) -> None:
        import asyncio  # not needed by workers

        self.keys: Keys | None = None
        if not use_files:
            server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
            worker_public, worker_secret = (key.decode() for key in zmq.curve_keypair())
            self.keys = server_public, server_secret, worker_public, worker_secret
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._incoming = context.socket(zmq.PULL)
        _never_wait(self._incoming)
        if self.keys:
            self._incoming.curve_server = True
            self._incoming.curve_publickey, self._incoming.curve_secretkey = (key.encode() for key in self.keys[:2])
        self._incoming.bind(f"ipc://{folder}/up" if use_files else _LOOPBACK)
        self._outgoing = context.socket(zmq.PUSH)
        _never_wait(self._outgoing)
        self._received: asyncio.Queue[bytes] = asyncio.Queue()
        self._selector = _with_readers(asyncio.get_running_loop())
        self._file = int(self._incoming.fd)
        self._selector.add_reader(self._file, self._read)

    @property
    def endpoint(self) -> str:
        """Where the worker sends its messages."""
        return _endpoint(self._incoming)

    def connect(self, hello: Hello) -> None:
        """Connects to the worker; after this, `send` may be called."""
        if self.keys:
            server_public, server_secret, worker_public, _ = (key.encode() for key in self.keys)
            self._outgoing.curve_publickey, self._outgoing.curve_secretkey = server_public, server_secret
            self._outgoing.curve_serverkey = worker_public
        self._outgoing.connect(hello.endpoint)

    def send(self, message: ToWorker) -> None:
        """Sends a message; never waits. Raises `UnicodeEncodeError` for text with an unpaired surrogate."""
        self._outgoing.send(encode(message), zmq.NOBLOCK)

    async def receive(self) -> FromWorker:
        """Returns the next message. Raises `msgspec.DecodeError` if it cannot be decoded."""
        return decode_from_worker(await self._received.get())

    def _read(self) -> None:
        """Takes all messages that have arrived. ZeroMQ only makes its file readable again after all have been read."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._received.put_nowait(self._incoming.recv(zmq.NOBLOCK))

    def close(self) -> None:
        """Closes both sockets and drops unsent messages."""
        self._selector.remove_reader(self._file)
        if sys.platform == "win32":
            self._selector.close()
        self._incoming.close()
        self._outgoing.close()


class WorkerLink:
    """The worker's end. Any thread may send; one thread receives."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._lock = threading.Lock()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._outgoing = context.socket(zmq.PUSH)
        self._incoming = context.socket(zmq.PULL)
        for socket in (self._outgoing, self._incoming):
            _never_wait(socket)
        if setup.keys:
            server_public, public, secret = (key.encode() for key in setup.keys)
            self._outgoing.curve_publickey, self._outgoing.curve_secretkey = public, secret
            self._outgoing.curve_serverkey = server_public
            self._incoming.curve_server = True
            self._incoming.curve_publickey, self._incoming.curve_secretkey = public, secret
        self._outgoing.connect(setup.endpoint)
        self._incoming.bind(_LOOPBACK if setup.keys else f"ipc://{setup.folder}/down")
        self.send(Hello(_endpoint(self._incoming)))

    def send(self, message: FromWorker) -> None:
        """Sends a message; never waits for the server."""
        data = encode(message)
        with self._lock:
            self._outgoing.send(data)

    def receive(self) -> ToWorker:
        """Waits for the next message.

        Refuses a request with a value of a wrong type, which the server does not check: an exception would end this
        worker, and each later one that gets the request.
        """
        while True:
            data = self._incoming.recv()
            try:
                return decode_for_worker(data)
            except msgspec.ValidationError as error:
                fields = msgspec.msgpack.decode(data)
                request_id = fields.get("request", fields).get("id")
                if request_id is None:
                    raise
                log.warning("refused a request that cannot be decoded: %s", error)
                self.send(refusal(request_id, InvalidRequest("request", f"is invalid: {error}")))

    def flush(self) -> None:
        """Sends the queued messages and closes the link for sending."""
        with self._lock:
            self._outgoing.close(linger=5000)
        time.sleep(0.2)  # `close` returns immediately; ZeroMQ's own thread is still sending
