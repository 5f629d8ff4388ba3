"""Accessibility of every tab: axe-core, keyboard only, a phone's width, both themes, reduced motion."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import BrowserContext, Page, expect

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


@pytest.mark.parametrize("tab", TABS)
def test_axe_core_finds_nothing_in_both_themes_and_on_a_phone(page: Page, url: str, tab: str) -> None:
    open_tab(page, url, tab)
    wait_ready(page)
    assert "\n".join(axe_violations(page, *IMPACTS)) == ""
    dark(page)
    assert "\n".join(axe_violations(page, *IMPACTS)) == "", "dark"
    phone(page)
    assert "\n".join(axe_violations(page, *IMPACTS)) == "", "on a phone, dark"


@pytest.mark.parametrize("tab", TABS)
def test_no_tab_scrolls_sideways(page: Page, url: str, tab: str) -> None:
    open_tab(page, url, tab)
    wait_ready(page)
    for width in (1280, 768, PHONE["width"]):
        page.set_viewport_size({"width": width, "height": 740})
        assert overflow(page) == [], f"{width} px"


@pytest.mark.parametrize("tab", TABS)
def test_the_tab_key_reaches_every_control_and_each_has_a_name_and_a_visible_focus(
    page: Page, url: str, tab: str
) -> None:
    section = open_tab(page, url, tab)
    wait_ready(page)
    reached = walk_by_tab_key(page)
    assert [each for each in reached if not each.name] == []
    assert [each for each in reached if not each.outlined] == []
    assert [each for each in reached if not each.visible] == []
    assert sum(each.tab == tab for each in reached) >= page.evaluate(REACHABLE, tab)
    expect(section).to_be_visible()


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


@pytest.mark.parametrize("tab", TABS)
def test_nothing_moves_when_reduced_motion_is_preferred(
    new_context: Callable[..., BrowserContext], url: str, tab: str
) -> None:
    page = new_context(reduced_motion="reduce").new_page()
    open_tab(page, url, tab)
    wait_ready(page)
    moving = """document.getAnimations().filter((one) => one.playState === 'running'
      && one.effect.getComputedTiming().duration > 10).map((one) => one.effect.target.outerHTML.slice(0, 120))"""
    assert page.evaluate(moving) == []
    transitions = """[...document.querySelectorAll('*')].filter((element) => getComputedStyle(element)
      .transitionDuration.split(',').some((time) => parseFloat(time) > 0.01)).map((element) => element.className)"""
    assert page.evaluate(transitions) == []
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
