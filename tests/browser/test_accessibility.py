"""Accessibility of every tab: axe-core, keyboard only, a phone's width, both themes, reduced motion."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.browser.conftest import LastingPage, PageErrors, make_context
from tests.browser.page_checks import (
    PHONE,
    TABS,
    axe_violations,
    dark,
    focused,
    open_tab,
    overflow,
    phone,
    to_start,
    wait_ready,
    walk_by_tab_key,
)
from tests.support.server_process import ServerProcess

IMPACTS = ("critical", "serious", "moderate", "minor")
REACHABLE = """(tab) => {
  const all = 'a[href], button, input, select, textarea, summary, [tabindex]'
  const isShown = (element) => element.checkVisibility({visibilityProperty: true}) && !element.disabled
    && element.tabIndex >= 0 && element.getBoundingClientRect().width > 0
  const isReached = (element) => element.type !== 'radio' || element.checked
    || !document.querySelector(`input[type=radio][name="${element.name}"]:checked`)
  return [...document.querySelectorAll(`main > section.${tab} :is(${all})`)]
    .filter((element) => isShown(element) && isReached(element)).length
}"""


LAST_PART = {
    "chat": "[aria-label='Example prompts']",
    "playground": ".run-actions",
    "live": ".empty",  # "Nothing is running", with buttons: up to 3 seconds after the last request
    "jobs": "p.muted:has-text('No jobs yet'), h2:text-is('Jobs')",  # the list, or that it is empty
    "models": "tbody tr",
}
"""What a tab draws last, as a selector: before it, controls are added while a test counts them."""


@pytest.fixture(scope="module", params=TABS)
def tab(request: pytest.FixtureRequest) -> str:
    tab: str = request.param
    return tab


@pytest.fixture(scope="module")
def lasting(tab: str, chromium: Browser, server: ServerProcess) -> Iterator[LastingPage]:
    """A whole tab of a server with nothing to do, for all tests that only look at it."""
    server.wait_idle()
    errors = PageErrors()
    page = make_context(chromium, errors).new_page()
    section = open_tab(page, f"{server.url}/", tab)
    wait_ready(page)
    expect(section.locator(LAST_PART[tab]).first).to_be_visible()
    yield LastingPage(page, errors)
    page.context.close()


@pytest.fixture
def opened(lasting: LastingPage) -> Iterator[Page]:
    """It has the light theme and is 1280 x 800."""
    yield lasting.page
    lasting.page.emulate_media(color_scheme="light", reduced_motion="null")
    lasting.page.set_viewport_size({"width": 1280, "height": 800})
    assert not lasting.errors.unexpected, "\n".join(lasting.errors.unexpected)


def violations(page: Page) -> str:
    return "\n".join(axe_violations(page, *IMPACTS))


def test_axe_core_finds_nothing_in_both_themes_and_on_a_phone(opened: Page) -> None:
    assert violations(opened) == ""
    dark(opened)
    phone(opened)
    assert violations(opened) == "", "on a phone, dark"


@pytest.mark.nightly
def test_axe_core_finds_nothing_in_the_other_theme_of_each_size(opened: Page) -> None:
    dark(opened)
    assert violations(opened) == "", "dark"
    opened.emulate_media(color_scheme="light")
    phone(opened)
    assert violations(opened) == "", "on a phone, light"


def test_no_tab_scrolls_sideways(opened: Page) -> None:
    for width in (1280, 768, PHONE["width"]):
        opened.set_viewport_size({"width": width, "height": 740})
        assert overflow(opened) == [], f"{width} px"


def test_the_tab_key_reaches_every_control_and_each_has_a_name_and_a_visible_focus(opened: Page, tab: str) -> None:
    reached = walk_by_tab_key(opened)
    assert [each for each in reached if not each.name] == []
    assert [each for each in reached if not each.outlined] == []
    assert [each for each in reached if not each.visible] == []
    assert sum(each.tab == tab for each in reached) >= opened.evaluate(REACHABLE, tab)
    expect(opened.locator(f"main > section.{tab}")).to_be_visible()


def test_the_keyboard_opens_each_tab_and_skips_the_header(page: Page, url: str) -> None:
    open_tab(page, url)
    wait_ready(page)
    to_start(page)
    page.keyboard.press("Tab")
    here = focused(page)
    assert here
    assert here.name == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    for tab in TABS:
        link = page.get_by_role("navigation").get_by_role("link", name=tab.capitalize(), exact=True)
        link.focus()
        page.keyboard.press("Enter")
        expect(page.locator(f"main > section.{tab}")).to_be_visible()
        expect(link).to_have_attribute("aria-current", "page")
        expect(page).to_have_title(re.compile(f"^{tab.capitalize()}"))  # a screen reader announces the tab


def test_landmarks_and_the_language_are_named(page: Page, url: str) -> None:
    open_tab(page, url)
    assert page.locator("html").get_attribute("lang") == "en"
    for role in ("banner", "navigation", "main"):
        expect(page.get_by_role(role)).to_have_count(1)


def test_the_theme_follows_the_system_until_it_is_chosen_and_the_choice_is_kept(
    new_context: Callable[..., BrowserContext], url: str
) -> None:
    page = new_context(color_scheme="dark").new_page()
    open_tab(page, url)
    background = "getComputedStyle(document.body).backgroundColor"
    dark_colour = page.evaluate(background)
    page.emulate_media(color_scheme="light")
    light_colour = page.evaluate(background)
    assert dark_colour != light_colour
    button = page.get_by_role("button", name="Colours")
    button.click()
    button.click()  # from auto over light to dark
    assert page.evaluate(background) == dark_colour
    page.reload()
    assert page.evaluate(background) == dark_colour


def test_nothing_moves_when_reduced_motion_is_preferred(opened: Page) -> None:
    opened.emulate_media(reduced_motion="reduce")
    # what began before ends; what moves all the time runs into the time limit
    opened.wait_for_function("""() => !document.getAnimations().some((one) => one.playState === 'running'
      && one.effect.getComputedTiming().duration > 10)""")
    transitions = """[...document.querySelectorAll('*')].filter((element) => getComputedStyle(element)
      .transitionDuration.split(',').some((time) => parseFloat(time) > 0.01)).map((element) => element.className)"""
    assert opened.evaluate(transitions) == []
    assert opened.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
