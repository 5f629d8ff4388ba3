"""The page is small, usable quickly, and served by this server alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import BrowserContext, Page, Response, expect

from cppbatch.server.web_page import page_files
from tests.browser.conftest import PageErrors
from tests.browser.page_checks import TABS, open_tab, wait_ready
from tests.support.server_process import ServerProcess

MAX_BYTES = 305_000
MAX_FIRST = 20
MAX_FIRST_VISIT = 62_183  # bytes: what it was before files in the chat, diagrams and models from the page
ON_DEMAND = (
    "vendor/katex/", "vendor/highlight/", "vendor/mermaid.js", "formula.js", "highlight.js", "diagram",
    "chat/context_meter.js", "chat/exchange.js", "chat/conversation_files.js", "chat/settings_dialog.js",
    "chat/rename_dialog.js", "models/hub_dialog.js", "chat/attachments.js", "documents.js", "jobs/job_files.js",
)  # fmt: skip
MAX_MS = 200


@pytest.fixture
def page(new_context: Callable[..., BrowserContext]) -> Page:
    """With an empty cache."""
    return new_context().new_page()


def is_page(url: str) -> bool:
    path = urlsplit(url).path
    return path == "/" or path.startswith("/page/")


USABLE = """
new MutationObserver((changes, observer) => {
  if (!document.querySelector('main > section.chat textarea:not(:disabled)')) return
  observer.disconnect()
  requestAnimationFrame(() => setTimeout(() => { window.usableAfter = performance.now() }))
}).observe(document, {childList: true, subtree: true, attributes: true})
"""


def test_all_tabs_load_only_from_this_server_and_less_than_305_kb(page: Page, server: ServerProcess, url: str) -> None:
    """As a browser gets it, compressed."""
    responses: list[Response] = []
    page.on("response", lambda response: responses.append(response))  # noqa: PLW0108  # Playwright marks its handlers
    open_tab(page, url)
    expect(page.locator("main > section.chat textarea")).to_be_enabled()
    assert len(responses) <= MAX_FIRST, "until the first tab takes input"
    expect(page.get_by_role("group", name="Example prompts")).to_be_visible()
    page.wait_for_load_state("networkidle")  # what is loaded after the first view
    assert (
        sum(response.request.sizes()["responseBodySize"] for response in responses if is_page(response.url))
        <= MAX_FIRST_VISIT
    )
    for tab in TABS:
        open_tab(page, url, tab)
    wait_ready(page)
    files = [response for response in responses if urlsplit(response.url).path.startswith("/page/")]
    assert len(files) > 10
    assert {f"{urlsplit(r.url).scheme}://{urlsplit(r.url).netloc}" for r in responses} == {server.url}
    assert sum(response.request.sizes()["responseBodySize"] for response in files) < MAX_BYTES


def test_all_files_but_libraries_that_are_loaded_on_demand_weigh_less_than_305_kb_as_they_are() -> None:
    """Not compressed. The licences of the libraries are in the same folder, and are not served."""
    sizes = {name: len(file.content) for name, file in page_files().items() if not name.startswith(ON_DEMAND)}
    assert {"index.html", "app.js", "style.css", "vendor/preact.js"} <= sizes.keys()
    assert sum(sizes.values()) < MAX_BYTES, sorted(sizes.items(), key=lambda item: -item[1])[:10]


def test_libraries_for_formulas_and_code_are_loaded_when_an_answer_has_them(page: Page, url: str) -> None:
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url.partition("/page/")[2]))
    open_tab(page, url)
    wait_ready(page)
    expect(page.get_by_role("group", name="Example prompts")).to_be_visible()  # the last part
    for tab in TABS:
        open_tab(page, url, tab)
    assert "markdown.js" in loaded
    assert [name for name in loaded if name.startswith(ON_DEMAND)] == []


def test_a_second_visit_transfers_no_file_again(page: Page, url: str) -> None:
    open_tab(page, url)
    wait_ready(page)
    expect(page.get_by_role("group", name="Example prompts")).to_be_visible()  # the last part
    statuses: dict[str, int] = {}
    page.on("response", lambda response: statuses.update({urlsplit(response.url).path: response.status}))
    page.goto("about:blank")
    open_tab(page, url)
    wait_ready(page)
    transferred = page.evaluate(
        "performance.getEntriesByType('resource').filter((one) => one.name.includes('/page/'))"
        ".reduce((sum, one) => sum + one.encodedBodySize * (one.transferSize > 300 ? 1 : 0), 0)"
    )
    assert transferred == 0, statuses


@pytest.mark.soak
def test_the_page_is_usable_within_200_ms(
    new_context: Callable[..., BrowserContext], errors: PageErrors, url: str
) -> None:
    """From the start of the navigation, with an empty cache, until the first tab accepts input.

    Loading one small image in the same way calibrates for slow machines: the page may take 4 times as long. The
    lower quartile of 9 loads of each, alternately: other programs only make one longer.
    """
    errors.allow("favicon.ico")  # which Chromium requests besides the image
    times, picture_times = [], []
    for _ in range(9):
        page = new_context().new_page()
        page.add_init_script(USABLE)
        page.goto(url)
        expect(page.locator("main > section.chat textarea")).to_be_enabled()
        times.append(page.evaluate("new Promise((done) => setTimeout(() => done(window.usableAfter), 50))"))
        page.close()
        picture = new_context().new_page()
        picture.goto(f"{url}page/icon.svg")
        picture_times.append(picture.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
        picture.close()
    usable, shown = (statistics.quantiles(each, n=4)[0] for each in (times, picture_times))
    assert usable < max(MAX_MS, 4 * shown), (times, picture_times)
