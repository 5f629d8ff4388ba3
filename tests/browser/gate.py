"""A port in front of a server. While it is closed, the server is gone as far as the page can tell."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit


class Gate:
    """Forwards connections to the server at `url`, from an address of its own. It is open at first."""

    def __init__(self, url: str) -> None:
        self._target = ("127.0.0.1", urlsplit(url).port or 0)
        self._port = 0
        self._sockets: set[socket.socket] = set()
        self.open()
        self.url = f"http://127.0.0.1:{self._port}"

    @property
    def n_connections(self) -> int:
        return len(self._sockets) // 2

    def open(self) -> None:
        """Listens, always on the same port."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        """Refuses connections, and cuts those that are open."""
        for each in (self._listener, *self._sockets):
            _shut(each)
        self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server:
            self._sockets |= {client, server}
            back = threading.Thread(target=_copy, args=(server, client), daemon=True)
            back.start()
            _copy(client, server)
            back.join()
            self._sockets -= {client, server}


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Until one of them is shut. Then both are."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    _shut(source)
    _shut(target)


def _shut(each: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is already
        each.shutdown(socket.SHUT_RDWR)
