"""Whatever a model writes, the page answers: no task of its main thread takes longer than `LONGEST`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.browser.hostile_markdown import hostile_texts
from tests.browser.page_checks import BASELINE, Tasks, open_tab, wait_ready
from tests.support.batch_files import wait_until

LONGEST = 7  # times `BASELINE`
LENGTH = 40_000  # characters: 5,000 tokens
STREAMED = (
    "openers of both kinds", "underscores", "all openers", "nested emphasis", "items", "headings", "lists of two kinds",
    "a long table", "a table of many columns", "lazy quotations", "one word", "JavaScript of spaces",
)  # fmt: skip
STREAM = r"""
const fetchElsewhere = window.fetch
window.fetch = (address, options) => {
  if (!String(address).endsWith('/v1/chat/completions')) return fetchElsewhere(address, options)
  const tokens = window.answer.match(/[^]{1,8}/g), encoder = new TextEncoder()
  const event = (delta, finish_reason) => `data: ${JSON.stringify({choices: [{index: 0, delta, finish_reason}]})}\n\n`
  const body = new ReadableStream({async pull(controller) {
    await new Promise(requestAnimationFrame)
    const some = tokens.splice(0, 200).map((content) => event({content}, null))
    if (!tokens.length) some.push(event({}, 'stop'), 'data: [DONE]\n\n')
    controller.enqueue(encoder.encode(some.join('')))
    if (!tokens.length) controller.close()
  }})
  return Promise.resolve(new Response(body, {headers: {'Content-Type': 'text/event-stream'}}))
}
"""
"""Answers with `window.answer`, 200 tokens a frame. The events are those of a server."""
SETTLED = """(least) => new Promise((done) => {
  let [count, since] = [-1, 0]
  const look = () => {
    const filled = [...document.querySelectorAll('.assistant .markdown')].filter((one) => one.childElementCount).length
    const now = document.querySelectorAll('.markdown *').length
    if (now !== count) [count, since] = [now, performance.now()]
    if (filled >= least && performance.now() - since > 300) done()
    else setTimeout(look, 50)
  }
  look()
})"""
"""Until that many answers are shown and no more elements are added. (Playwright's role selectors would be slow.)"""


KEPT = """async () => (await (await import('/page/chat/conversation_store.js')).loadAll()).length"""
"""How many conversations the browser has stored."""


def conversation(texts: dict[str, str]) -> dict[str, Any]:
    """One of which the answers are these texts, as the page exports it."""
    messages, chosen, parent = {}, {}, "root"
    for name, text in texts.items():
        for role, content in (("user", name), ("assistant", text)):
            identity = f"{role} {name}"
            messages[identity] = {"id": identity, "parent": parent, "role": role, "content": content, "finish": "stop"}
            chosen[parent] = parent = identity
    whole = {"id": "hostile", "title": "Hostile", "system": "", "messages": messages, "chosen": chosen}
    return {"format": "cppbatch-chat", "version": 1, "conversations": [whole]}


@pytest.fixture
def alone(new_context: Callable[..., BrowserContext]) -> Page:
    """A page in a separate process, which has no garbage of other tests."""
    return new_context().new_page()


def test_the_longest_task_is_measured_by_the_time_of_the_cpu(chromium: Browser, alone: Page) -> None:
    page = alone
    with Tasks(chromium, page) as tasks:
        work = f"for (let i = 0; i < 15; i++) ({BASELINE.replace('performance.mark', 'String')})()"
        page.evaluate(f"new Promise((done) => setTimeout(() => {{ {work}; done() }}))")
    assert 7 < tasks.longest < 30


@pytest.fixture
def streaming(alone: Page, url: str) -> Page:
    """The Chat tab, whose answers are `window.answer`."""
    alone.add_init_script(STREAM)
    open_tab(alone, url)
    wait_ready(alone)
    return alone


def stream(page: Page, name: str, text: str) -> None:
    """Asks in a new conversation, and waits until the whole answer is shown."""
    page.evaluate("(text) => { window.answer = text }", text)
    page.locator(".conversations .button.grow").click()  # a new conversation
    page.locator(".composer textarea").fill(name)
    page.keyboard.press("Enter")
    page.locator(".composer button[aria-label=Stop]").wait_for()
    page.locator(".composer button[aria-label=Send]").wait_for()
    page.evaluate(SETTLED, 1)


def test_no_text_that_streams_freezes_the_page(chromium: Browser, streaming: Page) -> None:
    """The longest task of every second text; of each, and which text it was, says the nightly test."""
    texts = hostile_texts(LENGTH)
    with Tasks(chromium, streaming) as tasks:
        for name in STREAMED[::2]:
            stream(streaming, name, texts[name])
    assert tasks.longest < LONGEST


@pytest.mark.nightly
@pytest.mark.parametrize("name", STREAMED)
def test_no_task_of_a_text_that_streams_is_long(chromium: Browser, streaming: Page, name: str) -> None:
    with Tasks(chromium, streaming) as tasks:
        stream(streaming, name, hostile_texts(LENGTH)[name])
    assert tasks.longest < LONGEST


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_stored_conversation_of_such_texts_does_not_freeze_the_page_when_it_is_loaded(
    chromium: Browser, alone: Page, url: str, tmp_path: Path, every: int
) -> None:
    """All of them at night, every second one in the ring, one after the other."""
    page = alone
    file = tmp_path / "hostile.json"
    texts = dict(list(hostile_texts(LENGTH // 4).items())[::every])
    file.write_text(json.dumps(conversation(texts)))
    open_tab(page, url)
    wait_ready(page)
    with Tasks(chromium, page) as imported:
        page.locator(".conversations input[type=file]").set_input_files(file)
        page.evaluate(SETTLED, len(texts))
    assert imported.longest < LONGEST
    wait_until(lambda: page.evaluate(KEPT) == 1)
    with Tasks(chromium, page) as loaded:
        page.reload()
        page.evaluate(SETTLED, len(texts))
    assert loaded.longest < LONGEST


BLOCKS = """async ([text, step]) => {
  const {MarkdownBlocks} = await import('/page/markdown_blocks.js')
  const [whole, streamed, always] = [new MarkdownBlocks(), new MarkdownBlocks(), () => true]
  whole.read(text, true, always)
  const finished = []
  let again = 0
  for (let end = step; end < text.length + step; end += step) {
    streamed.read(text.slice(0, end), end >= text.length, always)
    if (end < text.length) again += finished.filter((block, i) => block !== streamed.all[i]).length
    finished.splice(0, Infinity, ...streamed.all.slice(0, -2))
  }
  const raws = ({all}) => all.map(({raw}) => raw)
  return [raws(whole), raws(streamed), again]
}"""


def test_a_text_that_streams_has_the_same_blocks_and_finished_ones_are_not_read_again(modules: Page) -> None:
    for name, text in hostile_texts(1000).items():
        whole, streamed, again = modules.evaluate(BLOCKS, [text, 17])
        assert (streamed, again) == (whole, 0), name


@pytest.mark.parametrize("name", ["constructor", "toString", "__proto__", "valueOf"])
def test_a_formula_with_a_name_of_javascript_is_shown_and_the_page_keeps_working(
    page: Page, url: str, name: str
) -> None:
    """An exception in it would break the page permanently, also after each reload."""
    page.add_init_script(STREAM)
    open_tab(page, url)
    wait_ready(page)
    page.evaluate("(text) => { window.answer = text }", f"$\\begin{{{name}}} a \\end{{{name}}}$ and $\\{name}$ and $x$")
    page.locator(".composer textarea").fill("Go")
    page.keyboard.press("Enter")
    page.locator(".composer button[aria-label=Send]").wait_for()
    expect(page.locator(".markdown .katex-html").last).to_have_text("x")
    expect(page.locator(".markdown")).to_contain_text(f"\\begin{{{name}}}")
    page.locator(".conversations .button.grow").click()
    page.locator(".composer textarea").fill("Another")
    page.evaluate("() => { window.answer = 'It goes on.' }")
    page.keyboard.press("Enter")
    page.locator(".markdown", has_text="It goes on.").wait_for()


DEPTHS = """async (formulas) => {
  const {html, render} = await import('/page/components.js')
  const {Formula} = await import('/page/formula.js')
  const depth = (element) => 1 + Math.max(0, ...[...element.children].map(depth))
  const drawn = async (tex) => {
    const box = document.createElement('div')
    document.body.append(box)
    render(html`<${Formula} tex=${tex} display=${true} />`, box)
    await new Promise((done) => setTimeout(done, 300))
    return [depth(box), box.textContent === tex]
  }
  return Promise.all(formulas.map(drawn))
}"""


def test_formulas_that_are_nested_too_deep_are_shown_as_they_were_written(page: Page, url: str) -> None:
    parts = {
        "a^{": "}",
        "\\frac{1}{": "}",
        "\\sqrt{": "}",
        "{": "}",
        "\\sqrt[{": "}]{x}",
        "\\hat{": "}",
        "\\left(": "\\right)",
    }
    open_tab(page, url)
    page.evaluate(DEPTHS, ["x"])  # the library is loaded
    for n, is_text in ((5, False), (200, True)):
        drawn = page.evaluate(DEPTHS, [start * n + "x" + end * n for start, end in parts.items()])
        assert max(depth for depth, _ in drawn) < 200, drawn
        assert all(text == is_text or start == "{" for (_, text), start in zip(drawn, parts, strict=True)), drawn


NORMAL = "Some **bold**, *italic* and `code` of [a link](https://example.org), with snake_case words & more. "


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (NORMAL * 30, "strong"),  # a paragraph of 3,000 characters
        ("".join(f"- {NORMAL}\n" for _ in range(150)), "li"),
        ("|a|b|c|\n|-|-|-|\n" + f"|{NORMAL[:60]}|1|2|\n" * 200, "td"),
        ("".join(f"{'  ' * level}- {NORMAL}\n" for level in range(8)), "li li li li li li li li"),
    ],
    ids=["paragraph", "list", "table", "nested"],
)
def test_long_answers_of_a_usual_kind_are_far_from_these_bounds(page: Page, url: str, text: str, kept: str) -> None:
    page.add_init_script(STREAM)
    open_tab(page, url)
    wait_ready(page)
    page.evaluate("(text) => { window.answer = text }", text)
    page.locator(".composer textarea").fill("Go")
    page.keyboard.press("Enter")
    page.locator(f".markdown {kept}").first.wait_for()
    page.locator(".composer button[aria-label=Send]").wait_for()
    assert page.locator(".markdown .plain").count() == 0
    assert page.locator(".markdown > div > div").count() == 1, "one block"
