"""Diagrams by Mermaid, drawn in a frame that reaches nothing and shown as images; footnotes."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import PageErrors
from tests.browser.hostile import MARKS, UNMARKED
from tests.browser.page_checks import axe_violations, dark, draw, open_tab, phone, wait_ready

IMPACTS = ("critical", "serious", "moderate", "minor")


@pytest.fixture
def chat(page: Page, url: str) -> Page:
    open_tab(page, url)
    wait_ready(page)
    return page


def violations(page: Page) -> list[str]:
    """Of the drawn text, which the tests put outside of the page's landmarks."""
    return [found for found in axe_violations(page, *IMPACTS) if not found.startswith("region ")]


def fence(source: str) -> str:
    return f"```mermaid\n{source}\n```"


DIAGRAMS = {
    "flowchart": "flowchart LR\n  A[Start] --> B{Is it so?}\n  B -->|yes| C[Done]\n  B -->|no| A",
    "sequence": "sequenceDiagram\n  Alice->>Bob: Hello Bob\n  Bob-->>Alice: Hi",
    "class": "classDiagram\n  Animal <|-- Duck\n  Animal : +int age",
    "state": "stateDiagram-v2\n  [*] --> Still\n  Still --> [*]",
    "pie": 'pie title Pets\n  "Dogs" : 386\n  "Cats" : 85',
    "gantt": "gantt\n  title Plan\n  dateFormat YYYY-MM-DD\n  section A\n  Task :a1, 2026-01-01, 30d",
    "er": "erDiagram\n  CUSTOMER ||--o{ ORDER : places",
    "mindmap": "mindmap\n  root((Ideas))\n    One\n    Two",
}


FRAME = """async () => {
  const frame = [...document.querySelectorAll('iframe')].at(-1)
  const reached = (act) => { try { return Boolean(act()) } catch { return false } }
  return [frame.sandbox.value, reached(() => frame.contentDocument), frame.src.endsWith('diagram_frame.html')]
}"""


def test_diagrams_are_images_with_their_source_and_are_drawn_when_they_are_whole(chat: Page) -> None:
    loaded: list[str] = []
    chat.on("request", lambda request: loaded.append(request.url.partition("/page/")[2]))
    text = "\n\n".join(map(fence, DIAGRAMS.values()))
    draw(chat, fence(DIAGRAMS["pie"])[:-4], streaming=True)
    expect(chat.locator("#drawn code")).to_contain_text("pie title")
    assert "vendor/mermaid.js" not in loaded
    draw(chat, text)
    images = chat.locator("#drawn .diagram img")
    expect(images).to_have_count(len(DIAGRAMS))
    assert loaded.count("vendor/mermaid.js") == 1
    for image, (name, source) in zip(images.all(), DIAGRAMS.items(), strict=True):
        width, height = image.evaluate(
            "async (one) => { await one.decode(); return [one.naturalWidth, one.naturalHeight] }"
        )
        assert width > 50 < height, name
        expect(image).to_have_attribute("alt", f"Diagram: {source.splitlines()[0]}")
    first = chat.locator("#drawn .diagram").first
    expect(first.locator("code")).to_be_hidden()
    first.get_by_text("Source of the diagram").click()
    expect(first.locator("code")).to_have_text(DIAGRAMS["flowchart"])
    assert violations(chat) == []
    dark(chat)
    phone(chat)
    assert violations(chat) == []
    assert chat.locator("#drawn").locator("svg:not(.icon), style, script, iframe").count() == 0
    assert chat.evaluate(FRAME) == ["allow-scripts", False, True]
    frame = next(each for each in chat.frames if each.url.endswith("diagram_frame.html"))
    assert frame.evaluate("[window.origin, typeof mermaid]") == ["null", "object"]  # an origin of its own
    for reach in ("localStorage.length", "top.document.title"):
        assert (
            frame.evaluate(f"() => {{ try {{ return {reach} }} catch (error) {{ return error.name }} }}")
            == "SecurityError"
        )


def test_what_is_not_a_diagram_stays_code_with_the_reason(chat: Page) -> None:
    texts = ["flowchart LR\n  A -->", "x" * 20_001, DIAGRAMS["pie"]]
    draw(chat, "\n\n".join(map(fence, texts)))
    expect(chat.locator("#drawn .diagram img")).to_have_count(1)  # the one after those that cannot be drawn
    expect(chat.locator("#drawn").get_by_role("status")).to_have_text(
        [
            "This diagram could not be drawn: Parse error on line 3.",
            "This diagram could not be drawn: it has 20001 characters; the limit is 20000.",
        ]
    )
    expect(chat.locator("#drawn > .markdown .code")).to_have_count(3)


OTHER = "http://other.test:PORT"
"""A name of the server, which would answer."""
HOSTILE = (
    "flowchart LR\n  A[\"<script>top.hacked = 1</script><img src=x onerror='top.hacked = 1'>\"] --> B",
    'flowchart LR\n  A --> B\n  click A call alert(1)\n  click B href "javascript:alert(1)"',
    "%%{init: {'securityLevel': 'loose', 'htmlLabels': true, 'flowchart': {'htmlLabels': true}}}%%\n"
    f'flowchart LR\n  A["<img src={OTHER}/a.png onerror=alert(1)>"] --> B\n  click A call alert(1)',
    f"%%{{init: {{'themeCSS': '@import url({OTHER}/a.css); * {{ background: url({OTHER}/b) }}'}}}}%%\n"
    f"flowchart LR\n  A --> B\n  style A fill:url({OTHER}/c)",
    f"sequenceDiagram\n  participant A\n  link A: x @ javascript:alert(1)\n  A->>A: <a href='{OTHER}'>x</a>",
    f'flowchart LR\n  A["<form action={OTHER}><button>x</button></form><iframe src={OTHER}>"]',
    f'flowchart LR\n  A@{{ img: "{OTHER}/page/icon.svg", label: "x", w: 60, h: 60 }} --> B',
)


def test_no_diagram_runs_loads_or_links_anything(chat: Page, errors: PageErrors) -> None:
    """Scripts, callbacks, directives that loosen Mermaid's rules, styles, links, forms."""
    errors.allow("Content Security Policy|other.test")  # the browser says what it has refused within the frame
    answered: list[str] = []
    chat.on("response", lambda response: answered.append(response.url))
    for hostile in HOSTILE:
        source = hostile.replace("PORT", str(urlsplit(chat.url).port))
        draw(chat, "")  # the images of the last source are gone
        draw(chat, f"{fence(source)}\n\n{fence(DIAGRAMS['pie'])}")
        last = chat.locator("#drawn .markdown > div > div").last.locator(".diagram img")
        expect(last).to_have_count(1)
        last.evaluate("(one) => one.decode()")
        for image in chat.locator("#drawn .diagram img").all():
            image.click()
        drawn = chat.locator("#drawn")
        assert drawn.locator("svg:not(.icon), script, form, iframe, a, [onerror], [onclick]").count() == 0, source
        assert chat.evaluate(MARKS) == UNMARKED, source
        assert not [url for url in answered if url.startswith("http://other.test")], source


HANGING = "<script>addEventListener('message', ({ports: [port]}) => port.postMessage({}))</script>"


def test_a_diagram_that_hangs_is_given_up_and_the_next_one_is_drawn(chat: Page) -> None:
    chat.add_init_script(
        "const late = setTimeout; window.setTimeout = (act, ms) => late(act, ms === 10_000 ? 2000 : ms)"
    )
    chat.reload()
    wait_ready(chat)
    chat.route("**/diagram_frame.html", lambda route: route.fulfill(body=HANGING, content_type="text/html"), times=1)
    draw(chat, fence(DIAGRAMS["pie"]))
    expect(chat.get_by_text("This diagram could not be drawn: drawing it takes more than 10 seconds.")).to_be_visible()
    expect(chat.locator("iframe")).to_have_count(0)
    draw(chat, fence(DIAGRAMS["class"]))
    expect(chat.locator("#drawn .diagram img")).to_have_count(1)


def test_footnotes_lead_to_their_text_and_back(drawing: Page) -> None:
    text = (
        "Water boils at 100 °C[^1], but not everywhere.[^high up] An[^unknown] reference.[^note]\n\n"
        "[^1]: At *sea level*,\n  with `code`.\n[^note]: Word\n\nAfter [^1]: it.\n\n[^x y]: not a name"
    )
    draw(drawing, text)
    drawn = drawing.locator("#drawn")
    expect(drawn.locator("sup .mark")).to_have_text(["1", "note", "1"])
    expect(drawn.locator(".footnote")).to_have_text(["1 At sea level,with code.", "note Word"])
    expect(drawn.locator(".footnote em")).to_have_text("sea level")
    expect(drawn).to_contain_text("everywhere.[^high up] An[^unknown] reference.")
    expect(drawn).to_contain_text("[^x y]: not a name")
    mark, note = (
        drawn.get_by_role("button", name="Footnote note", exact=True),
        drawn.get_by_role("button", name="Back from footnote note"),
    )
    mark.click()
    expect(note).to_be_focused()
    drawing.keyboard.press("Enter")
    expect(mark).to_be_focused()
    assert drawn.locator("[id]").count() == 0
    assert violations(drawing) == []


def test_footnotes_appear_in_a_text_that_streams(drawing: Page) -> None:
    text = "One[^1] and two[^2].\n\nMore.\n\n[^1]: First.\n[^2]: Second."
    for end in range(5, len(text), 7):
        draw(drawing, text[:end], streaming=True)
    draw(drawing, text)
    expect(drawing.locator("#drawn sup .mark")).to_have_text(["1", "2"])
    expect(drawing.locator("#drawn .footnote")).to_have_text(["1 First.", "2 Second."])
