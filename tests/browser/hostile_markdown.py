"""Texts on which readers of Markdown and highlighters of code are slow, after cmark's pathological tests and more."""

from __future__ import annotations

from collections.abc import Iterator


def _grow(part: str, length: int) -> str:
    return part * (length // len(part))


def _indented(length: int) -> Iterator[str]:
    level = 0
    while length > 0:
        yield f"{'  ' * level}- a\n"
        level, length = level + 1, length - 2 * level - 4


REPEATED = {
    # emphasis
    "openers of both kinds": "**a *b ",
    "underscores": "_a ",
    "closers": "a** ",
    "openers and closers that do not match": "*a_ ",
    "three openers": "***a ",
    "strikes": "~a ~~b ",
    "stars": "*",
    "within words": "a**b",
    "with punctuation": "*.*!",
    "all openers": "*a `b [c](d _e **f ",
    "short emphasis": "**a** ",
    # links, code spans, entities
    "brackets": "[",
    "images": "![a](",
    "links": "[a](",
    "links in angle brackets": "[a](<b",
    "titles": '[a](b "',
    "whole links": "[a](b) ",
    "references": "[a][b] ",
    "definitions": "[a]: b '\n",
    "addresses": "a@",
    "host names": "www.a",
    "query strings": "http://a.b?",
    "autolinks": "<http://a",
    "backticks": "`a``b```c````d",
    "backslashes": "\\",
    "entities": "&amp; ",
    # HTML
    "comments": "a <!--",
    "instructions": "a <?",
    "CDATA": "a <![CDATA[",
    "tags": '<a b="',
    "blocks": "<div>\n",
    # blocks
    "quotations": "> ",
    "lazy quotations": "> a\nb\n> ",
    "quotations and lists": "> - ",
    "lists in a line": "- ",
    "items": "- a\n",
    "loose items": "1. a\n\n",
    "lists of two kinds": "* a\n - b\n",
    "items with other line ends": "- a\u2028\n",
    "tasks": "- [ ] a\n",
    "headings": "# a\n",
    "setext headings": "a\n=\n",
    "rules": "---\n",
    "fences": "```\na\n",
    "fences in items": "- ```\n",
    "indented code": "    a\n\n",
    "paragraphs": "a\n\n",
    "lines": "a\n",
    "line breaks": "a  \n",
    "almost a table": "a|b\n",
    # formulas
    "formulas": "$a^{b_c}$ ",
    "names of JavaScript": "$\\begin{constructor}a\\end{constructor}$ $\\begin{__proto__}$ $\\toString$ ",
    "roots": "$\\sqrt[",
    # characters
    "words": "word ",
    "one word": "a",
    "spaces": "a" + " " * 999,
    "combined characters": "a\u0300\u0301\u0302",
    "directions": "\u202ea\u202c",
    "carriage returns": "a\r\n",
}
BEGINNINGS = {
    "a long table": ("a|b\n-|-\n", "c|d\n"),
    "a table of many columns": ("|" + "a|" * 2000 + "\n|" + "-|" * 2000 + "\n", "|\n"),
    "a word that ends in @": ("x@", "a.a"),
    "attributes": ("x <a", " b=c"),
    "an address with brackets": ("http://a.b/", "("),
    "JavaScript without a space": ("```js\n", "A"),
    "JavaScript of spaces": ("```js\n", " \n"),
    "regular expressions in JavaScript": ("```js\n", " /a\\"),
    "numbers": ("```c\n", "1 "),
    "C# of functions": ("```csharp\n", "function "),
    "Nix of spaces": ("```nix\n", " \n"),
    "XML": ("```xml\n", '<a b="'),
    "XML of short tags": ("```xml\n", "<a>"),
    "Python": ("```py\n", 'f"{'),
}


def hostile_texts(length: int) -> dict[str, str]:
    """By name, each of about this many characters."""
    return {
        **{name: _grow(part, length) for name, part in REPEATED.items()},
        **{name: start + _grow(part, length) for name, (start, part) in BEGINNINGS.items()},
        "nested emphasis": _grow("*a **a ", length // 2) + _grow("b** b* ", length // 2),
        "nested scripts": f"$${_grow('a^{', min(length, 1000))}$$\n\n" * (length // 1000),
        "nested fractions": f"$${_grow(chr(92) + 'frac{', min(length, 1000))}$$\n\n" * (length // 1000),
        "nested brackets": "[" * (length // 2) + "a" + "]" * (length // 2),
        "runs of backticks": "".join("a" + "`" * n for n in range(1, int((2 * length) ** 0.5))),
        "nested lists": "".join(_indented(length)),
    }
