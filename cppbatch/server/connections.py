"""Connections that cost the server something and bring it nothing: silent ones, stalled ones, too many of them.

aiohttp closes connections that are idle between requests. It does not mind how long a first request takes to come, a
body that stops halfway, or a client that reads nothing of its answer; and it takes any number of connections.
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
"""From connecting to the end of the first request's head."""
_SLOWEST_BODY = 500
"""Bytes a second, on the average, that a body must come at once the idle timeout is over, as in Apache's
mod_reqtimeout: one byte now and then would keep a connection for ever."""
_MOST_CONNECTIONS = 8192
_OTHER_FILES = 200  # that the process may have open beside: the model, the log, what is being accepted or closed


class Connections:
    """The open connections. At `most`, the one that has gone longest without being answered makes room."""

    def __init__(self, most: int, *, idle_timeout: float, head_timeout: float = HEAD_SECONDS) -> None:
        self._most = most
        self.idle_timeout, self.head_timeout = idle_timeout, head_timeout
        self._open: set[Connection] = set()
        self._unanswered: dict[Connection, None] = {}  # longest first

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        """Counts a new connection, and drops another one, or this one, if there are too many."""
        self._open.add(connection)
        self._unanswered[connection] = None
        if len(self._open) > self._most:
            self._drop(next(iter(self._unanswered)), f"there are {self._most} connections, the most at once")

    def remove(self, connection: Connection) -> None:
        """Forgets a connection that is closed."""
        self._open.discard(connection)
        self._unanswered.pop(connection, None)

    @contextlib.contextmanager
    def answering(self, connection: Connection) -> Iterator[None]:
        """Keeps a connection from being dropped for another one while it gets an answer."""
        self._unanswered.pop(connection, None)
        try:
            yield
        finally:
            if connection in self._open:
                self._unanswered[connection] = None

    async def watch(self) -> None:
        """Cuts off those that are overdue, for ever."""
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
    """aiohttp's protocol for one connection, with an eye on what passes."""

    def __init__(self, connections: Connections, http: web.RequestHandler) -> None:
        self._connections = connections
        self._http = http
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._opened_at = self._heard_at = self._sent_at = self._loop.time()
        self._asked = False  # the head of a request has come
        self._reading = False  # a request's body is being waited for
        self._reading_since, self._n_read = 0.0, 0  # and how much of it has come
        self._unsent: int | None = None  # bytes that the client does not take
        self.remote = "?"

    # --- what aiohttp's handlers say ----------------------------------------------------------------------------

    def asked(self) -> None:
        """The head of a request has come."""
        self._asked = True

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """While a request's body is awaited."""
        self._reading, self._n_read = True, 0
        self._reading_since = self._heard_at = self._loop.time()
        try:
            yield
        finally:
            self._reading = False

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """While a request is answered."""
        with self._connections.answering(self):
            yield

    # --- what is wrong with it ----------------------------------------------------------------------------------

    def overdue(self, now: float) -> str | None:
        """Why it should be cut off, if it should."""
        limit = self._connections.idle_timeout
        if not self._asked and now - self._opened_at > self._connections.head_timeout:
            return f"no request within {self._connections.head_timeout:g} s"
        if self._reading and now - self._heard_at > limit:
            return f"nothing of its request's body for {limit:g} s"
        if self._reading and now - self._reading_since > limit + self._n_read / _SLOWEST_BODY:
            return f"its request's body comes at less than {_SLOWEST_BODY} bytes/s"
        if self._unsent is not None and self._transport:
            unsent = self._transport.get_write_buffer_size()
            if unsent < self._unsent:
                self._unsent, self._sent_at = unsent, now
            if now - self._sent_at > limit:
                return f"it read nothing of its answer for {limit:g} s"
        return None

    def abort(self) -> None:
        """Closes it now, whatever is unsent; a request that is being answered is cancelled."""
        if self._transport:
            self._transport.abort()

    # --- the protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As in `asyncio.Protocol`, like all below."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.remote = str((transport.get_extra_info("peername") or "?")[0])
        # As little as may be is kept for a client that reads slowly: writing waits as soon as the kernel's buffer is
        # full, and even what an answer leaves behind after its end counts as unsent.
        transport.set_write_buffer_limits(high=1)
        self._http.connection_made(transport)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
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
    """The connection that a request came on; None if it is gone, or nobody watches it."""
    protocol = request.transport.get_protocol() if request.transport else None
    return protocol if isinstance(protocol, Connection) else None


def reading(request: web.Request) -> contextlib.AbstractContextManager[None]:
    """While a request's body is awaited: a client that stops sending is cut off."""
    connection = connection_of(request)
    return connection.reading() if connection else contextlib.nullcontext()


@web.middleware
async def connection_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tells a connection that it brought a request."""
    if connection := connection_of(request):
        connection.asked()
    return await handler(request)


def most_connections() -> int:
    """How many connections may be open at once. Lets the process open as many files as it may first."""
    try:
        import resource
    except ImportError:  # Windows, where sockets are not files
        return _MOST_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (ValueError, OSError) as error:  # macOS says there is no limit, and does not allow that
        log.debug("the limit of open files stays at %d: %s", soft, error)
    if soft == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(1, min(_MOST_CONNECTIONS, soft - _OTHER_FILES))
