"""`cppbatch chat` in a terminal: multi-line input with history, answers rendered as Markdown while they arrive."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.style import Style
from rich.syntax import ANSISyntaxTheme
from rich.text import Text
from rich.theme import Theme

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

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
ANSWER_STYLES = Theme({"markdown.code": Style(color="magenta"), "markdown.code_block": Style()})
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, which a model could use to control the terminal; excludes tab and newline."""


def printable(text: str) -> str:
    """The text without terminal control characters."""
    return _CONTROL.sub("", text)


# --- answers ----------------------------------------------------------------------------------------------------------


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


# --- input ------------------------------------------------------------------------------------------------------------


class TerminalInput:
    """Typed messages: Enter sends, Alt-Enter or Ctrl-J starts a new line, arrow keys browse the history."""

    def __init__(self, commands: Mapping[str, str], history: Path, say: Callable[[str], object]) -> None:
        """`history`: a file, created if missing."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory

        self._say = say
        kept: History = InMemoryHistory()
        try:
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(mode=0o600)
            kept = FileHistory(str(history))
        except OSError as error:
            say(f"the input history is not saved: cannot write {history}: {error.strerror}")
        self._session: PromptSession[str] = PromptSession(
            [("bold ansigreen", "> ")],
            multiline=True,
            prompt_continuation="  ",
            history=kept,
            key_bindings=_keys(),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
        )

    def __iter__(self) -> Iterator[str]:
        """Yields messages until Ctrl-D, or Ctrl-C twice at an empty prompt. Otherwise Ctrl-C clears the input."""
        is_second = False
        while True:
            try:
                line = self._session.prompt()
            except EOFError:
                return
            except KeyboardInterrupt:
                if is_second:
                    return
                is_second = not self._session.default_buffer.text
                if is_second:
                    self._say("press Ctrl-C again, or Ctrl-D, to quit")
                continue
            is_second = False
            yield line


@contextlib.contextmanager
def quiet_terminal() -> Iterator[None]:
    """Between prompts, keys are not echoed into the answer, and Enter stays Enter: text typed during an answer
    appears at the next prompt. Ctrl-C interrupts."""
    if sys.platform == "win32":  # where this is the default
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    quiet = termios.tcgetattr(sys.stdin)
    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("c-j")
    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


# --- without a terminal -----------------------------------------------------------------------------------------------


class PlainView:
    """Writes only the answers to stdout, each followed by a newline, and everything else to stderr."""

    _is_at_start = True

    def begin(self) -> None:
        """See `ChatView`."""
        self._is_at_start = True

    def add(self, text: str, reasoning: str) -> None:
        """See `ChatView`. Reasoning is left out."""
        if text:
            click.echo(text, nl=False)
            self._is_at_start = text.endswith("\n")

    def end(self, summary: str) -> None:
        """See `ChatView`."""
        if not self._is_at_start:
            click.echo()

    def say(self, line: str) -> None:
        """See `ChatView`."""
        click.echo(line, err=True)

    fail = say


def piped_lines() -> Iterator[str]:
    """The lines of standard input, each a message."""
    for line in sys.stdin:
        yield line.rstrip("\r\n")


def is_terminal() -> bool:
    """Whether both stdin and stdout are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()
