"""A server with an API key: the page asks for it once, keeps it, never shows it, and forgets it on demand."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, Request, expect

from tests.browser.conftest import PageErrors, StartServer
from tests.browser.page_checks import TABS, axe_violations, open_tab, overflow, phone, wait_ready
from tests.support.server_process import ServerProcess

KEY = "sk-right-key"


@pytest.fixture(scope="module")
def keyed_server(tiny_llama: Path, lasting_server: StartServer) -> ServerProcess:
    return lasting_server("-m", tiny_llama, "-np", "2", "-c", "512", "--api-key", KEY)


@pytest.fixture
def keyed_url(keyed_server: ServerProcess, errors: PageErrors) -> str:
    errors.allow("status of 401")
    return f"{keyed_server.url}/"


def key_dialog(page: Page) -> Locator:
    return page.get_by_role("dialog", name="API key")


def give_key(page: Page, key: str) -> None:
    key_dialog(page).get_by_label("Key", exact=True).fill(key)
    key_dialog(page).get_by_role("button", name="Use key").click()


def test_without_a_key_the_page_asks_once_and_reports_a_wrong_one(page: Page, keyed_url: str) -> None:
    page.goto(keyed_url)
    expect(key_dialog(page)).to_have_count(1)
    give_key(page, "sk-wrong-key")
    expect(key_dialog(page).get_by_role("alert")).to_have_text("The server rejected this key.")
    assert page.evaluate("Object.values(localStorage).join()").find("sk-wrong-key") < 0, "a refused key is not kept"
    give_key(page, KEY)
    expect(key_dialog(page)).to_have_count(0)
    wait_ready(page)


def test_the_key_is_kept_after_a_reload_and_serves_every_tab(page: Page, keyed_url: str) -> None:
    page.goto(keyed_url)
    give_key(page, KEY)
    wait_ready(page)
    page.reload()
    for tab in TABS:
        open_tab(page, keyed_url, tab)
        wait_ready(page)
        expect(key_dialog(page)).to_have_count(0)


def test_the_key_is_in_no_url_no_cookie_and_no_text_of_the_page(page: Page, keyed_url: str) -> None:
    requests: list[Request] = []
    page.on("request", lambda request: requests.append(request))  # noqa: PLW0108  # Playwright marks its handlers
    page.goto(keyed_url)
    give_key(page, KEY)
    for tab in TABS:
        open_tab(page, keyed_url, tab)
        wait_ready(page)
        assert KEY not in page.url
        assert KEY not in page.content()
    assert [request.url for request in requests if KEY in request.url] == []
    assert page.context.cookies() == []
    sent = [request for request in requests if request.all_headers().get("authorization") == f"Bearer {KEY}"]
    assert sent, "in a header"


def test_a_key_can_be_forgotten(page: Page, keyed_url: str) -> None:
    page.goto(keyed_url)
    give_key(page, KEY)
    wait_ready(page)
    page.get_by_role("button", name="API key").click()
    key_dialog(page).get_by_role("button", name="Forget key").click()
    assert KEY not in page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
    page.reload()
    expect(key_dialog(page)).to_be_visible()


def test_an_invalidated_key_is_asked_for_again(page: Page, keyed_url: str) -> None:
    page.goto(keyed_url)
    page.evaluate("localStorage.setItem('cppbatch.key', 'sk-of-last-year')")
    page.reload()
    expect(key_dialog(page)).to_contain_text("rejected the API key saved in this browser")
    give_key(page, KEY)
    wait_ready(page)


def test_without_keys_the_page_asks_for_no_key(page: Page, url: str) -> None:
    for tab in TABS:
        open_tab(page, url, tab)
    wait_ready(page)
    expect(key_dialog(page)).to_have_count(0)
    expect(page.get_by_role("button", name="API key")).to_have_count(0)


def test_the_dialog_is_usable_by_keyboard_on_a_phone_and_by_a_screen_reader(page: Page, keyed_url: str) -> None:
    phone(page)
    page.goto(keyed_url)
    expect(key_dialog(page).get_by_label("Key", exact=True)).to_be_focused()
    assert overflow(page) == []
    assert "\n".join(axe_violations(page)) == ""
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    expect(key_dialog(page)).to_have_count(0)
    wait_ready(page)
