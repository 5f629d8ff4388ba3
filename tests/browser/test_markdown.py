"""Answers as they are drawn: code with colours, formulas."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.hostile import MARKS, UNMARKED
from tests.browser.page_checks import draw, open_tab


def test_code_has_its_colours_while_it_streams_line_by_line(drawing: Page) -> None:
    text = "```py\ndef add(a, b):\n    return a + b\n\nclass Half"
    draw(drawing, text, streaming=True)
    code = drawing.locator("#drawn code")
    expect(code.locator(".code-kwd")).to_have_text(["def", "return"])  # not yet the line that is being written
    assert code.inner_text().endswith("class Half")
    draw(drawing, text + ":\n    pass\n", streaming=True)
    expect(code.locator(".code-kwd")).to_have_text(["def", "return", "class"])
    draw(drawing, text + ":\n    pass\n\nimport x\n```\n\nDone.")
    expect(code.locator(".code-kwd")).to_have_text(["def", "return", "class", "pass", "import"])


LANGUAGES = {
    "bash": "if true; then echo hi; fi", "c": "int main(void) { return 0; }", "clojure": "(defn f [x] (inc x))",
    "cmake": "if(UNIX)\nendif()", "cpp": "class A { public: int b; };", "csharp": "public class A { }",
    "css": "a { color: red; }",
    "dart": "class A { final int b = 1; }", "diff": "+ new\n- old", "dockerfile": "FROM alpine\nRUN true",
    "elixir": "defmodule A do\nend", "erlang": "f(X) when X > 0 -> X.", "fortran": "program a\nend program",
    "fsharp": "let f x = x + 1", "go": "func main() { return }", "graphql": "query { a }", "haskell": "module A where",
    "html": "<p class='a'>b</p>", "http": "GET / HTTP/1.1\nHost: a", "java": "public class A { }", "js": "const a = 1",
    "json": '{"a": 1}', "julia": "function f(x) end", "kotlin": "fun main() { val a = 1 }", "latex": "\\section{A}",
    "lua": "local a = nil", "makefile": "ifeq (a,b)\nendif", "markdown": "# Title", "matlab": "function f\nend",
    "nginx": "server { listen 80; }",
    "objectivec": "@interface A : B\n@end", "ocaml": "let rec f x = x", "perl": "my $a = 1;",
    "php": "<?php function f() { return 1; }", "powershell": "function F { return 1 }", "protobuf": "message A { }",
    "python": "def f():\n    pass", "r": "f <- function(x) 1", "ruby": "def f\nend", "rust": "fn main() { let a = 1; }",
    "scala": "object A { val b = 1 }", "scss": "$a: 1px; b { c: $a }", "sql": "SELECT name FROM users WHERE id = 1;",
    "swift": "func f() { let a = 1 }", "toml": "[a]\nb = 1", "ts": "interface A { b: string }",
    "vb": "Dim a As Integer",
    "verilog": "module a; endmodule", "vhdl": "entity a is end entity;", "xml": "<a b='c'/>", "yaml": "a: 1",
}  # fmt: skip


def test_code_in_more_than_fifty_languages_has_its_colours_and_each_is_loaded_when_it_is_shown(
    page: Page, url: str
) -> None:
    assert len(LANGUAGES) > 50
    open_tab(page, url)
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url.partition("/vendor/highlight/")[2]))
    text = "\n\n".join(f"```{name}\n{code}\n```" for name, code in LANGUAGES.items())
    draw(page, "```sql\nSELECT 1\n```")
    expect(page.locator("#drawn .code-kwd")).to_have_text("SELECT")
    assert {name for name in loaded if name} == {"core.js", "sql.js"}
    draw(page, text)
    blocks = page.locator("#drawn .code code")
    expect(blocks).to_have_count(len(LANGUAGES))
    for name, block in zip(LANGUAGES, blocks.all(), strict=True):
        expect(block.locator("[class^=code-]").first, name).to_be_attached()
        assert block.inner_text() == LANGUAGES[name]


def draw_formula(page: Page, tex: str) -> Locator:
    formula = draw(page, f"$${tex}$$").locator(".katex-html")
    expect(formula).to_have_count(1)
    return formula


def test_formulas_are_mathml_and_prices_are_text(drawing: Page) -> None:
    text = (
        "The roots are $x_{1,2} = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}$, between $5 and $6, and "
        "\\(\\alpha\\) is unknown.\n\n"
        "$$\n\\sum_{i=1}^{n} i = \\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix} \\foo\n$$\n\n`$code$` $a<b$"
    )
    draw(drawing, text)
    drawn = drawing.locator("#drawn")
    expect(drawn.locator("math")).to_have_count(4)
    expect(drawn.locator(".katex-html")).to_have_count(4)
    shape = "(all) => all.map((one) => one.localName)"
    first = drawn.locator("math").first
    assert first.locator("mfrac, msqrt, msub, msup").evaluate_all(shape) == ["msub", "mfrac", "msqrt", "msup"]
    assert first.evaluate("(one) => one.namespaceURI") == "http://www.w3.org/1998/Math/MathML"
    block = drawn.locator("math[display=block]")
    assert block.locator("munderover").count() == 1
    assert block.locator("mtr").count() == 2
    expect(block).to_contain_text("\\foo")  # unknown commands are shown as written
    expect(drawn).to_contain_text("between $5 and $6, and")
    expect(drawn.locator("code")).to_have_text("$code$")


@pytest.mark.parametrize(
    ("tex", "shown"),
    [
        (r"|x|", "∣x∣"), (r"x \in \mathbb{R}", "x∈R"), (r"\text{if }x", "ifx"), (r"\boxed{42}", "42"),
        (r"\lVert x \rVert", "∥x∥"), (r"90^\circ", "90∘"), (r"\unknown{x}", r"\unknownx"),
    ],
)  # fmt: skip
def test_a_formula_keeps_its_meaning(drawing: Page, tex: str, shown: str) -> None:
    text = draw_formula(drawing, tex).inner_text()
    assert re.sub(r"[\s\u200b]", "", text) == shown


def test_a_boxed_formula_has_a_box_and_fences_are_as_high_as_what_they_hold(drawing: Page) -> None:
    borders = "(one) => [...one.querySelectorAll('*')].map((each) => parseFloat(getComputedStyle(each).borderTopWidth))"
    assert max(draw_formula(drawing, r"\boxed{42}").evaluate(borders)) > 0
    assert max(draw_formula(drawing, "42").evaluate(borders)) == 0
    assert draw_formula(drawing, "(x)").locator(".delimsizing").count() == 0
    for tex, n_fences in (
        (r"\begin{pmatrix} 1 \\ 2 \\ 3 \end{pmatrix}", 2),
        (r"\begin{cases} 1 & \text{if } x > 0 \\ 0 & \text{else} \\ 2 & x \end{cases}", 1),
        (r"\left( \frac{\frac{a}{b}}{\frac{c}{d}} \right)", 2),
    ):
        assert draw_formula(drawing, tex).locator(".delimsizing").count() == n_fences, tex


@pytest.mark.parametrize(
    "tex",
    [
        r"\href{javascript:alert(1)}{x}", r"\url{https://example.org}",
        r"\includegraphics{https://example.org/a.png}",
        r"\class{top}{x}", r"\id{main}{x}", r"\style{position:fixed}{x}", r"\data{a=b}{x}",
        r"\text{<img src=x onerror=alert(1)>}",
        r"\label{app} x \tag{1}", r"\def\a{\a\a}\a", r"\rule{9999em}{9999em}",
        r"\begin{constructor} a \end{constructor}", r"\frac{1}{",
    ],
)  # fmt: skip
def test_no_formula_makes_links_html_names_or_endless_work(drawing: Page, tex: str) -> None:
    draw(drawing, f"$x$\n\n$${tex}$$\n\n**after** $y$")
    expect(drawing.locator("#drawn p:has(strong) .katex-html")).to_have_text("y")
    expect(drawing.locator("#drawn .katex-html").first).to_have_text(
        "x"
    )  # the formulas of a text are drawn from the last one
    drawn = drawing.locator("#drawn")
    assert drawn.locator("a, img, script, [id], [href], [src], [onerror]").count() == 0
    assert drawn.locator("span").first.evaluate("(one) => one.getBoundingClientRect().height") < 500
    assert drawing.evaluate(MARKS) == UNMARKED


def test_line_breaks_and_raised_text_of_html_are_drawn_and_other_html_is_text(drawing: Page) -> None:
    text = (
        "H<sub>2</sub>O, x<sup>**2**</sup>\n\n| a |\n|---|\n| one<br>two |\n\n<br>\n\n"
        "<b onclick=alert(1)>b</b> <sub>open <sup></sub>"
    )
    draw(drawing, text)
    drawn = drawing.locator("#drawn")
    expect(drawn.locator("sub").first).to_have_text("2")
    expect(drawn.locator("sup strong")).to_have_text("2")
    expect(drawn.locator("td br")).to_have_count(1)
    expect(drawn).to_contain_text("<b onclick=alert(1)>b</b>")
    assert drawn.locator("b, [onclick]").count() == 0


LATE = """async () => {
  const {html, lazy, render} = await import('./page/components.js')
  const Late = lazy(() => Promise.resolve(() => html`<b>there</b>`), () => 'not yet')
  const [one, other] = [document.createElement('div'), document.createElement('div')]
  render(html`<${Late} />`, one)
  await Late.load()
  render(html`<${Late} />`, other)
  await new Promise((done) => setTimeout(done, 300))
  return [one.textContent, other.textContent]
}"""


def test_a_part_of_the_page_that_is_loaded_just_after_its_place_was_drawn_is_shown(drawing: Page) -> None:
    assert drawing.evaluate(LATE) == ["there", "there"]
