"""How answers appear in a terminal while they are generated."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.style import Style
from rich.syntax import ANSISyntaxTheme
from rich.text import Text

from cppbatch.cli.chat.terminal import printable

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

_CODE = ANSISyntaxTheme(
    {
        (): Style(),
        ("Comment",): Style(dim=True, italic=True),
        ("Keyword",): Style(color="magenta"),
        ("Operator", "Word"): Style(color="magenta"),
        ("Literal", "String"): Style(color="green"),
        ("Literal", "Number"): Style(color="cyan"),
        ("Name", "Function"): Style(bold=True),
        ("Name", "Class"): Style(bold=True),
    }
)
"""The terminal's own colours without a background, so that code is readable on dark and light backgrounds."""


class TerminalView:
    """Shows a conversation with rich. Final parts of an answer are printed once; the rest is redrawn."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._answer: _LiveAnswer | None = None

    def begin(self) -> None:
        """See `ChatView`."""
        self._answer = _LiveAnswer(self._console)

    def add(self, text: str, reasoning: str) -> None:
        """See `ChatView`."""
        assert self._answer
        self._answer.add(printable(text), printable(reasoning))

    def end(self, summary: str) -> None:
        """See `ChatView`."""
        assert self._answer
        self._answer.close()
        self._answer = None
        self._console.print(Text(summary, style="dim"))
        self._console.print()

    def say(self, line: str) -> None:
        """See `ChatView`."""
        self._console.print(Text(printable(line), style="cyan"))
        self._console.print()

    def fail(self, line: str) -> None:
        """See `ChatView`."""
        self._console.print(Text(printable(line), style="red"))
        self._console.print()


class _LiveAnswer:
    """An answer while it grows: reasoning dimmed, then Markdown, block by block."""

    def __init__(self, console: Console) -> None:
        from markdown_it import MarkdownIt

        self._console, self._parser = console, MarkdownIt().enable("table")
        self._reasoning = self._text = ""
        self._has_block = False
        self._live = Live(
            console=console, refresh_per_second=8, transient=True, get_renderable=self._tail,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._live.start()

    def add(self, text: str, reasoning: str) -> None:
        """Adds a part."""
        self._reasoning += reasoning
        if text:
            self._end_reasoning()
            self._text += text
            if "\n" in text:
                done = _lines_of_finished_blocks(self._parser, self._text)
                lines = self._text.splitlines(keepends=True)
                self._text = "".join(lines[done:])
                self._print("".join(lines[:done]))

    def close(self) -> None:
        """Ends the answer."""
        self._end_reasoning()
        rest, self._text = self._text, ""
        self._live.stop()
        self._print(rest)

    def _end_reasoning(self) -> None:
        if said := self._reasoning.strip():
            self._reasoning = ""
            self._console.print(Text(said, style="dim italic"))
            self._has_block = True

    def _print(self, markdown: str) -> None:
        if not markdown.strip():
            return
        if self._has_block:
            self._console.print()
        self._console.print(_to_markdown(markdown))
        self._has_block = True

    def _tail(self) -> RenderableType:
        if self._reasoning:
            return _LastLines(Text(self._reasoning.strip(), style="dim italic"))
        blank = "\n" if self._has_block and self._text.strip() else ""
        return _LastLines(Text(blank, end=""), _to_markdown(self._text)) if self._text else Text("…", style="dim")


def _to_markdown(markdown: str) -> Markdown:
    return Markdown(markdown, code_theme=cast(str, _CODE))  # the highlighter takes a theme in place of its name


def _lines_of_finished_blocks(parser: MarkdownIt, text: str) -> int:
    """The number of lines of a growing Markdown text in blocks that further text cannot change."""
    starts = [token.map[0] for token in parser.parse(text) if token.level == 0 and token.map]
    return starts[-1] if starts else 0


class _LastLines:
    """The last lines that fit on the screen: a live display cannot be taller."""

    def __init__(self, *parts: RenderableType) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [line for part in self._parts for line in console.render_lines(part, options, pad=False)]
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()
