"""The fixtures detect the errors that they are meant to detect."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import BrowserContext

from tests.browser.conftest import PageErrors
from tests.browser.page_checks import axe_violations, overflow, walk_by_tab_key


def test_errors_of_a_page_are_noticed_and_can_be_allowed(
    new_context: Callable[..., BrowserContext], errors: PageErrors
) -> None:
    page = new_context().new_page()
    page.set_content("<script>console.error('one'); setTimeout(() => { throw new Error('two') })</script>")
    page.evaluate("fetch('https://example.org/three').catch(() => {})")
    page.wait_for_function("new Promise((done) => setTimeout(() => done(true), 50))")
    found = "\n".join(errors.unexpected)
    assert "console: one" in found
    assert "exception: two" in found
    assert "request to another host: https://example.org/three" in found
    assert "ERR_NAME_NOT_RESOLVED" in found, "and it was not reached"
    errors.allow("one|two|example.org|ERR_NAME_NOT_RESOLVED")
    assert not errors.unexpected


def test_missing_labels_wide_elements_and_the_tab_key_are_seen(new_context: Callable[..., BrowserContext]) -> None:
    page = new_context(viewport={"width": 360, "height": 740}).new_page()
    page.set_content("<main><h1>Title</h1><input id=i><button class=w>Send</button></main><a href='#x'>Next</a>")
    assert overflow(page) == []
    rules = [line.split(":")[0] for line in axe_violations(page)]
    assert rules == ["document-title (serious)", "html-has-lang (serious)", "label (critical)"]
    assert [(e.tag, e.name) for e in walk_by_tab_key(page)] == [("input", ""), ("button", "Send"), ("a", "Next")]
    page.add_style_tag(content=".w { width: 500px }")
    assert overflow(page) == ["button.w"]
