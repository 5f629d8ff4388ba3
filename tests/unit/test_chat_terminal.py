"""What `cppbatch chat` draws: Markdown block by block, dimmed reasoning, nothing that steers the terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from cppbatch.cli.chat.answer_view import TerminalView
from cppbatch.cli.chat.terminal import ANSWER_STYLES, printable

ANSWER = (
    "# Title\n\nSome *text*\nof two lines.\n\n1. one\n2. two\n\n```python\nprint('a')\n\nprint('b')\n```\n\nThe end."
)


def shown(pieces: list[str], *, reasoning: str = "", colours: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out, width=40, force_terminal=colours, color_system="standard" if colours else None, theme=ANSWER_STYLES
    )
    view = TerminalView(console)
    view.begin()
    if reasoning:
        view.add("", reasoning)
    for piece in pieces:
        view.add(piece, "")
    view.end("3 tokens")
    return out.getvalue()


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_an_answer_looks_the_same_however_it_is_split(size: int) -> None:
    text = shown([ANSWER[i : i + size] for i in range(0, len(ANSWER), size)])
    lines = [line.strip() for line in text.splitlines()]
    for once in ("Title", "Some text of two lines.", "1 one", "2 two", "print('a')", "print('b')", "The end."):
        assert sum(once in line for line in lines) == 1, once
    assert lines.index("The end.") > lines.index("print('b')")
    assert lines[-2:] == ["3 tokens", ""]


def test_reasoning_is_dimmed_and_comes_before_the_answer() -> None:
    text = shown(["Yes."], reasoning="Let me think.", colours=True)
    assert "\x1b[2;3mLet me think.\x1b[0m" in text
    assert text.rindex("Yes.") > text.index("Let me think.")
    assert "\x1b[2m3 tokens\x1b[0m" in text


def test_an_answer_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b]0;title\x07b\x9b2Jc\td\ne\r") == "a]0;titleb2Jc\td\ne"
    assert "\x1b" not in shown(["red \x1b[31m"])


def test_code_has_no_background_so_that_it_can_be_read_on_light_and_dark_terminals() -> None:
    text = shown(["A `word`:\n\n```python\ndef f():  # a comment\n    return 'a', 1\n```\n"], colours=True)
    codes = {code for codes in re.findall(r"\x1b\[([\d;]*)m", text) for code in codes.split(";") if code}
    assert not {code for code in codes if int(code) in range(40, 48) or int(code) in range(100, 108)}
    assert {"35", "32", "36"} <= codes, "keywords, strings and numbers have colours"
