"""`cppbatch chat` in a real terminal (a PTY): stream, Ctrl-C, several lines, /retry, /save."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server_process import ServerProcess

if sys.platform == "win32":
    pytest.skip("Windows has no PTYs", allow_module_level=True)

import fcntl
import pty
import struct
import termios

PACED = "tests.support.paced_server"  # an answer lasts long enough to be stopped
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[()][A-Z0-9]|[=>78])")
_SUMMARY = r"(\d+) tokens ·(?: [\d.]+ tokens/s ·)? first token after [\d.]+ s"

_WITH_CTRL_C = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Runs a program with its standard input as controlling terminal, so that Ctrl-C there is a signal."""


class Terminal:
    """A program in a terminal of 90 columns. `story`, `capital`: texts in the model's answers."""

    def __init__(self, *command: str, state: Path, story: str = "", capital: str = "") -> None:
        self.story, self.capital = story, capital
        self._at, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "XDG_STATE_HOME": str(state)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WITH_CTRL_C, *command],
            stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(child)
        self._raw = b""

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """Reads until a regular expression is on the screen. Returns the text up to its end, without escapes, and
        forgets it."""
        deadline = time.monotonic() + seconds
        while True:
            text = _ESCAPES.sub("", self._raw.decode(errors="replace")).replace("\r", "")
            if found := re.search(pattern, text):
                self._raw = text[found.end() :].encode()
                return text[: found.end()]
            assert time.monotonic() < deadline, f"no {pattern!r} in {text!r}"
            if not select.select([self._at], [], [], 0.2)[0]:
                continue
            new = os.read(self._at, 65536)
            if b"\x1b[6n" in new:  # the program asks where the cursor is
                os.write(self._at, b"\x1b[1;1R")
            self._raw += new

    def type(self, keys: str) -> None:
        os.write(self._at, keys.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._at)


@pytest.fixture(
    params=[
        ("in this process", "default_model"),
        ("with a server", "stand_in"),
        pytest.param(("with a server", "default_model"), marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    where, name = request.param
    model = request.getfixturevalue(name)
    command = [sys.executable, "-m", "cppbatch", "chat", "--temp", "0"]
    said = {"story": "sea", "capital": "Paris"} if name == "default_model" else {}
    if name != "default_model":
        command += ["-n", "200"]  # it ends no text by itself
    with contextlib.ExitStack() as stack:
        if where == "with a server":
            module = "cppbatch" if name == "default_model" else PACED
            server = stack.enter_context(ServerProcess("-m", model, "-c", "4096", "-np", "2", module=module))
            command += ["--url", server.wait_ready().url]
        else:
            command += ["-m", str(model), "-c", "4096"]
        opened = Terminal(*command, state=tmp_path, **said)
        stack.callback(opened.close)
        yield opened


def test_a_conversation_in_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for(r"chatting with .*(.*\n)*> ")
    terminal.type("Write a very long story about the sea.\r")
    terminal.wait_for("story about the sea")
    terminal.wait_for(r"\w+ \w+ \w+ \w+")  # the answer streams
    time.sleep(0.5)
    terminal.type("\x03")
    stopped = terminal.wait_for(_SUMMARY + " · stopped")
    assert terminal.story in stopped
    assert "^C" not in stopped

    terminal.type("/clear\r")
    terminal.wait_for("a new conversation")
    terminal.type("What is the capital\x1b\rof France?\nAnswer in one word.\r")
    assert terminal.capital in terminal.wait_for(f"{_SUMMARY}|cut off after 200 tokens")

    terminal.type("/retry\r")
    assert terminal.capital in terminal.wait_for(f"{_SUMMARY}|cut off after 200 tokens")

    terminal.type(f"/save {tmp_path / 'talk.json'}\r")
    terminal.wait_for("saved 2 messages(.*\n)*.*> ")
    asked, answered = json.loads((tmp_path / "talk.json").read_text())
    assert asked["content"] == "What is the capital\nof France?\nAnswer in one word."
    assert terminal.capital in answered["content"]

    terminal.type("\x03")
    terminal.wait_for("press Ctrl-C again, or Ctrl-D, to quit(.*\n)*.*> ")
    terminal.type("\x03")
    assert terminal.process.wait(30) == 0
    history = tmp_path / "cppbatch" / "chat_history"
    assert "Answer in one word." in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
