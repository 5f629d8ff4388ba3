"""Requests to a server of another thread or process: JSON in, JSON out. No packages: tests/clients has few."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


class BlockingClient:
    """Calls of the server at `url`. Raises `urllib.error.HTTPError` unless the status is 200."""

    url: str

    def get(self, path: str) -> Any:
        """A JSON answer."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, body: object) -> Any:
        """A JSON answer to a JSON body."""
        with self.stream(path, body) as answer:
            return json.load(answer)

    def stream(self, path: str, body: object) -> Any:
        """The response to a JSON body, to be read and closed."""
        headers = {"Content-Type": "application/json"}
        return urllib.request.urlopen(
            urllib.request.Request(self.url + path, json.dumps(body).encode(), headers), timeout=60
        )
