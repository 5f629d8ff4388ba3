"""Limits on connections: closes silent and stalled ones, and one of them if there are too many.

aiohttp closes connections that are idle between requests. It does not limit the time until the first request, bodies
that stop halfway, clients that do not read their response, or the number of connections. It parses everything that has
arrived at once, however small the chunks, and drops the requests of a client that closes its sending side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Iterator

from aiohttp import HttpVersion11, StreamReader, hdrs, web
from aiohttp.http import StreamWriter
from aiohttp.typedefs import Handler

from cppbatch.retries import Pauses

log = logging.getLogger("cppbatch.server")

HEAD_SECONDS = 20.0
"""The time limit from connecting to the end of the first request's head."""
_MIN_BODY_RATE = 500
"""Minimum average rate of a body in bytes per second, once the idle timeout has passed, as in Apache's mod_reqtimeout:
otherwise an occasional byte would keep a connection open forever."""
_MAX_FRAMING = 1 << 16
"""Bytes of chunk sizes, chunk extensions and trailers allowed in every body: 13,000 chunks of one byte. Beyond that,
framing may be a quarter of the body, as with chunks of 24 bytes. Each chunk costs the time of hundreds of bytes."""
_REFUSAL_SECONDS = 2.0  # for a client that is still sending a refused body to receive the response
_PARSE_SECONDS = 0.0005
"""Target time for parsing the data of one read, during which all other connections wait."""
_FIRST_READ, _MIN_READ, _MAX_READ = 1 << 14, 1 << 9, 1 << 18  # bytes read at once: at first, and the range
_MAX_CONNECTIONS = 8192


class Connections:
    """The open connections, at most `max_open`: beyond that, a new one closes the one unanswered for longest."""

    def __init__(self, max_open: int, *, idle_timeout: float, head_timeout: float = HEAD_SECONDS) -> None:
        self._max_open = max_open
        self.idle_timeout, self.head_timeout = idle_timeout, head_timeout
        self._open: set[Connection] = set()
        self._unanswered: dict[Connection, None] = {}  # in order, the longest unanswered first
        self.buffer = memoryview(bytearray(_MAX_READ))
        """Shared by all connections: each one's data is parsed immediately."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        """Adds a new connection; if there are too many, closes another one or this one."""
        self._open.add(connection)
        self._unanswered[connection] = None
        if len(self._open) > self._max_open:
            self.drop(
                next(iter(self._unanswered)),
                f"too many connections: {self._max_open} are open, the limit; try again later",
            )

    def remove(self, connection: Connection) -> None:
        """Removes a closed connection."""
        self._open.discard(connection)
        self._unanswered.pop(connection, None)

    @contextlib.contextmanager
    def answering(self, connection: Connection) -> Iterator[None]:
        """Protects a connection from being closed in favour of a new one while its request is answered."""
        self._unanswered.pop(connection, None)
        try:
            yield
        finally:
            if connection in self._open:
                self._unanswered[connection] = None

    def give_way(self, connection: Connection) -> None:
        """Allows closing the connection in favour of a new one although its request is being answered."""
        if connection in self._open:
            self._unanswered[connection] = None

    async def watch(self) -> None:
        """Closes overdue connections, until cancelled."""
        loop = asyncio.get_running_loop()
        pause = min(1.0, self.idle_timeout / 4, self.head_timeout / 4)
        while True:
            await asyncio.sleep(pause)
            now = loop.time()
            for connection in list(self._open):
                if reason := connection.overdue(now):
                    self.drop(connection, reason)

    def drop(self, connection: Connection, reason: str) -> None:
        """Closes a connection."""
        log.info("disconnected %s: %s", connection.remote, reason)
        self.remove(connection)
        connection.abort()


class Connection(asyncio.BufferedProtocol):
    """aiohttp's protocol for a connection, with times of received and sent data."""

    def __init__(self, connections: Connections, http: web.RequestHandler) -> None:
        self._connections = connections
        self._http = http
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._opened_at = self._received_at = self._sent_at = self._loop.time()
        self._n_begun = 0  # requests
        self._request: web.Request | None = None  # in progress, or its response being sent
        self._is_endless = False  # the response
        self._chunked: StreamReader | None = None  # the body of the last request, if chunked
        self._reading = False  # the server waits for a request's body
        self._reading_since, self._n_read = 0.0, 0  # bytes received since then
        self._next_read = _FIRST_READ
        self._n_framed = 0  # bytes of a chunked body, with its framing
        self._unsent: int | None = None  # bytes that the client does not read
        self._probe: PeerProbe | None = None  # the client has closed its sending side
        self.remote = "?"
        self.has_refused = False
        """A body that is mostly framing; parsing has stopped."""

    # --- called by the server ---------------------------------------------------------------------------------------

    def begin(self, request: web.Request) -> None:
        """Called when the head of a request has been received. It is answered after the current task ends."""
        self._request, self._is_endless = request, False
        self._n_begun += 1
        self._chunked = request.content if hdrs.TRANSFER_ENCODING in request.headers else None
        self._n_framed = request.content.total_bytes
        task = asyncio.current_task()
        assert task
        task.add_done_callback(self._end)
        if self._probe and self._transport and not request.content.is_eof():  # the rest of its body will never arrive
            self._transport.close()

    def _end(self, _task: asyncio.Task[object]) -> None:
        self._request = None
        if self._probe and self._transport and self._is_idle():
            self._transport.close()  # sends the rest of the response first

    def _is_idle(self) -> bool:
        """Whether the connection is idle: no request is in progress, and none was sent before the last response."""
        return self._request is None and self._n_begun == self._http._request_count

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which the server waits for a request's body."""
        self._reading, self._n_read = True, 0
        self._reading_since = self._received_at = self._loop.time()
        if self.has_refused:
            self._refuse()
        try:
            yield
        finally:
            self._reading = False

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """A context in which a request is answered."""
        with self._connections.answering(self):
            yield

    def give_way(self) -> None:
        """Marks the response of this request as endless: its connection may be closed in favour of a new one, and it
        ends when the client closes its sending side."""
        self._is_endless = True
        self._connections.give_way(self)
        if self._probe and self._transport:
            self._transport.close()

    # --- called by `Connections` ------------------------------------------------------------------------------------

    def overdue(self, now: float) -> str | None:
        """Why the connection should be closed; None: it should not."""
        limit = self._connections.idle_timeout
        if not self._n_begun and now - self._opened_at > self._connections.head_timeout:
            return f"no request within {self._connections.head_timeout:g} s"
        if self._reading and now - self._received_at > limit:
            return f"no data of its request body for {limit:g} s"
        if self._reading and now - self._reading_since > limit + self._n_read / _MIN_BODY_RATE:
            return f"its request body arrives at less than {_MIN_BODY_RATE} bytes/s"
        if self._unsent is not None and self._transport:
            unsent = self._transport.get_write_buffer_size()
            if unsent < self._unsent:
                self._unsent, self._sent_at = unsent, now
            if now - self._sent_at > limit:
                return f"it did not read its response for {limit:g} s"
        return None

    def abort(self) -> None:
        """Closes the connection immediately; cancels a request in progress."""
        if self._transport:
            self._transport.abort()

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when a client has connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.remote = str((transport.get_extra_info("peername") or "?")[0])
        # With a limit of one byte, writing waits as soon as the kernel's buffer is full. So little is buffered for a
        # slow client, and bytes remaining after the end of a response also count as unsent.
        transport.set_write_buffer_limits(high=1)
        self._http.connection_made(transport)
        self._connections.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._connections.buffer[: self._next_read]

    def buffer_updated(self, nbytes: int) -> None:
        began = self._received_at = self._loop.time()
        self._n_read += nbytes
        if self.has_refused:
            return
        self._http.data_received(bytes(self._connections.buffer[:nbytes]))
        seconds = self._loop.time() - began
        if seconds > _PARSE_SECONDS:
            self._next_read = max(_MIN_READ, nbytes // 2)
        elif nbytes == self._next_read and seconds < _PARSE_SECONDS / 2:
            self._next_read = min(_MAX_READ, 2 * nbytes)
        self._check_framing(nbytes)

    def _check_framing(self, nbytes: int) -> None:
        """Stops parsing a body that is mostly framing. `nbytes`: received last, possibly not yet parsed."""
        if self._chunked is None or self._chunked.is_eof():
            return
        n_body = self._chunked.total_bytes
        if self._n_framed - n_body > max(_MAX_FRAMING, n_body // 4):
            log.info("refused the body of %s: %d bytes in %d", self.remote, n_body, self._n_framed)
            self.has_refused, self._next_read = True, _MAX_READ
            if self._reading:
                self._refuse()
        self._n_framed += nbytes

    def _refuse(self) -> None:
        """Makes reading the body raise an exception."""
        assert self._chunked
        reason = "it consists of very small chunks; send larger chunks, or use Content-Length"
        self._chunked.set_exception(web.RequestPayloadError(reason))
        self._chunked.feed_eof()
        self._loop.call_later(_REFUSAL_SECONDS, self.abort)

    def eof_received(self) -> bool:
        """Completely received requests are still answered, except over TLS, where asyncio closes both directions."""
        assert self._transport
        request = self._request
        is_endless = request is not None and (self._is_endless or not request.content.is_eof())
        if self._is_idle() or is_endless or self._transport.get_extra_info("sslcontext"):
            return False
        self._probe = PeerProbe(self._transport, lambda: self._request, lambda why: self._connections.drop(self, why))
        return True

    def pause_writing(self) -> None:
        self._unsent, self._sent_at = sys.maxsize, self._loop.time()
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._unsent = None
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._probe:
            self._probe.stop()
        self._connections.remove(self)
        self._http.connection_lost(exc)


def connection_of(request: web.Request) -> Connection | None:
    """The connection of a request; None if it is closed, or not subject to these limits."""
    protocol = request.transport.get_protocol() if request.transport else None
    return protocol if isinstance(protocol, Connection) else None


def reading(request: web.Request) -> contextlib.AbstractContextManager[None]:
    """A context in which the server waits for a request's body: a client that stops sending is disconnected."""
    connection = connection_of(request)
    return connection.reading() if connection else contextlib.nullcontext()


@web.middleware
async def connection_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tells the connection about the request."""
    connection = connection_of(request)
    if not connection:
        return await handler(request)
    connection.begin(request)
    response = await handler(request)
    if connection.has_refused and not response.prepared:
        response.headers[hdrs.CONNECTION] = "close"
    return response


def max_connections() -> int:
    """The maximum number of open connections, from the process's limit of open files, which this raises to its
    maximum."""
    if sys.platform == "win32":  # where sockets are not files
        return _MAX_CONNECTIONS
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (ValueError, OSError) as error:  # macOS reports no limit, and refuses to set it
        log.debug("the limit of open files stays at %d: %s", soft, error)
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    # 200 file descriptors are reserved: the model, the log, connections being accepted or closed
    return max(1, min(_MAX_CONNECTIONS, soft - 200))


# Finds out whether a client that has closed its sending side still reads (`nc -N`, some proxies), or is gone.
#
# TCP does not distinguish the two: the client will send nothing more. But data sent to a client that is gone is
# answered with a reset. So until the response starts, the server occasionally sends the interim response `100
# Continue`, which every HTTP/1.1 client must skip. HTTP/1.0 clients do not accept it, so their requests are soon
# abandoned. In a stream that has started, while a long prompt is computed, it sends a leading zero of the size of the
# next chunk (RFC 9112, 7.1: a size may have any number of digits).


_PAUSES = Pauses(0.1, 30.0)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_MAX_ZEROS = 4  # before the size of a chunk: Go's client accepts 16 digits


class PeerProbe:
    """Calls `is_gone` with the reason once the client is gone. `answered`: the request in progress."""

    def __init__(
        self, transport: asyncio.Transport, answered: Callable[[], web.Request | None], is_gone: Callable[[str], None]
    ) -> None:
        self._transport, self._answered, self._is_gone = transport, answered, is_gone
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._loop = asyncio.get_running_loop()
        self._began, self._pauses = self._loop.time(), iter(_PAUSES)
        self._n_zeros, self._n_sent = 0, 0  # before the next chunk; bytes of the response before it
        self._next = self._loop.call_later(next(self._pauses), self._probe)

    def stop(self) -> None:
        """The connection is closed."""
        self._next.cancel()

    def _probe(self) -> None:
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # a reset
            return self._is_gone("its client has disconnected")
        request = self._answered()
        if request and not request.writer.output_size:
            if request.version >= HttpVersion11:
                self._transport.write(_CONTINUE)
            elif self._loop.time() - self._began > 0.5:
                return self._is_gone("its HTTP/1.0 client closed its sending side and may have disconnected")
        elif request and isinstance(writer := request.writer, StreamWriter) and writer.chunked and not writer._eof:
            self._n_zeros = self._n_zeros + 1 if writer.output_size == self._n_sent else 1
            self._n_sent = writer.output_size
            if self._n_zeros <= _MAX_ZEROS:
                self._transport.write(b"0")
        self._next = self._loop.call_later(next(self._pauses), self._probe)
        return None
