"""What tests of several tabs ask of a page: accessibility, overflow, keyboard focus, themes, phone width."""

from __future__ import annotations

import json
import statistics
from typing import Any, NamedTuple

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Browser, Locator, Page, expect

TABS = ("chat", "playground", "live", "jobs", "models")
PHONE = {"width": 360, "height": 740}


def open_tab(page: Page, url: str, tab: str = "chat") -> Locator:
    """Opens the page at a tab, and waits until the tab is drawn. Returns the tab's section."""
    page.goto(f"{url}#{tab}")
    section = page.locator(f"main > section.{tab}")
    expect(section).to_be_visible()
    expect(section.locator("*").first).to_be_attached()
    return section


def wait_ready(page: Page) -> None:
    """Until the header says that the server is ready, and the page has its model's name."""
    expect(page.locator("header .health")).to_have_text("ready")
    expect(page.locator("header .model")).to_be_visible()


def draw(page: Page, text: str, *, streaming: bool = False) -> Locator:
    """Draws Markdown as an answer of the chat, without a chat, in place of the last one. Returns where."""
    page.evaluate(
        """async ([text, streaming]) => {
          const {html, render} = await import('./page/components.js')
          const {Markdown} = await import('./page/markdown.js')
          window.box ??= document.body.appendChild(Object.assign(document.createElement('div'), {id: 'drawn'}))
          render(html`<${Markdown} text=${text} streaming=${streaming} />`, window.box)
        }""",
        [text, streaming],
    )
    return page.locator("#drawn")


def hasten(page: Page) -> None:
    """From its next load on, the page asks the server ten times as often: not after 1, 2 or 5 seconds."""
    page.add_init_script("""
      const late = window.setTimeout
      window.setTimeout = (act, ms, ...rest) => late(act, [1000, 2000, 5000].includes(ms) ? ms / 10 : ms, ...rest)
    """)


def phone(page: Page) -> None:
    page.set_viewport_size(PHONE)


def dark(page: Page) -> None:
    """The system prefers dark colours, and the page's theme is `auto` by default. The colours do not fade in."""
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")


def axe_violations(page: Page, *impacts: str) -> list[str]:
    """What axe-core finds of these impacts ("serious" and "critical" by default), one line for each element."""
    wanted = impacts or ("serious", "critical")
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE_SCRIPT)
    found = page.evaluate("axe.run({resultTypes: ['violations']}).then(results => results.violations)")
    return [
        f"{violation['id']} ({violation['impact']}): {' '.join(map(str, node['target']))}: {_messages(node)}"
        for violation in found
        if violation["impact"] in wanted
        for node in violation["nodes"]
    ]


def _messages(node: dict[str, Any]) -> str:
    return "; ".join(check["message"] for check in node["any"] + node["all"] + node["none"])


def overflow(page: Page) -> list[str]:
    """The elements that make the document scroll horizontally, [] if it does not."""
    found: list[str] = page.evaluate(_OVERFLOW)
    return found


_OVERFLOW = """() => {
  const width = document.documentElement.clientWidth
  if (document.documentElement.scrollWidth <= width && document.body.scrollWidth <= width) return []
  const wide = [...document.querySelectorAll('body *')].filter((element) => {
    if (element.getBoundingClientRect().right <= width + 0.5) return false
    for (let parent = element.parentElement; parent; parent = parent.parentElement)
      if (parent !== document.body && getComputedStyle(parent).overflowX !== 'visible') return false
    return true
  })
  const names = wide.map((element) => `${element.tagName.toLowerCase()}.${element.className}`)
  return names.length ? names : [`document: ${document.documentElement.scrollWidth} px`]
}"""


BASELINE = """() => {
  performance.mark('baseline')
  const box = document.body.appendChild(document.createElement('div'))
  for (let i = 0; i < 400; i++) {
    const paragraph = box.appendChild(document.createElement('p'))
    for (const name of ['span', 'strong', 'em', 'code']) {
      const part = paragraph.appendChild(document.createElement(name))
      part.append(`some ordinary words, number ${i} `.slice(0, 25))
    }
  }
  const height = box.offsetHeight
  box.remove()
  return height
}"""
"""Draws a usual text of 40,000 characters at once, in 1,600 parts. About 14 ms for a core of an AMD EPYC."""
N_BASELINES = 5


class Tasks:
    """Traces the tasks of a page's main thread.

    `longest`: the CPU time of the longest one, in times of `BASELINE` in the same page. Other programs do not make it
    longer, and a slower machine needs longer for both.
    """

    def __init__(self, browser: Browser, page: Page) -> None:
        self._browser, self._page = browser, page

    def __enter__(self) -> Tasks:
        self._browser.start_tracing(page=self._page, categories=["toplevel", "blink.user_timing"])
        return self

    def __exit__(self, *_: object) -> None:
        self._end_task()
        for _each in range(N_BASELINES):
            self._page.evaluate(BASELINE)
            self._end_task()
        events = json.loads(self._browser.stop_tracing())["traceEvents"]
        marks = sorted((e for e in events if e["name"] == "baseline"), key=lambda e: e["ts"])
        tasks = [
            e
            for e in events
            if e["name"] == "ThreadControllerImpl::RunTask" and _thread(e) == _thread(marks[0]) and "tdur" in e
        ]  # one that took no time has no duration
        times = [e["tdur"] for e in tasks if e["ts"] + e["dur"] < marks[0]["ts"]]
        baselines = [e["tdur"] for mark in marks for e in tasks if e["ts"] <= mark["ts"] <= e["ts"] + e["dur"]]
        assert times, "tasks were traced"
        assert len(baselines) == N_BASELINES
        self.longest: float = max(times) / statistics.median(baselines)

    def _end_task(self) -> None:
        self._page.evaluate("new Promise((done) => setTimeout(done))")


def _thread(event: dict[str, Any]) -> tuple[int, int]:
    return event["pid"], event["tid"]


class Focused(NamedTuple):
    """The element that has the keyboard's focus. `name`: the text of a screen reader."""

    tag: str
    tab: str
    """The tab of the page in which it is, "" for the header."""
    role: str
    name: str
    visible: bool
    outlined: bool


def focused(page: Page) -> Focused | None:
    """None when nothing but the document has the focus."""
    found = page.evaluate(_FOCUSED)
    return Focused(**found) if found else None


_FOCUSED = """() => {
  const element = document.activeElement
  if (!element || element === document.body || element === document.documentElement) return null
  const labels = [...(element.labels || [])].map((label) => label.textContent)
  const described = (element.getAttribute('aria-labelledby') || '').split(/\\s+/).filter(Boolean)
    .map((id) => document.getElementById(id)?.textContent || '')
  const style = getComputedStyle(element), box = element.getBoundingClientRect()
  const field = /^(input|select|textarea)$/i.test(element.tagName)
  const own = field ? element.getAttribute('placeholder') : element.textContent
  const names = [element.getAttribute('aria-label'), described.join(' '), labels.join(' '), element.title, own]
  const name = names.find((text) => text && text.trim()) || ''
  return {
    tag: element.tagName.toLowerCase(),
    tab: element.closest('main > section')?.classList[1] || '',
    role: element.getAttribute('role') || '',
    name: name.trim().replace(/\\s+/g, ' '),
    visible: box.width > 0 && box.height > 0 && style.visibility !== 'hidden',
    outlined: (style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0) || style.boxShadow !== 'none',
  }
}"""


def to_start(page: Page) -> None:
    """The next press of the Tab key goes to the first control of the document."""
    page.evaluate("""() => {
      const start = document.createElement('span')
      start.tabIndex = -1
      document.body.prepend(start)
      start.focus()
      start.remove()
    }""")


def walk_by_tab_key(page: Page, limit: int = 200) -> list[Focused]:
    """The elements that the Tab key reaches, from the start of the document until it leaves it.

    Raises `AssertionError` when the focus is caught: the same element twice in a row, or more than `limit` elements.
    """
    to_start(page)
    reached: list[Focused] = []
    for _ in range(limit):
        page.keyboard.press("Tab")
        here = focused(page)
        if here is None:
            return reached
        reached.append(here)
    raise AssertionError(f"the Tab key does not leave the document after {limit} elements: {reached[-5:]}")
