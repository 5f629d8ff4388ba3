"""The Chat tab while something is wrong or missing: errors with remedies, a model that loads, no template."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Request, Route, expect

from tests.browser.conftest import PageErrors
from tests.browser.gate import Gate
from tests.browser.page_checks import axe_violations, open_tab, wait_ready
from tests.browser.test_chat import (
    ANSWERED,
    CHAT,
    answer_with,
    answered,
    ask,
    messages,
    send,
    send_without_end,
    settings,
)
from tests.support.server_process import ServerProcess


@pytest.fixture
def chat(page: Page, url: str) -> Page:
    open_tab(page, url)
    wait_ready(page)
    return page


def refusal(status: int, message: str, **fields: Any) -> Callable[[Route], None]:
    body = json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": None, **fields}})
    return lambda route: route.fulfill(
        status=status, content_type="application/json", body=body, headers={"Retry-After": "0.1"}
    )


@pytest.mark.parametrize(
    ("status", "message", "shown"),
    [
        (429, "the queue is full", "The server is busy: the queue is full. Try again"),
        (503, "the model is still loading (40%)", "is not accepting requests: the model is still loading (40%). Try"),
        (403, "no adapter", "The API key does not allow this: no adapter."),
        (500, "internal error", "The answer failed: internal error."),
    ],
)
def test_an_error_names_the_remedy(chat: Page, errors: PageErrors, status: int, message: str, shown: str) -> None:
    errors.allow(f"status of {status}")
    chat.route(CHAT, refusal(status, message))
    send(chat, "Hello")
    expect(chat.get_by_role("alert")).to_contain_text(shown, timeout=20_000)
    chat.unroute(CHAT)
    answer_with(chat, "Here I am.")
    chat.get_by_role("button", name="Try again").click()
    assert answered(chat) == "Here I am."
    expect(chat.get_by_role("alert")).to_have_count(0)


def test_a_busy_server_is_retried_after_its_retry_after(chat: Page, errors: PageErrors) -> None:
    errors.allow("status of 429")
    times: list[float] = []

    def busy_once(route: Route, _request: Request) -> None:
        times.append(time.monotonic())
        if len(times) == 1:
            body = '{"error": {"message": "the queue is full"}}'
            route.fulfill(status=429, headers={"Retry-After": "1"}, content_type="application/json", body=body)
        else:
            route.continue_()

    chat.route(CHAT, busy_once)
    settings(chat, Maximum_tokens="4")
    assert ask(chat, "Hello")
    assert len(times) == 2
    assert times[1] - times[0] >= 1


def test_a_conversation_that_is_too_long_for_the_context_says_so(
    page: Page, errors: PageErrors, small_server: ServerProcess
) -> None:
    errors.allow("status of 400")
    open_tab(page, f"{small_server.url}/")
    wait_ready(page)
    send(page, "many words " * 300)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text(re.compile(r"does not fit into the model’s context \([\d,]+ of 512 tokens\): delete"))
    expect(alert.get_by_text("maximum context length")).to_be_hidden()
    alert.get_by_text("What the server says").click()
    expect(alert.get_by_text("maximum context length")).to_be_visible()
    expect(page.locator(".toast")).to_have_count(0)


def test_a_message_that_could_not_be_sent_is_said_to_be_kept_and_a_part_of_an_answer_only_if_there_is_one(
    chat: Page, errors: PageErrors
) -> None:
    errors.allow("ERR_CONNECTION_REFUSED|ERR_FAILED")
    chat.route(CHAT, lambda route: route.abort("connectionrefused"))
    send(chat, "Hello")
    expect(chat.get_by_role("alert")).to_contain_text("Cannot reach the server. Your message is kept: try again.")
    assert "answer" not in chat.get_by_role("alert").inner_text()


def test_a_model_that_loads_on_demand_shows_how_far_it_is(chat: Page) -> None:
    progress = [0.4, 0.7]

    def two_models(route: Route) -> None:
        own = route.fetch().json()["data"][0]
        value = progress.pop(0) if len(progress) > 1 else progress[0]
        status = {"value": "loading", "progress": value}
        route.fulfill(json={"data": [own | {"id": "one", "status": status}, own | {"id": "two", "status": status}]})

    held: list[Route] = []
    chat.route("**/v1/models", two_models)
    chat.route(CHAT, lambda route: held.append(route))  # noqa: PLW0108  # Playwright marks its handlers
    chat.reload()
    chat.get_by_role("combobox", name="Model").select_option("two")
    progress[:] = [0.4, 0.4, 0.7]
    send(chat, "Hello")
    waiting = messages(chat, "assistant").locator(".waiting")
    expect(waiting).to_have_text("Loading two: 40% …")
    expect(waiting).to_have_text("Loading two: 70% …")
    held.pop().abort("aborted")
    expect(waiting).to_have_count(0)


def test_a_message_is_shown_at_once_although_the_page_is_still_being_loaded(page: Page, url: str) -> None:
    held: list[Route] = []
    page.route("**/chat/messages.js", lambda route: held.append(route))  # noqa: PLW0108  # Playwright marks its handlers
    answer_with(page, "**Yes.**")
    with page.expect_request("**/chat/messages.js"):
        open_tab(page, url)
        wait_ready(page)
        send(page, "Is it shown?")
    expect(messages(page, "user")).to_have_text("Is it shown?", timeout=2000)
    held.pop().continue_()
    expect(messages(page, "assistant").locator("strong")).to_have_text("Yes.")
    expect(messages(page, "user").locator(".plain")).to_have_text("Is it shown?")


@pytest.mark.parametrize("has_template", [True, False])
def test_a_file_without_chat_template_is_named_above_the_message_field(
    page: Page, url: str, has_template: bool
) -> None:
    def props(route: Route) -> None:
        route.fulfill(json=route.fetch().json() | {"has_chat_template": has_template})

    page.route("**/props*", props)
    open_tab(page, url)
    wait_ready(page)
    said = page.get_by_text("This file has no chat template")
    expect(said).to_have_count(0 if has_template else 1)
    if not has_template:
        expect(said).to_contain_text("Messages are sent in ChatML")
        assert axe_violations(page) == []


def test_a_server_that_ends_leaves_the_text_so_far(page: Page, errors: PageErrors, gate: Gate) -> None:
    errors.allow("ERR_CONNECTION|ERR_INCOMPLETE|ERR_EMPTY_RESPONSE")
    open_tab(page, f"{gate.url}/")
    wait_ready(page)
    send_without_end(page)
    expect(messages(page, "assistant").locator(".markdown")).not_to_be_empty(timeout=ANSWERED)
    gate.close()
    expect(page.get_by_role("alert")).to_contain_text("Lost the connection to the server")
    assert messages(page, "assistant").locator(".markdown").text_content()
    expect(page.get_by_role("button", name="Continue")).to_be_visible()
