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
        self.open()
        self.url = f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        """Listens, always on the same port."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, args=(self._listener, self._open), daemon=True).start()

    def close(self) -> None:
        """Refuses connections and cuts those that are open, in both directions."""
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):  # its other side has closed it
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
            each.close()

    def _accept(self, listener: socket.socket, opened: list[socket.socket]) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(self._target)
                opened += client, server
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=_copy, args=ends, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Until one of them is closed. Then the other one is."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
