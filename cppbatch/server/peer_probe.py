"""Whether a client that has closed its sending side still reads (`nc -N`, some proxies), or is gone.

TCP tells the server the same in both cases: the client will send nothing more. Only what is sent to a client that is
gone is answered with a reset. So until the answer begins, the server sends the interim response `100 Continue` now and
then, which every client of HTTP/1.1 has to skip. A client of HTTP/1.0 takes none, so its request is given up soon.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from aiohttp import HttpVersion11, web

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 30.0  # seconds; each pause is twice the one before
_OLD_HTTP_SECONDS = 0.5
"""The time limit for an answer of HTTP/1.0 to begin."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class PeerProbe:
    """Calls `is_gone` with the reason once the client is gone. `answered`: the request that is being answered."""

    def __init__(
        self, transport: asyncio.Transport, answered: Callable[[], web.Request | None], is_gone: Callable[[str], None]
    ) -> None:
        self._transport, self._answered, self._is_gone = transport, answered, is_gone
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._loop = asyncio.get_running_loop()
        self._began, self._pause = self._loop.time(), _FIRST_PAUSE
        self._next = self._loop.call_later(self._pause, self._probe)

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
            elif self._loop.time() - self._began > _OLD_HTTP_SECONDS:
                return self._is_gone("its HTTP/1.0 client closed its sending side and may have disconnected")
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._next = self._loop.call_later(self._pause, self._probe)
        return None
