"""`cppbatch chat` in a terminal: multi-line input with history, answers rendered as Markdown while they arrive."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.style import Style
from rich.theme import Theme

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

ANSWER_STYLES = Theme({"markdown.code": Style(color="magenta"), "markdown.code_block": Style()})
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, which a model could use to control the terminal; excludes tab and newline."""


def printable(text: str) -> str:
    """The text without terminal control characters."""
    return _CONTROL.sub("", text)


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
