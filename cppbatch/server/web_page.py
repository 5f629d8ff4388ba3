"""The web page: static files of `server/page/`, at `/` and below `/page/`.

They are the same for all clients and contain no secrets, so they need no API key; the page sends the key with each API
call. They are also served while the model loads.
"""

from __future__ import annotations

import asyncio
import gzip
import re
from base64 import b64encode
from collections.abc import Mapping
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path

import msgspec
from aiohttp import ETag, hdrs, web
from aiohttp.typedefs import Handler

from cppbatch.engine.params import PARAMS
from cppbatch.server.http.endpoint import TEXT, Routes

INDEX, PREFIX = "/", "/page/"

_FOLDER = Path(__file__).with_name("page")
_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
"""By suffix. Other files of the folder, such as licences, are not served."""
_COMMENT = re.compile(rb"^[ \t]*(?://.*|/\*\*(?s:.*?)\*/)$", re.MULTILINE)
"""Whole-line comments in a script, which browsers get as empty lines."""

# The page only loads from and calls this server, runs no scripts written by a model, and parses no text as HTML.
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "font-src": "'self'",
    "img-src": "'self' data: blob:",
    "media-src": "data:",
    "connect-src": "'self'",
    "frame-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
_FRAME = "diagram_frame.html"
_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)
# In this frame a library draws diagrams that a model wrote. Its origin is not the server's, and it loads nothing.
_FRAME_POLICY = {
    "default-src": "'none'",
    "script-src": "'sha256-{digest}' blob:",
    "style-src": "'unsafe-inline'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'self'",
    "sandbox": "allow-scripts",
}
_POLICY_HEADER = "Content-Security-Policy"
_HEADERS = {
    hdrs.VARY: hdrs.ACCEPT_ENCODING,
    hdrs.CACHE_CONTROL: "no-cache",  # browsers revalidate, which costs a 304
    _POLICY_HEADER: "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

routes = Routes()


class PageFile:
    """A file of the page."""

    def __init__(self, content: bytes, media_type: str, headers: Mapping[str, str]) -> None:
        self.content, self.media_type, self.headers = content, media_type, headers
        self.etag = sha256(content).hexdigest()[:32]
        """A digest of the content. Weak, because both encodings share it."""

    @cached_property
    def gzipped(self) -> bytes:
        """The content for clients that accept `Content-Encoding: gzip`: about a third of the bytes."""
        return gzip.compress(self.content, mtime=0)


def is_page(path: str) -> bool:
    """Whether the path is one of the page's."""
    return path == INDEX or path.startswith(PREFIX)


@lru_cache(maxsize=1)
def page_files() -> dict[str, PageFile]:
    """All files of the page, by their path below `/page/`: those of its folder, and `sampling_params.js`."""
    params = b"export const PARAMS = " + msgspec.json.encode(PARAMS)
    found = {"sampling_params.js": PageFile(params, "text/javascript", _HEADERS)}
    for path in _FOLDER.rglob("*"):
        if media_type := _MEDIA_TYPES.get(path.suffix):
            content = path.read_bytes()
            if path.suffix == ".js" and "vendor" not in path.parts:
                content = _COMMENT.sub(lambda found: b"\n" * found[0].count(b"\n"), content)
            headers = _frame_headers(content) if path.name == _FRAME else _HEADERS
            found[path.relative_to(_FOLDER).as_posix()] = PageFile(content, media_type, headers)
    return found


def _frame_headers(content: bytes) -> dict[str, str]:
    found = _SCRIPT.search(content)
    assert found
    digest = b64encode(sha256(found[1]).digest()).decode()
    policy = "; ".join(f"{name} {value.format(digest=digest)}" for name, value in _FRAME_POLICY.items())
    return {**_HEADERS, _POLICY_HEADER: policy}


@routes.get(INDEX, {"text/html": TEXT}, ())
async def index(request: web.Request) -> web.Response:
    """The web page; no API key required."""
    return _response(request, page_files()["index.html"])


async def running(_request: web.Request) -> web.Response:
    """`GET /` of a server without the web page: Ollama's clients look for an answer there."""
    return web.Response(text="cppbatch is running\n")


@routes.get(f"{PREFIX}{{path:.+}}", dict.fromkeys(_MEDIA_TYPES.values(), TEXT), (404,))
async def page_file(request: web.Request) -> web.Response:
    """A file of the web page; no API key required."""
    file = page_files().get(request.match_info["path"])
    if file is None:
        raise web.HTTPNotFound(text=f"the web page has no file {request.match_info['path']!r:.200}")
    return _response(request, file)


def static_files(folder: Path) -> Handler:
    """Serves the files of a folder that the user names in place of the page: index.html for a folder in it."""

    root = folder.resolve()

    def find(name: str) -> Path | None:
        try:
            path = (root / name).resolve()
            if path.is_dir():
                path = (path / "index.html").resolve()
            return path if path.is_relative_to(root) and path.is_file() else None
        except (OSError, ValueError):  # a name that no file can have
            return None

    async def static_file(request: web.Request) -> web.StreamResponse:
        path = await asyncio.to_thread(find, request.match_info["path"])
        if path is None:
            raise web.HTTPNotFound
        return web.FileResponse(path)

    return static_file


def _response(request: web.Request, file: PageFile) -> web.Response:
    if any(tag.value in (file.etag, "*") for tag in request.if_none_match or ()):
        response = web.Response(status=304, headers=file.headers)
    elif "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, ""):
        headers = {**file.headers, hdrs.CONTENT_ENCODING: "gzip"}
        response = web.Response(body=file.gzipped, content_type=file.media_type, charset="utf-8", headers=headers)
    else:
        response = web.Response(body=file.content, content_type=file.media_type, charset="utf-8", headers=file.headers)
    response.etag = ETag(file.etag, is_weak=True)
    return response
