"""What a model, a file or a name contains is text: it runs nothing, loads nothing, and does not break the layout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import PageErrors
from tests.browser.hostile import HOSTILE_NAME, LONG_WORD, MARKS, PIECES, RUN, UNMARKED
from tests.browser.page_checks import PHONE, TABS, axe_violations, open_tab, overflow, wait_ready
from tests.support.server_process import ServerProcess


@pytest.fixture
def hostile_url(hostile_server: ServerProcess) -> str:
    return f"{hostile_server.url}/"


def check_safe(page: Page) -> None:
    """Nothing ran, no dangerous element is there, and no width is too narrow for the text."""
    assert page.evaluate(MARKS) == UNMARKED
    for width in (1280, PHONE["width"]):
        page.set_viewport_size({"width": width, "height": 800})
        assert overflow(page) == [], f"{width} px"
    page.set_viewport_size({"width": 1280, "height": 800})
    assert "\n".join(axe_violations(page)) == ""


def ask(chat: Locator, text: str) -> None:
    chat.get_by_role("textbox", name="Message").fill(text)
    chat.get_by_role("button", name="Send").click()
    expect(chat.get_by_role("button", name="Stop")).to_have_count(0)


def test_chat_shows_scripts_and_html_of_a_model_as_text(page: Page, hostile_url: str) -> None:
    chat = open_tab(page, hostile_url, "chat")
    wait_ready(page)
    for text in (f"<script>{RUN}</script>", "".join(PIECES[:6]), LONG_WORD):
        ask(chat, text)
    expect(chat.get_by_role("article", name="Assistant")).to_have_count(3)
    check_safe(page)
    page.reload()
    expect(chat.get_by_role("article", name="Assistant")).to_have_count(3)
    check_safe(page)


def test_links_of_a_model_do_not_run_scripts_and_send_no_referrer(page: Page, hostile_url: str) -> None:
    chat = open_tab(page, hostile_url, "chat")
    wait_ready(page)
    for text in ("links", "more links"):
        ask(chat, text)
    links = page.evaluate("[...document.querySelectorAll('article a[href]')].map((a) => [a.protocol, a.rel, a.target])")
    assert [link for link in links if link[0] not in ("http:", "https:", "mailto:")] == []
    assert [link for link in links if "noopener" not in link[1] and link[2] == "_blank"] == []


def test_the_playground_shows_them_as_text_in_every_cell_and_view(page: Page, hostile_url: str) -> None:
    section = open_tab(page, hostile_url, "playground")
    wait_ready(page)
    section.get_by_label("Prompt", exact=True).fill(f"{RUN} <script>{RUN}</script> {LONG_WORD}")
    section.get_by_label("Samples of each").fill("8")
    section.get_by_role("button", name="Run", exact=True).click()
    expect(section.get_by_role("button", name="Stop all")).to_have_count(0)
    expect(section.get_by_text("<script>").first).to_be_visible()
    check_safe(page)


def test_results_and_names_of_jobs_are_text(page: Page, hostile_url: str) -> None:
    section = open_tab(page, hostile_url, "jobs")
    wait_ready(page)
    lines = [json.dumps({"custom_id": f"<b>{i}</b>{LONG_WORD}", "prompt": piece}) for i, piece in enumerate(PIECES)]
    name, data = f"{HOSTILE_NAME[:100]}.jsonl", "\n".join(lines).encode()
    table = {"name": name, "mimeType": "application/jsonl", "buffer": data}
    section.locator("input[type=file]").first.set_input_files(table)  # type: ignore[arg-type,unused-ignore]
    section.get_by_text("Sampling settings").click()
    section.get_by_label("Maximum tokens").fill("64")
    section.get_by_role("button", name=re.compile(f"^Start {len(PIECES)} lines")).click()
    expect(section.get_by_role("region", name="Results")).to_be_visible()
    expect(section.get_by_text(f"{len(PIECES)} of {len(PIECES)} lines")).to_be_visible()
    check_safe(page)


def test_the_name_of_a_model_is_text_on_every_tab(page: Page, hostile_url: str) -> None:
    for tab in TABS:
        open_tab(page, hostile_url, tab)
        wait_ready(page)
        expect(page.locator("header .model")).to_have_text(HOSTILE_NAME)
        check_safe(page)


SINKS = ("document.body.innerHTML = '<b>x</b>'", "document.createElement('img').setAttribute('onerror', code)")


def test_the_policy_stops_an_inline_script_that_got_into_the_page(page: Page, url: str, errors: PageErrors) -> None:
    errors.allow("Content Security Policy|requires 'TrustedScript'")
    open_tab(page, url)
    with page.expect_console_message():
        page.evaluate(
            """(code) => {
              const script = document.createElement('script')
              script.append(code)
              document.body.append(script)
            }""",
            RUN,
        )
    assert not page.evaluate("'hacked' in window")
    assert "TrustedScript" in "\n".join(errors.found), "and it was the policy that stopped it"


@pytest.mark.parametrize("sink", SINKS)
def test_the_browser_parses_no_text_as_html_or_script(page: Page, url: str, errors: PageErrors, sink: str) -> None:
    """Trusted Types: the page itself has no way to make an element from text."""
    errors.allow("requires 'Trusted")
    open_tab(page, url)
    script = f"(code) => {{ try {{ {sink} }} catch (error) {{ return error.name }} return '' }}"
    assert page.evaluate(script, RUN) == "TypeError"


def test_the_policy_forbids_other_hosts_and_frames(page: Page, url: str, errors: PageErrors) -> None:
    errors.allow("Content Security Policy|Refused to")
    response = page.goto(url)
    assert response
    policy = response.header_value("content-security-policy") or ""
    for rule in ("default-src 'none'", "script-src 'self'", "connect-src 'self'", "frame-ancestors 'none'"):
        assert rule in policy
    assert "unsafe" not in policy
    reached = page.evaluate("fetch('https://example.org/').then(() => true, () => false)")
    assert not reached
    assert "request to another host" not in "\n".join(errors.found), "refused before it was sent"


def test_a_page_of_another_origin_cannot_show_this_one_in_a_frame(
    page: Page, url: str, errors: PageErrors, tmp_path: Path
) -> None:
    errors.allow("frame-ancestors|Refused to|ERR_BLOCKED_BY_RESPONSE")
    frame = tmp_path / "frame.html"
    frame.write_text(f"<!doctype html><title>Frame</title><iframe src='{url}'></iframe>")
    with page.expect_event("requestfailed"):
        page.goto(frame.as_uri())
    assert not page.frames[1].url.startswith("http")  # it may not show the error yet
