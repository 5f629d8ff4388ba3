"""One paced `cppbatch serve` of `page_model` and one Chromium for all tests; every test gets a separate page."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    WebError,
    expect,
    sync_playwright,
)

from tests.browser.chromium import NoChromiumError, find_chromium
from tests.browser.gate import Gate
from tests.browser.hostile import HOSTILE_NAME, write_hostile_model
from tests.browser.page_model import write_page_model
from tests.support.server_process import ServerProcess

FLAGS = (
    "--no-sandbox",  # root, and containers without user namespaces
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--process-per-site",  # pages of a context share a process
    # no other host can be reached; names below .test are this machine, for pages of other sites
    "--host-resolver-rules=MAP *.test 127.0.0.1 , MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
EMPTY: dict[str, Any] = {
    "content_type": "text/html",
    "headers": {"Cross-Origin-Opener-Policy": "same-origin"},  # as the page's: else it is opened in another process
    "body": "<!doctype html><title>Empty</title><link rel=icon href=data:,>",
}
PACED = "tests.support.paced_server"
TIMEOUT_MS = 30_000  # of `expect` and of actions: machines that run tests are busy
expect.set_options(timeout=TIMEOUT_MS)


class PageErrors:
    """The errors in the pages of a test: console errors, exceptions, failed requests, requests to other hosts.

    A test that causes an error declares it with `allow`; any other error fails it when it ends.
    """

    def __init__(self) -> None:
        self._found: list[str] = []
        self._allowed: list[re.Pattern[str]] = []

    def allow(self, pattern: str) -> None:
        """Errors in which this regular expression is found are part of the test, such as r"status of 401"."""
        self._allowed.append(re.compile(pattern))

    @property
    def found(self) -> list[str]:
        """All of them, allowed or not."""
        return list(self._found)

    @property
    def unexpected(self) -> list[str]:
        return [error for error in self._found if not any(pattern.search(error) for pattern in self._allowed)]

    def forget(self) -> None:
        """Those so far are not of this test."""
        self._found.clear()

    def watch(self, context: BrowserContext) -> None:
        """Listens to all pages of a browser context."""
        for event, listener in self._listeners:
            context.on(event, listener)

    def unwatch(self, context: BrowserContext) -> None:
        for event, listener in self._listeners:
            context.remove_listener(event, listener)

    @property
    def _listeners(self) -> tuple[tuple[Any, Callable[[Any], None]], ...]:
        return (
            ("console", self._on_console),
            ("weberror", self._on_exception),
            ("request", self._on_request),
            ("requestfailed", self._on_failure),
        )

    def _on_exception(self, error: WebError) -> None:
        self._found.append(f"exception: {error.error}")

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._found.append(f"console: {message.text} ({message.location.get('url')})")

    def _on_request(self, request: Request) -> None:
        url = urlsplit(request.url)
        if url.scheme in ("http", "https", "ws", "wss") and url.hostname != "127.0.0.1":
            self._found.append(f"request to another host: {request.url}")

    def _on_failure(self, request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page itself ended it, or was left
            self._found.append(f"failed request: {request.method} {request.url}: {request.failure}")


@pytest.fixture(scope="session")
def page_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes words until it is stopped: its texts do not end while a test looks at them."""
    return write_page_model(tmp_path_factory.mktemp("page-model") / "words.gguf")


StartServer = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def lasting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts servers with these flags and separate data folders, and ends them after all tests."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str | Path, module: str = "cppbatch") -> ServerProcess:
            data = tmp_path_factory.mktemp("server-data")
            return stack.enter_context(ServerProcess("--data-dir", data, *flags, module=module)).wait_ready()

        yield start


@pytest.fixture(scope="session")
def server(page_model: Path, lasting_server: StartServer) -> ServerProcess:
    """The server of all tests that need no special flags: 16 sequences at once in one set of cells."""
    flags = ("-np", "16", "-c", "131072", "--kv-layout", "unified", "--spec", "off")
    return lasting_server("-m", page_model, *flags, module=PACED)


@pytest.fixture
def url(server: ServerProcess) -> str:
    """Of the page, without a tab: http://127.0.0.1:PORT/"""
    return f"{server.url}/"


@pytest.fixture(scope="session")
def small_server(tiny_llama: Path, lasting_server: StartServer) -> ServerProcess:
    """A server with low limits: 512 tokens of context, 3 prompts in a request, files of 1 MB."""
    limits = ("--max-prompts-per-batch", "3", "--max-file-mb", "1")
    return lasting_server("-m", tiny_llama, "-np", "2", "-c", "512", *limits)


@pytest.fixture(scope="session")
def hostile_server(tmp_path_factory: pytest.TempPathFactory, lasting_server: StartServer) -> ServerProcess:
    """A server with a model that writes HTML and scripts, and with HTML in its name, `HOSTILE_NAME`."""
    model = write_hostile_model(tmp_path_factory.mktemp("hostile") / "hostile.gguf")
    sampling = ("--temp", "2", "--top-k", "0", "--top-p", "1", "--min-p", "0", "-n", "40", "--seed", "5")
    return lasting_server("-m", model, "--alias", HOSTILE_NAME, "-np", "8", "-c", "16384", *sampling)


@pytest.fixture
def afterwards() -> Iterator[contextlib.ExitStack]:
    """Ends what the test's pages need, after them."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def gate(server: ServerProcess, afterwards: contextlib.ExitStack) -> Gate:
    """An address of `server` that can be closed."""
    gate = Gate(server.url)
    afterwards.callback(gate.close)
    return gate


@pytest.fixture
def fresh_server(tmp_path: Path, afterwards: contextlib.ExitStack) -> StartServer:
    """Starts a server with these flags and a separate data folder, and ends it after the test.

    `ready=False`: does not wait for it. Name the model with -m: `page_model`, or another tiny one.
    """
    numbers = itertools.count(1)

    def start(*flags: str | Path, ready: bool = True, module: str = PACED) -> ServerProcess:
        data = tmp_path / f"data-{next(numbers)}"
        process = afterwards.enter_context(ServerProcess("--data-dir", data, *flags, module=module))
        return process.wait_ready() if ready else process

    return start


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    try:
        path = find_chromium()
    except NoChromiumError as error:
        pytest.exit(str(error), returncode=1)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def errors() -> Iterator[PageErrors]:
    """Fails the test when its pages had errors that it did not allow."""
    errors = PageErrors()
    yield errors
    assert not errors.unexpected, "\n".join(errors.unexpected)


def make_context(chromium: Browser, errors: PageErrors | None = None, **options: object) -> BrowserContext:
    settings = {"viewport": {"width": 1280, "height": 800}, "locale": "en-US", **options}
    context = chromium.new_context(**settings)
    context.set_default_timeout(TIMEOUT_MS)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    if errors:
        errors.watch(context)
    return context


@pytest.fixture
def new_context(
    chromium: Browser, errors: PageErrors, afterwards: contextlib.ExitStack
) -> Iterator[Callable[..., BrowserContext]]:
    """Makes browser contexts (each with its own storage, cache and settings) that are watched for errors."""
    with contextlib.ExitStack() as stack:

        def new_context(**options: object) -> BrowserContext:
            context = make_context(chromium, errors, **options)
            stack.callback(context.close)
            return context

        yield new_context


class SharedContext:
    """A browser context of many tests, one after the other, of which only the cache outlives a test.

    All its pages of one server share a process, that of `url`, which stays open. A context and a process for each test
    took most of the tests' CPU time.
    """

    def __init__(self, chromium: Browser, url: str) -> None:
        self._context = make_context(chromium)
        self._first = self._context.new_page()
        self._first.route(url, lambda route: route.fulfill(**EMPTY))
        self._first.goto(url)
        self._devtools = self._context.new_cdp_session(self._first)
        self._origins: set[str] = set()

    @contextlib.contextmanager
    def lend_page(self, errors: PageErrors) -> Iterator[Page]:
        errors.watch(self._context)
        self._context.on("request", self._on_request)
        with self._first.expect_popup() as opened:  # a page that has no opener has a process of its own at first
            self._first.evaluate("() => { window.open('about:blank') }")
        yield opened.value
        for page in self._context.pages:
            if page != self._first:
                page.close()
        self._context.remove_listener("request", self._on_request)
        errors.unwatch(self._context)
        for origin in self._origins:
            self._devtools.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})
        self._origins.clear()

    def _on_request(self, request: Request) -> None:
        url = urlsplit(request.url)
        if url.scheme == "http":
            self._origins.add(f"http://{url.netloc}")


@pytest.fixture(scope="session")
def shared_context(chromium: Browser, server: ServerProcess) -> SharedContext:
    return SharedContext(chromium, f"{server.url}/empty")


@pytest.fixture
def page(shared_context: SharedContext, errors: PageErrors, afterwards: contextlib.ExitStack) -> Iterator[Page]:
    """An empty page: nothing stored, light theme, 1280 x 800.

    Its context is that of other tests, and keeps files of the page in its cache and a clock that was installed: a test
    to which these matter takes a page of `new_context`.
    """
    with shared_context.lend_page(errors) as page:
        yield page


class LastingPage(NamedTuple):
    page: Page
    errors: PageErrors


@pytest.fixture(scope="session")
def lasting_pages(chromium: Browser, server: ServerProcess) -> Iterator[Callable[[str], LastingPage]]:
    """Opens the page at a path once for all tests that leave nothing behind in it."""
    pages: dict[str, LastingPage] = {}

    def open_once(path: str) -> LastingPage:
        if path not in pages:
            errors = PageErrors()
            page = make_context(chromium, errors).new_page()
            page.goto(server.url + path)
            pages[path] = LastingPage(page, errors)
        return pages[path]

    yield open_once
    for each in pages.values():
        each.page.context.close()


@pytest.fixture
def drawing(lasting_pages: Callable[[str], LastingPage]) -> Iterator[Page]:
    """A page for tests that only draw texts in it (`page_checks.draw`)."""
    page, errors = lasting_pages("/")
    errors.forget()
    yield page
    page.evaluate("window.box?.remove(); window.box = undefined")
    assert not errors.unexpected, "\n".join(errors.unexpected)


@pytest.fixture
def modules(lasting_pages: Callable[[str], LastingPage]) -> Iterator[Page]:
    """A page for tests that only import modules of the page and call their functions."""
    page, errors = lasting_pages("/page/icon.svg")
    errors.allow("favicon")  # an image that is opened alone names no icon
    errors.forget()
    yield page
    assert not errors.unexpected, "\n".join(errors.unexpected)
