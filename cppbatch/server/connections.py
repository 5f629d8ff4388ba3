"""Limits on connections: silent and stalled ones are closed, and so is one when there are too many.

aiohttp closes connections that are idle between requests. It limits neither the time until the first request, nor a
body that stops halfway, nor a client that does not read its response, nor the number of connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterator

from aiohttp import web
from aiohttp.typedefs import Handler

log = logging.getLogger("cppbatch.server")

HEAD_SECONDS = 20.0
"""The time limit from connecting to the end of the first request's head."""
_MIN_BODY_RATE = 500
"""Bytes a second, on average, at which a body must come once the idle timeout has passed, as in Apache's
mod_reqtimeout: otherwise one byte now and then would keep a connection open for ever."""
_MAX_CONNECTIONS = 8192
_OTHER_FILES = 200  # file descriptors for the rest: the model, the log, connections being accepted or closed


class Connections:
    """The open connections. At most `max_open`: a new one then closes the one unanswered for the longest time."""

    def __init__(self, max_open: int, *, idle_timeout: float, head_timeout: float = HEAD_SECONDS) -> None:
        self._max_open = max_open
        self.idle_timeout, self.head_timeout = idle_timeout, head_timeout
        self._open: set[Connection] = set()
        self._unanswered: dict[Connection, None] = {}  # in order, the longest unanswered first

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        """Adds a new connection, and closes another one, or this one, if there are too many."""
        self._open.add(connection)
        self._unanswered[connection] = None
        if len(self._open) > self._max_open:
            self._drop(next(iter(self._unanswered)), f"there are {self._max_open} connections, the most at once")

    def remove(self, connection: Connection) -> None:
        """Removes a closed connection."""
        self._open.discard(connection)
        self._unanswered.pop(connection, None)

    @contextlib.contextmanager
    def answering(self, connection: Connection) -> Iterator[None]:
        """While a request is answered, its connection is not closed in favour of a new one."""
        self._unanswered.pop(connection, None)
        try:
            yield
        finally:
            if connection in self._open:
                self._unanswered[connection] = None

    def give_way(self, connection: Connection) -> None:
        """The connection may be closed in favour of a new one, though its request is being answered."""
        if connection in self._open:
            self._unanswered[connection] = None

    async def watch(self) -> None:
        """Closes overdue connections, until it is cancelled."""
        loop = asyncio.get_running_loop()
        pause = min(1.0, self.idle_timeout / 4, self.head_timeout / 4)
        while True:
            await asyncio.sleep(pause)
            now = loop.time()
            for connection in list(self._open):
                if reason := connection.overdue(now):
                    self._drop(connection, reason)

    def _drop(self, connection: Connection, reason: str) -> None:
        log.info("cut off %s: %s", connection.remote, reason)
        self.remove(connection)
        connection.abort()


class Connection(asyncio.Protocol):
    """aiohttp's protocol of one connection, with times of what was received and sent."""

    def __init__(self, connections: Connections, http: web.RequestHandler) -> None:
        self._connections = connections
        self._http = http
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._opened_at = self._received_at = self._sent_at = self._loop.time()
        self._has_request = False  # the head of a request has been received
        self._reading = False  # the server waits for a request's body
        self._reading_since, self._n_read = 0.0, 0  # bytes received since then
        self._unsent: int | None = None  # bytes that the client does not read
        self.remote = "?"

    # --- called by the server ---------------------------------------------------------------------------------------

    def set_has_request(self) -> None:
        """The head of a request has been received."""
        self._has_request = True

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """While the server waits for a request's body."""
        self._reading, self._n_read = True, 0
        self._reading_since = self._received_at = self._loop.time()
        try:
            yield
        finally:
            self._reading = False

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """While a request is answered."""
        with self._connections.answering(self):
            yield

    def give_way(self) -> None:
        """The answer of this request is one without an end: it may be closed in favour of a new connection."""
        self._connections.give_way(self)

    # --- called by `Connections` ------------------------------------------------------------------------------------

    def overdue(self, now: float) -> str | None:
        """Why the connection should be closed; None if it should not."""
        limit = self._connections.idle_timeout
        if not self._has_request and now - self._opened_at > self._connections.head_timeout:
            return f"no request within {self._connections.head_timeout:g} s"
        if self._reading and now - self._received_at > limit:
            return f"nothing of its request's body for {limit:g} s"
        if self._reading and now - self._reading_since > limit + self._n_read / _MIN_BODY_RATE:
            return f"its request's body comes at less than {_MIN_BODY_RATE} bytes/s"
        if self._unsent is not None and self._transport:
            unsent = self._transport.get_write_buffer_size()
            if unsent < self._unsent:
                self._unsent, self._sent_at = unsent, now
            if now - self._sent_at > limit:
                return f"it read nothing of its answer for {limit:g} s"
        return None

    def abort(self) -> None:
        """Closes the connection at once; a request that is being answered is cancelled."""
        if self._transport:
            self._transport.abort()

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As in `asyncio.Protocol`, like all methods below."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.remote = str((transport.get_extra_info("peername") or "?")[0])
        # With a limit of one byte, writing waits as soon as the kernel's buffer is full. So little is buffered for a
        # slow client, and bytes left behind after the end of a response count as unsent too.
        transport.set_write_buffer_limits(high=1)
        self._http.connection_made(transport)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._received_at = self._loop.time()
        self._n_read += len(data)
        self._http.data_received(data)

    def eof_received(self) -> None:
        self._http.eof_received()

    def pause_writing(self) -> None:
        self._unsent, self._sent_at = sys.maxsize, self._loop.time()
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._unsent = None
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._http.connection_lost(exc)


def connection_of(request: web.Request) -> Connection | None:
    """The connection of a request; None if it is closed, or not under these limits."""
    protocol = request.transport.get_protocol() if request.transport else None
    return protocol if isinstance(protocol, Connection) else None


def reading(request: web.Request) -> contextlib.AbstractContextManager[None]:
    """While the server waits for a request's body: a client that stops sending is disconnected."""
    connection = connection_of(request)
    return connection.reading() if connection else contextlib.nullcontext()


@web.middleware
async def connection_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Notes that the connection has brought a request."""
    if connection := connection_of(request):
        connection.set_has_request()
    return await handler(request)


def max_connections() -> int:
    """The maximum number of open connections, by the process's limit of open files, which is raised to its maximum."""
    try:
        import resource
    except ImportError:  # Windows, where sockets are not files
        return _MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (ValueError, OSError) as error:  # macOS reports no limit, and refuses to set it
        log.debug("the limit of open files stays at %d: %s", soft, error)
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(1, min(_MAX_CONNECTIONS, soft - _OTHER_FILES))
