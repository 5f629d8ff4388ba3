"""A Hugging Face hub on 127.0.0.1: the few routes that its client needs to list and fetch the files of a repository."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.http_site import QuietHandler, serving

COMMIT = "c0ffee" + "0" * 34


class FakeHub:
    """Repositories as {repository: {file: content}}. `requests` has each request as "METHOD path"."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]], gated: tuple[str, ...] = ()) -> None:
        self.repositories, self.gated = repositories, gated
        self.requests: list[str] = []
        self.cut_after: int | None = None
        """Bytes of a file after which the connection is closed, once."""
        self.hold: threading.Event | None = None
        """If it is set, the second half of each file waits for it."""
        self.url = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeHub]:
        """Serves on a free port until the end."""
        hub = self

        class Handler(QuietHandler):
            def do_HEAD(self) -> None:
                hub.answer(self)

            def do_GET(self) -> None:
                hub.answer(self)

        with serving(Handler) as self.url:
            yield self

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answers a request."""
        path = unquote(urlsplit(request.path).path)
        self.requests.append(f"{request.command} {path}")
        if path == "/api/models":
            words = parse_qs(urlsplit(request.path).query)["search"][0].lower().split()
            found = [name for name in self.repositories if all(word in name.lower() for word in words)]
            listed = [{"id": name, "downloads": 1200 - i, "likes": 7} for i, name in enumerate(found)]
            self._send(request, 200, json.dumps(listed).encode())
            return
        owner, name, *rest = path.removeprefix("/api/models").strip("/").split("/")
        repository = f"{owner}/{name}"
        if repository in self.gated and "resolve" in rest:
            self._refuse(request, 403, "GatedRepo")
        elif (files := self.repositories.get(repository)) is None:
            self._refuse(request, 404, "RepoNotFound")
        elif path.startswith("/api/models/"):
            siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
            self._send(request, 200, json.dumps({"id": repository, "siblings": siblings}).encode())
        elif (content := files.get("/".join(rest[2:]))) is None:
            self._refuse(request, 404, "EntryNotFound")
        else:
            self._send_file(request, content)

    def _send_file(self, request: BaseHTTPRequestHandler, content: bytes) -> None:
        given = request.headers.get("Range")
        first, _, last = (given or "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), int(last) + 1 if last else len(content)
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if given:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        self._send(request, 206 if given else 200, content[start:end], headers)

    def _refuse(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        self._send(request, status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "HEAD":
            return
        if self.cut_after is not None and status == 200 and "ETag" in (headers or {}):
            body, self.cut_after = body[: self.cut_after], None
            request.close_connection = True
        if self.hold and "ETag" in (headers or {}) and not request.headers.get("Range"):
            request.wfile.write(body[: len(body) // 2])
            request.wfile.flush()
            self.hold.wait(60)
            body = body[len(body) // 2 :]
        with contextlib.suppress(ConnectionError):  # the download was cancelled
            request.wfile.write(body)
