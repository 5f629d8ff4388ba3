"""The page while its server loads, ends, starts again, or serves no page."""

from __future__ import annotations

import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect
from server_process import free_port

from tests.browser.conftest import PageErrors, StartServer
from tests.browser.gate import Gate
from tests.browser.page_checks import TABS, open_tab, wait_ready
from tests.support.batch_files import wait_until
from tests.support.server_process import ServerProcess, answers


def health(page: Page, text: str) -> None:
    expect(page.locator("header .health")).to_contain_text(text)


def test_the_page_shows_that_the_model_loads_and_continues_by_itself(
    page: Page, errors: PageErrors, fresh_server: StartServer, tiny_llama: Path
) -> None:
    errors.allow("status of 503")
    port = free_port()
    server = fresh_server("-m", tiny_llama, "-np", "2", "-c", "512", "--port", port, ready=False)
    wait_until(lambda: server.workers)
    (worker,) = server.workers
    worker.send_signal(signal.SIGSTOP)  # the model never gets loaded
    url = f"http://127.0.0.1:{port}/"
    wait_until(lambda: answers(f"{url}health"))
    for tab in TABS:
        open_tab(page, url, tab)
        health(page, "loading the model")
    open_tab(page, url)
    worker.send_signal(signal.SIGCONT)
    wait_ready(page)


def test_the_page_says_that_the_server_is_gone_and_continues_when_it_is_back(
    page: Page, errors: PageErrors, fresh_server: StartServer, tiny_llama: Path
) -> None:
    errors.allow("net::ERR_")
    errors.allow("status of 503")
    port = free_port()
    flags = ("-m", tiny_llama, "-np", "2", "-c", "512", "--port", port)
    first = fresh_server(*flags)
    for tab in TABS:
        open_tab(page, f"{first.url}/", tab)
    wait_ready(page)
    first.stop()
    health(page, "unreachable")
    fresh_server(*flags)
    health(page, "ready")
    for tab in TABS:
        page.evaluate(f"location.hash = '{tab}'")
        expect(page.locator(f"main > section.{tab}")).to_be_visible()
    wait_ready(page)


LONG = "Write a very long story about a lighthouse and everybody who ever lived in it."


def send(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.get_by_role("button", name="Send").click()


def test_a_reload_in_the_middle_of_a_stream_ends_the_request_and_keeps_the_conversation(
    page: Page, server: ServerProcess, url: str
) -> None:
    open_tab(page, url, "chat")
    wait_ready(page)
    send(page, LONG)
    answer = page.get_by_role("article", name="Assistant")
    expect(answer).to_contain_text(re.compile(r"\w+ \w+ \w+ \w+"))
    page.reload()
    server.wait_idle()
    expect(page.get_by_role("article", name="You")).to_contain_text(LONG)
    wait_ready(page)
    send(page, "Say hello.")
    expect(answer.last).to_contain_text(re.compile(r"\w+"))
    page.get_by_role("button", name="Stop").or_(page.get_by_role("button", name="Send")).click()


def test_a_stream_cut_off_by_the_end_of_the_server_says_so_and_can_be_retried(
    page: Page, errors: PageErrors, gate: Gate
) -> None:
    errors.allow("net::ERR_")
    open_tab(page, f"{gate.url}/", "chat")
    wait_ready(page)
    send(page, LONG)
    answer = page.get_by_role("article", name="Assistant").last
    expect(answer).to_contain_text(re.compile(r"\w+ \w+ \w+ \w+"))
    gate.close()
    expect(answer.get_by_role("alert")).to_be_visible()
    health(page, "unreachable")
    gate.open()
    health(page, "ready")
    answer.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("article", name="Assistant").last.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_role("article", name="Assistant").last).to_contain_text(re.compile(r"\w+ \w+"))


def test_a_server_without_the_page_has_its_api_alone(fresh_server: StartServer, tiny_llama: Path) -> None:
    server = fresh_server("-m", tiny_llama, "-np", "2", "-c", "512", "--no-webui")
    assert server.get("/v1/models")["data"]
    with urllib.request.urlopen(server.url, timeout=10) as answer:  # Ollama's clients ask whether a server is there
        assert answer.read() == b"cppbatch is running\n"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server.url}/page/app.js", timeout=10)
    assert refused.value.code == 404


def test_a_tab_first_opened_while_the_server_is_down_appears_when_it_is_back(
    page: Page, errors: PageErrors, gate: Gate
) -> None:
    errors.allow("net::ERR_")
    open_tab(page, f"{gate.url}/")
    wait_ready(page)
    gate.close()
    health(page, "server unreachable")
    page.get_by_role("link", name="Jobs").click()
    expect(page.get_by_text("This part of the page could not be loaded")).to_be_visible()
    gate.open()
    expect(page.get_by_label("Drop prompt files")).to_be_visible(timeout=60_000)


@pytest.mark.parametrize(("failures", "fetches"), [(1, 2), (99, 2)])
def test_a_tab_with_a_failed_module_is_loaded_by_one_reload_of_the_page(
    new_context: Callable[..., BrowserContext], errors: PageErrors, url: str, failures: int, fetches: int
) -> None:
    """Also if the server is back before the page looks; and no endless reloads if the module is missing."""
    page = new_context().new_page()
    errors.allow("net::ERR_")
    seen: list[str] = []

    def fail_at_first(route: Route) -> None:
        seen.append(route.request.url)
        route.abort() if len(seen) <= failures else route.continue_()

    page.route("**/page/jobs/jobs.js", fail_at_first)
    page.clock.install()
    open_tab(page, url)
    wait_ready(page)
    page.get_by_role("link", name="Jobs").click()
    if failures == 1:
        expect(page.get_by_label("Drop prompt files")).to_be_visible()
    else:
        expect(page.get_by_text("This part of the page could not be loaded")).to_be_visible()
        for _ in range(3):  # it asks each second whether the server is back
            with page.expect_response("**/health"):
                page.clock.run_for(1000)
        expect(page.get_by_text("This part of the page could not be loaded")).to_be_visible()
    assert len(seen) == fetches
