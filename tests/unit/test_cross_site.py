"""Which Host, Origin, Sec-Fetch-Site and Content-Type are answered: the rules, and on every route of the server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiohttp.typedefs import Handler

from cppbatch.cluster.engines.client import Health
from cppbatch.errors import ConfigError
from cppbatch.server.app import create_app
from cppbatch.server.auth.rules import Keys
from cppbatch.server.cross_site import CrossOrigin, CrossSite, RequestHead
from cppbatch.server.http.hosts import names_of
from cppbatch.server.settings import ServerSettings

EVIL = "https://evil.example"
PAGE_CODE = "origin_not_allowed"


class Case(NamedTuple):
    """Headers of a request, and whether it is answered. A header that is None is not sent."""

    host: str | None
    origin: str | None = None
    site: str | None = None
    mode: str | None = None


ALLOWED = [
    # No browser: any of the server's names, and any IP address, with any port.
    Case("127.0.0.1:8080"),
    Case("127.0.0.1"),
    Case("127.9.9.9:1"),
    Case("localhost:8080"),
    Case("LocalHost"),
    Case("localhost.:8080"),
    Case("app.localhost:8080"),
    Case("[::1]:8080"),
    Case("[::1]"),
    Case("10.1.2.3:80"),
    Case("192.168.0.7"),
    Case("[fd00::7]:8080"),
    Case("0.0.0.0:8080"),
    Case("llm.corp.example"),
    Case("LLM.corp.example:443"),
    Case("a.models.example:8080"),
    Case("own-name:8080"),
    Case(None),
    # The server's own page.
    Case("127.0.0.1:8080", "http://127.0.0.1:8080"),
    Case("127.0.0.1:8080", "http://127.0.0.1:8080", "same-origin", "cors"),
    Case("127.0.0.1:8080", None, "same-origin", "cors"),
    Case("[::1]:8080", "http://[::1]:8080"),
    Case("10.1.2.3", "http://10.1.2.3"),
    Case("10.1.2.3:8080", "http://10.1.2.3:8080"),
    Case("llm.corp.example", "https://llm.corp.example"),  # behind a proxy with TLS
    Case("llm.corp.example:443", "https://llm.corp.example"),
    Case("llm.corp.example", "https://LLM.corp.example"),
    Case("127.0.0.1:8080", "https://llm.corp.example", "same-origin"),  # behind a proxy that sends a Host of its own
    # An address that was typed, and pages that CORS allows.
    Case("127.0.0.1:8080", None, "none", "navigate"),
    Case("127.0.0.1:8080", "http://localhost:3000", "cross-site", "cors"),
    Case("localhost:8080", "http://localhost:3000", "same-site", "cors"),
    Case("localhost:8080", None, "same-site", "no-cors"),
    Case("127.0.0.1:8080", "https://[::1]:3000"),
    Case("127.0.0.1:8080", "https://app.example", "cross-site", "cors"),
    Case("llm.corp.example", "https://app.example", "cross-site", "cors"),
    Case("127.0.0.1:8080", "vscode-webview://0abc", "cross-site", "cors"),
    Case("127.0.0.1:8080", "file://", "cross-site", "cors"),
    # Programs that show their own pages: no web site has such an origin.
    *(
        Case("127.0.0.1:8080", origin, "cross-site", "cors")
        for origin in (
            "tauri://localhost",
            "http://tauri.localhost",
            "https://tauri.localhost",
            "app://obsidian.md",
            "app://10.1.2.3:8080",
            "vscode-webview://0abc",
            "vscode-file://vscode-app",
            "capacitor://localhost",
        )
    ),
]
"""With --allowed-hosts llm.corp.example,*.models.example, and --cors-origin as in `SETTINGS`."""

WRONG_HOST = [
    Case("evil.example"),
    Case("evil.example:8080"),
    Case("evil.example:8080", "http://evil.example:8080"),  # DNS rebinding
    Case("evil.example:8080", "http://evil.example:8080", "same-origin", "cors"),
    Case("evil.example:8080", "http://localhost:3000"),
    Case("evil.example", None, "none", "navigate"),
    Case("localhost.evil.example"),
    Case("127.0.0.1.evil.example:8080"),
    Case("notlocalhost"),
    Case("corp.example"),
    Case("x.llm.corp.example"),
    Case("models.example"),
    Case("evilmodels.example"),
    Case(""),
    Case("localhost@evil.example"),
    Case("localhost:80:80"),
    Case("localhost:evil"),
    Case("localhost, evil.example"),
    Case("127.0.0.1%evil.example"),
    Case("[::1].evil.example"),
    Case("[evil.example]"),
]

WRONG_PAGE = [
    Case("127.0.0.1:8080", EVIL),
    Case("127.0.0.1:8080", EVIL, "cross-site", "cors"),
    Case("127.0.0.1:8080", EVIL, "cross-site", "no-cors"),
    Case("127.0.0.1:8080", EVIL, "cross-site", "navigate"),  # a form that submits itself
    Case("127.0.0.1:8080", EVIL, "none"),  # an extension
    Case("127.0.0.1:8080", "null"),
    Case("127.0.0.1:8080", "null", "cross-site", "navigate"),  # the same in a sandboxed frame
    Case("127.0.0.1:8080", None, "cross-site", "no-cors"),  # an image
    Case("127.0.0.1:8080", None, "cross-site"),
    Case("127.0.0.1:8080", None, "elsewhere"),
    Case("llm.corp.example", None, "same-site", "no-cors"),
    Case("llm.corp.example", "https://other.corp.example", "same-site", "cors"),
    Case("llm.corp.example", "http://llm.corp.example", "same-site", "cors"),  # the page came over plain HTTP
    Case("127.0.0.1:8080", "http://127.0.0.1.evil.example:8080"),
    Case("127.0.0.1:8080", "http://localhost.evil.example:3000"),
    Case("10.1.2.3:8080", "http://10.1.2.3:3000"),
    Case("10.1.2.3:8080", "http://10.1.2.4:8080"),
    Case("127.0.0.1:8080", "chrome-extension://abcdef", "none"),
    Case("127.0.0.1:8080", "moz-extension://abcdef", "cross-site", "cors"),
    Case("127.0.0.1:8080", "http://tauri.localhost.evil.example", "cross-site", "cors"),
    Case("127.0.0.1:8080", "app:evil"),
    Case("127.0.0.1:8080", "://evil"),
    Case("127.0.0.1:8080", "https://app.example.evil.example"),
    Case("127.0.0.1:8080", ""),
    Case(None, "http://10.1.2.3"),
    Case(None, EVIL),
]

SETTINGS = ServerSettings(
    cors_origins=("localhost", "https://app.example", "file://"),
    allowed_hosts=("llm.corp.example", "*.models.example"),
    own_names=("own-name",),
)


def rules(settings: ServerSettings = SETTINGS) -> CrossSite:
    return CrossSite(settings.host_names, CrossOrigin(settings.origins))


def head_of(case: Case, method: str = "GET", path: str = "/stats", **more: Any) -> RequestHead:
    given = {"host": case.host, "origin": case.origin, "sec-fetch-site": case.site, "sec-fetch-mode": case.mode}
    kind = more.pop("content_type", None)
    headers = {name: (value,) for name, value in {**given, "content-type": kind}.items() if value is not None}
    return RequestHead(method, path, headers, **more)


def code(head: RequestHead, settings: ServerSettings = SETTINGS) -> str | None:
    refused = rules(settings).refusal(head)
    return refused.code if refused else None


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_the_rule_for_every_pair_of_host_and_origin(method: str) -> None:
    assert len(ALLOWED) + len(WRONG_HOST) + len(WRONG_PAGE) >= 80
    found = {case: code(head_of(case, method)) for case in (*ALLOWED, *WRONG_HOST, *WRONG_PAGE)}
    assert [case for case in ALLOWED if found[case]] == []
    assert [case for case in WRONG_HOST if found[case] != "host_not_allowed"] == []
    assert [case for case in WRONG_PAGE if found[case] != PAGE_CODE] == []


def test_without_flags_only_this_machine_and_its_pages_are_answered() -> None:
    plain = ServerSettings()
    assert code(head_of(Case("localhost:8080", "http://127.0.0.1:3000")), plain) is None
    assert code(head_of(Case("llm.corp.example")), plain) == "host_not_allowed"
    for origin in ("vscode-webview://0abc", "app://obsidian.md", "http://tauri.localhost"):
        assert code(head_of(Case("localhost:8080", origin)), plain) is None
    for origin in ("https://app.example", "file://", "chrome-extension://abc"):
        refused = rules(plain).refusal(head_of(Case("localhost:8080", origin)))
        assert refused
        assert f"--cors-origin {origin}" in refused.message
    for settings in (ServerSettings(cors_origins=("none",)), ServerSettings(cors_origins=("https://app.example",))):
        assert code(head_of(Case("localhost:8080", "app://obsidian.md")), settings) == PAGE_CODE


def test_a_link_of_another_site_opens_the_page_and_nothing_else() -> None:
    link = Case("127.0.0.1:8080", None, "cross-site", "navigate")
    assert code(head_of(link, "GET", "/")) is None
    assert code(head_of(link, "HEAD", "/")) is None
    for method, path in [("POST", "/"), ("GET", "/slots"), ("GET", "/v1/files"), ("GET", "/page"), ("GET", "/live")]:
        assert code(head_of(link, method, path)) == PAGE_CODE
    assert code(head_of(link._replace(mode="no-cors"), "GET", "/")) == PAGE_CODE


def test_preflight_requests_are_answered_under_the_servers_names_only() -> None:
    assert code(head_of(Case("127.0.0.1:8080", EVIL, "cross-site", "cors"), "OPTIONS")) is None
    assert code(head_of(Case("evil.example", EVIL, "cross-site", "cors"), "OPTIONS")) == "host_not_allowed"


def test_the_host_of_an_absolute_target_counts_and_that_of_a_proxy_does_not() -> None:
    local = head_of(Case("127.0.0.1"))
    assert code(local._replace(authority="localhost:8080")) is None
    assert code(local._replace(authority="evil.example:8080")) == "host_not_allowed"
    forwarded = {"host": ("evil.example",), "x-forwarded-host": ("localhost",), "forwarded": ("host=localhost",)}
    assert code(local._replace(headers=forwarded)) == "host_not_allowed"
    assert code(local._replace(headers={"host": ("localhost", "evil.example")})) == "host_not_allowed"


FORMS = ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain")


@pytest.mark.parametrize("kind", [None, *FORMS, "text/plain; application/json", "application/octet-stream"])
def test_browsers_must_send_json_and_others_need_not(kind: str | None) -> None:
    own = Case("127.0.0.1:8080", "http://127.0.0.1:8080", "same-origin", "cors")
    for case in (
        own,
        own._replace(site=None),
        own._replace(origin=None),
        Case("127.0.0.1:8080", "https://app.example"),
    ):
        sent = head_of(case, "POST", "/v1/completions", has_body=True, content_type=kind)
        assert code(sent) == "unsupported_media_type"
        assert code(sent._replace(has_body=False)) is None, "such as a POST that cancels a batch"
        assert code(sent._replace(path="/v1/files")) is None, "a form"
    assert code(head_of(Case("127.0.0.1:8080"), "POST", has_body=True, content_type=kind)) is None, "curl"


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/problem+json"])
def test_json_is_what_browsers_may_send(kind: str) -> None:
    own = Case("127.0.0.1:8080", "http://127.0.0.1:8080", "same-origin", "cors")
    assert code(head_of(own, "POST", has_body=True, content_type=kind)) is None


def test_with_keys_any_host_is_answered_unless_names_are_given_and_any_page() -> None:
    keys = Keys(["secret"])
    rebound = head_of(Case("evil.example", EVIL, "cross-site"), "POST", has_body=True, content_type="text/plain")
    assert code(rebound, ServerSettings(keys=keys)) is None
    assert code(rebound, ServerSettings(keys=keys, allowed_hosts=("llm.example",))) == "host_not_allowed"
    assert code(rebound, ServerSettings(keys=keys, cors_origins=("none",))) == PAGE_CODE


def test_a_star_allows_every_host_or_every_page() -> None:
    rebound = head_of(Case("evil.example"))
    assert code(rebound, ServerSettings(allowed_hosts=("*",))) is None
    foreign = head_of(Case("127.0.0.1", "null", "cross-site", "navigate"), "POST")
    assert code(foreign, ServerSettings(cors_origins=("*",))) is None


@pytest.mark.parametrize("host", ["", "http://example.org", "example.org:8080", "a b", "a.*.example"])
def test_an_invalid_host_name_is_refused_at_startup(host: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        ServerSettings(allowed_hosts=(host,))


def test_a_refusal_names_what_was_given_and_what_would_allow_it() -> None:
    messages = {
        Case("llm.lan:8080"): "Host is 'llm.lan:8080', .* --allowed-hosts llm.lan,",
        Case("127.0.0.1", EVIL): f"Origin is '{EVIL}', .* --cors-origin {EVIL} ",
        Case("127.0.0.1", None, "cross-site"): "Sec-Fetch-Site is 'cross-site': .*--cors-origin",
        Case("127.0.0.1", "null"): r"Origin is 'null', .* --cors-origin '\*'",
    }
    for case, message in messages.items():
        refused = rules().refusal(head_of(case))
        assert refused
        assert (refused.status, refused.type) == (403, "permission_error")
        assert re.match(message, refused.message), refused.message


def test_a_server_has_its_name_in_containers_and_if_others_can_reach_it_those_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Box.lan")
    monkeypatch.setattr("socket.getfqdn", lambda _name: "box.corp.example")
    containers = ("host.containers.internal", "host.docker.internal")
    assert names_of(["127.0.0.1", "::1", "localhost"]) == (*containers, "localhost")
    all_names = ("box", "box.corp.example", "box.lan", "box.local", *containers)
    for addresses in (["0.0.0.0"], ["::"], ["192.168.0.7"], ["127.0.0.1", "10.0.0.1"]):
        assert names_of(addresses) == all_names
    assert names_of(["llm.example"]) == (*all_names, "llm.example")


class Reached(NamedTuple):
    """The application on a separate port, with all its middlewares and routes."""

    port: int
    routes: list[tuple[str, str]]
    handlers: list[tuple[str, str]]
    """Methods and paths of the requests that would have come to their handler."""
    unread: list[bool]
    """Of each request: whether its body was left unread."""


class Engine:
    """An engine that is ready and gets no request."""

    def health(self) -> Health:
        return Health(status="ok")


@pytest_asyncio.fixture
async def app() -> AsyncIterator[Reached]:
    app = create_app(Engine(), msgspec.structs.replace(SETTINGS, predict_path="/predict"))  # type: ignore[arg-type]
    reached = Reached(
        0,
        [
            (route.method, re.sub(r"{[^}]*}", "1", route.resource.canonical))
            for route in app.router.routes()
            if route.resource
        ],
        [],
        [],
    )

    @web.middleware
    async def note_unread(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await handler(request)
        reached.unread.append(request.can_read_body)
        return answer

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        reached.handlers.append((request.method, request.path))
        return web.Response(text="reached")

    app.middlewares.insert(0, note_unread)
    app.middlewares.append(answer)
    async with TestServer(app, host="127.0.0.1") as server:
        assert server.port
        yield reached._replace(port=server.port)


class Client:
    """One connection, kept open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, method: str, path: str, case: Case, *, body: bytes = b"{}", n_bytes: int | None = None) -> int:
        """The status of the response. `n_bytes`: what Content-Length says, if not the truth."""
        given = {"Host": case.host, "Origin": case.origin, "Sec-Fetch-Site": case.site, "Sec-Fetch-Mode": case.mode}
        lines = [f"{name}: {value}" for name, value in given.items() if value is not None]
        if method not in ("GET", "HEAD"):
            lines += ["Content-Type: application/json", f"Content-Length: {n_bytes or len(body)}"]
        version = "HTTP/1.0\r\nConnection: keep-alive" if case.host is None else "HTTP/1.1"
        head = "\r\n".join([f"{method} {path} {version}", *lines, "", ""]).encode()
        self._writer.write(head + (b"" if method in ("GET", "HEAD") else body))
        answer = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 5)
        if method != "HEAD" and (length := re.search(rb"Content-Length: (\d+)", answer)):
            await self._reader.readexactly(int(length[1]))
        return int(answer.split()[1])


@contextlib.asynccontextmanager
async def connected(app: Reached) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
    with contextlib.closing(writer):
        yield Client(reader, writer)


def on_every_route(app: Reached, pairs: list[Case]) -> list[tuple[tuple[str, str], Case]]:
    """Two of the pairs on each route, each pair on several."""
    assert 2 * len(app.routes) > 3 * len(pairs)
    return list(zip(app.routes * 2, itertools.cycle(pairs), strict=False))


async def test_on_every_route_an_allowed_pair_reaches_the_handler_and_another_one_does_not(app: Reached) -> None:
    assert len(app.routes) > 60
    async with connected(app) as client:
        for (method, path), case in on_every_route(app, ALLOWED):
            assert await client.send(method, path, case) == 200, (method, path, case)
        assert len(app.handlers) == 2 * len(app.routes)
        app.handlers.clear()
        for (method, path), case in [*on_every_route(app, WRONG_HOST), *on_every_route(app, WRONG_PAGE)]:
            assert await client.send(method, path, case) == 403, (method, path, case)
            assert app.unread[-1] or method in ("GET", "HEAD"), "refused before its body was read"
        assert app.handlers == []


async def test_a_refusal_does_not_wait_for_the_body(app: Reached) -> None:
    async with connected(app) as client:
        assert await client.send("POST", "/v1/files", Case("127.0.0.1", EVIL), body=b"", n_bytes=10**6) == 403


async def test_a_request_with_two_hosts_reaches_no_handler(app: Reached) -> None:
    async with connected(app) as client:
        assert await client.send("GET", "/stats", Case("localhost\r\nHost: evil.example")) == 400
    assert app.handlers == []


async def test_the_host_of_an_absolute_target_is_checked_too(app: Reached) -> None:
    async with connected(app) as client:
        assert await client.send("GET", "http://evil.example/stats", Case("localhost")) == 403
        assert await client.send("GET", "HTTP://user@localhost/stats", Case("localhost")) == 403
        assert await client.send("GET", "http://localhost:8080/stats", Case("localhost")) == 200


async def test_a_client_of_an_old_version_of_http_names_no_host(app: Reached) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
    with contextlib.closing(writer):
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 5)
