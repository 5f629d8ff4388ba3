"""Which web pages may send requests: checks `Host` against DNS rebinding, and `Origin` and `Sec-Fetch-Site` against
cross-site requests.

A browser lets every page send requests to every server that it can reach, including this one on 127.0.0.1. CORS only
decides what the page may read of the response, and a page whose name resolves to this server's address (DNS rebinding)
may read all of it. But a page cannot set these headers. Other clients send the same `Host` and none of the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from cppbatch.server.http.api_errors import error_response
from cppbatch.server.http.error_formats import ApiError
from cppbatch.server.http.hosts import ANY_ORIGIN, LOCAL, HostNames, address_of, is_local
from cppbatch.server.request_checks import STREAMED_BODIES
from cppbatch.server.web_page import is_page

_HEADERS = _HOST, _ORIGIN, _TYPE, _SITE, _MODE = "Host", "Origin", "Content-Type", "Sec-Fetch-Site", "Sec-Fetch-Mode"
_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^\[\]:@/\s,%]*)(?::\d*)?")
"""A host, an IPv6 address in brackets, and a port."""
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*://([^/?#]*)", re.IGNORECASE)
_READING = (hdrs.METH_GET, hdrs.METH_HEAD)


class RequestHead(NamedTuple):
    """The parts of a request that the rules use. Header names are lower-case; values are lists, one entry per line."""

    method: str
    path: str
    headers: Mapping[str, tuple[str, ...]]
    authority: str = ""
    """The host in a target such as http://host/path, as sent to proxies."""
    has_body: bool = False

    @classmethod
    def of(cls, request: web.Request) -> RequestHead:
        """The head of a request."""
        return cls(
            request.method,
            request.path,
            {name.lower(): tuple(request.headers.getall(name, ())) for name in _HEADERS},
            found[1] if (found := _ABSOLUTE.match(request.raw_path)) else "",
            request.body_exists,
        )

    def header(self, name: str) -> str | None:
        """The value of a header; None if absent. Browsers send one line; several are joined to a value that no rule
        allows."""
        return ", ".join(values) if (values := self.headers.get(name.lower())) else None


class CrossSite:
    """The rules: which hosts a request may name, and which pages may send it.

    `hosts`: the names of this server; None: any. `origins`: the pages of other origins that may use the server.
    """

    def __init__(self, hosts: HostNames | None, origins: CrossOrigin) -> None:
        self._hosts, self._origins = hosts, origins

    def refusal(self, head: RequestHead) -> ApiError | None:
        """Why a request is refused; None: it is allowed."""
        if wrong_host := self._wrong_host(head):
            return wrong_host
        if head.method == hdrs.METH_OPTIONS:  # a preflight request changes nothing; its response says what is allowed
            return None
        return self._wrong_page(head) or self._wrong_type(head)

    def _wrong_host(self, head: RequestHead) -> ApiError | None:
        if self._hosts is None:
            return None
        for given in (*head.headers.get("host", ()), *([head.authority] if head.authority else [])):
            found = _AUTHORITY.fullmatch(given)
            name = found[1].lower().rstrip(".") if found else ""
            if not (is_local(name) or address_of(name) or self._hosts.lists(name)):
                message = (
                    f"is {given!r:.100}, which is not a known name of this server: start the server with "
                    f"--allowed-hosts {name[:80] or 'NAME'}, or use its IP address"
                )
                return _refusal(_HOST, message, "host_not_allowed")
        return None

    def _wrong_page(self, head: RequestHead) -> ApiError | None:
        origin, site = head.header(_ORIGIN), head.header(_SITE)
        if site == "same-origin" or self._origins.allows_all or self._may_send(head, origin, site):
            return None
        if origin is None:
            message = f"is {site!r:.40}: pages from other sites cannot use this server unless --cors-origin allows them"
            return _refusal(_SITE, message, "origin_not_allowed")
        remedy = f"start the server with --cors-origin {origin[:80]} to allow it"
        if origin == "null":  # any page can send it from a sandboxed frame
            remedy = (
                "local files and sandboxed frames require --cors-origin '*', which should be combined with --api-key"
            )
        return _refusal(
            _ORIGIN, f"is {origin!r:.80}, which is not allowed to use this server: {remedy}", "origin_not_allowed"
        )

    def _may_send(self, head: RequestHead, origin: str | None, site: str | None) -> bool:
        is_direct = site in (None, "none")  # not sent over plain HTTP to other machines; none: an address was typed
        if origin is not None:
            return self._origins.allows(origin) or (is_direct and _is_same(origin, head.header(_HOST)))
        is_neighbour = site == "same-site" and self._origins.allows_local and _is_local_host(head.header(_HOST))
        is_link = head.method in _READING and is_page(head.path) and head.header(_MODE) == "navigate"
        return is_direct or is_neighbour or is_link

    def _wrong_type(self, head: RequestHead) -> ApiError | None:
        """Refuses bodies that browsers send without a preflight request. Neither this server's page nor pages allowed
        by CORS need them."""
        is_browser = head.header(_ORIGIN) is not None or head.header(_SITE) is not None
        if not is_browser or not head.has_body or self._origins.allows_all:
            return None
        if (head.method, head.path) in STREAMED_BODIES:  # forms
            return None
        given = head.header(_TYPE) or "missing"
        media_type = given.partition(";")[0].strip().lower()
        if media_type == "application/json" or media_type.endswith("+json"):
            return None
        message = f"{_TYPE} is {given!r:.60}; browsers must send application/json"
        return ApiError(415, message, "invalid_request_error", _TYPE, "unsupported_media_type")


def cross_site_middleware(rules: CrossSite) -> Middleware:
    """Refuses requests by the rules, before their body is read."""

    @web.middleware
    async def check_site(request: web.Request, handler: Handler) -> web.StreamResponse:
        if refused := rules.refusal(RequestHead.of(request)):
            return error_response(request, refused)
        return await handler(request)

    return check_site


def _is_local_host(host: str | None) -> bool:
    found = _AUTHORITY.fullmatch(host or "")
    return bool(found and is_local(found[1].lower()))


def _is_same(origin: str, host: str | None) -> bool:
    """Whether a page of this origin came from this host. Behind a TLS proxy, the server does not know the scheme."""
    scheme, _, authority = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme)
    return bool(port and host and authority.removesuffix(port) == host.lower().removesuffix(port))


def _refusal(header: str, message: str, code: str) -> ApiError:
    return ApiError(403, f"{header} {message}", "permission_error", header, code)


_OF_OTHERS = re.compile(r"file|ftp|data|blob|about|javascript|.*-extension")
"""Schemes of pages that may come from elsewhere: downloaded files, and what browsers install. No web site has any other
scheme than http and https."""
_RATE_HEADERS = [
    *(f"x-ratelimit-{value}-requests" for value in ("limit", "remaining", "reset")),
    *(f"anthropic-ratelimit-requests-{value}" for value in ("limit", "remaining", "reset")),
]
_EXPOSED_HEADERS = ", ".join(["X-Request-Id", "X-Ignored-Fields", "Retry-After", "retry-after-ms", *_RATE_HEADERS])
"""Response headers that pages may read in addition to the safelisted ones."""
_MAX_AGE = "600"  # seconds for which browsers may cache a preflight response


class CrossOrigin:
    """Adds the CORS headers to the responses of an application, and answers preflight requests for every path.

    `origins`: origins and special values. Any page is allowed only if the user says so, or if a key is required, which
    pages do not know. `credentials`: browsers may send credentials, because allowed pages are trusted.
    """

    def __init__(self, origins: Iterable[str], *, credentials: bool = True) -> None:
        self._origins = frozenset(origins)
        self._credentials = credentials or ANY_ORIGIN in self._origins

    @property
    def allows_all(self) -> bool:
        """Whether any page may use the server."""
        return ANY_ORIGIN in self._origins

    @property
    def allows_local(self) -> bool:
        """Whether pages served by this machine, on any port, may use the server."""
        return LOCAL in self._origins

    def allows(self, origin: str) -> bool:
        """Whether pages of this origin may use the server."""
        scheme, _, _ = origin.partition("://")
        named = self.allows_all or origin in self._origins or f"{scheme}://{ANY_ORIGIN}" in self._origins
        return named or (self.allows_local and _is_local(origin))

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """For `Application.on_response_prepare`."""
        # keeps caches from serving one origin's response to another
        varies = response.headers.get(hdrs.VARY)
        response.headers[hdrs.VARY] = f"{varies}, {hdrs.ORIGIN}" if varies else hdrs.ORIGIN
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is not None and self.allows(origin):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            if self._credentials:
                response.headers[hdrs.ACCESS_CONTROL_ALLOW_CREDENTIALS] = "true"
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED_HEADERS


def preflight_middleware(methods: str, allowed_headers: str) -> Middleware:
    """Answers OPTIONS requests: without a key, since browsers do not send one with them, and while the model loads.

    `methods`, `allowed_headers`: what pages of other origins may use; *: any headers.
    """

    @web.middleware
    async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != hdrs.METH_OPTIONS:
            return await handler(request)
        # Not *, which would not include Authorization.
        named = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "*")
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: methods,
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: named if allowed_headers == "*" else allowed_headers,
            hdrs.ACCESS_CONTROL_MAX_AGE: _MAX_AGE,
        }
        return web.Response(headers=headers)

    return answer_preflight


def _is_local(origin: str) -> bool:
    """Whether a page of this origin comes from this machine: a server on it, or a program that shows its own pages."""
    try:
        given = urlsplit(origin)
        if given.scheme in ("http", "https"):
            return is_local(given.hostname or "")
    except ValueError:  # not a URL
        return False
    return "://" in origin and bool(given.scheme) and not _OF_OTHERS.fullmatch(given.scheme)
