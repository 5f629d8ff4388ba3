"""One `cppbatch serve` with the default model and one Chromium for all tests; every test gets a separate page."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.browser.chromium import NoChromiumError, find_chromium
from tests.support.server_process import ServerProcess

FLAGS = (
    "--no-sandbox",  # root, and containers without user namespaces
    "--disable-dev-shm-usage",
    "--disable-gpu",
    # no other host can be reached; names below .test are this machine, for pages of other sites
    "--host-resolver-rules=MAP *.test 127.0.0.1 , MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
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

    def watch(self, context: BrowserContext) -> None:
        """Listens to all pages of a browser context."""
        context.on("console", self._on_console)
        context.on("weberror", lambda error: self._found.append(f"exception: {error.error}"))
        context.on("request", self._on_request)
        context.on("requestfailed", self._on_failure)

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
def server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The server of all tests that need no special flags. Its data folder is empty at the start."""
    data = tmp_path_factory.mktemp("server-data")
    with ServerProcess("-m", default_model, "--data-dir", data) as process:
        yield process.wait_ready()


@pytest.fixture
def url(server: ServerProcess) -> str:
    """Of the page, without a tab: http://127.0.0.1:PORT/"""
    return f"{server.url}/"


@pytest.fixture
def fresh_server(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts a server with these flags and a separate data folder, and ends it after the test.

    `ready=False`: does not wait for it. Name the model with -m: `default_model`, or a tiny one.
    """
    with contextlib.ExitStack() as stack:
        count = 0

        def start(*flags: str | Path, ready: bool = True) -> ServerProcess:
            nonlocal count
            count += 1
            process = stack.enter_context(ServerProcess("--data-dir", tmp_path / f"data-{count}", *flags))
            return process.wait_ready() if ready else process

        yield start


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


@pytest.fixture
def new_context(chromium: Browser, errors: PageErrors, fresh_server: object) -> Iterator[Callable[..., BrowserContext]]:
    """Makes browser contexts (each with its own storage, cache and settings) that are watched for errors.

    They are closed before the servers of `fresh_server` end.
    """
    with contextlib.ExitStack() as stack:

        def new_context(**options: object) -> BrowserContext:
            settings = {"viewport": {"width": 1280, "height": 800}, "locale": "en-US", **options}
            context = chromium.new_context(**settings)
            stack.callback(context.close)
            context.set_default_timeout(TIMEOUT_MS)
            context.grant_permissions(["clipboard-read", "clipboard-write"])
            errors.watch(context)
            return context

        yield new_context


@pytest.fixture
def page(new_context: Callable[..., BrowserContext]) -> Page:
    """An empty page in a separate context: nothing stored, light theme, 1280 x 800."""
    return new_context().new_page()
