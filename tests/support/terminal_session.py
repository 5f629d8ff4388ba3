"""A command in a terminal, under a shell, and what it leaves: signals go to all its processes, as Ctrl-C does."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.support.processes import left_after

_START_S = 0.2  # until Python handles signals
_SCRIPT = 'trap : INT; "$@"; echo "[exit code $?]"; sleep 1'  # a terminal survives its commands, and so do their lines


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    output: str
    left: list[str]
    """Processes that still ran 2 seconds later."""


def end_command(
    arguments: list[str | Path], after: float | str, how: signal.Signals = signal.SIGINT, *, times: int = 1
) -> Ended:
    """Runs `cppbatch` in a terminal, and ends it with Ctrl-C, or with a signal to it alone.

    `after`: seconds, or a text of its output, or the module of a child process, which has then started; before SIGTERM
    it is stopped, so that it cannot end by itself. `times`: how often, every 0.1 seconds.
    """
    shell, terminal = pty.fork()
    if not shell:
        os.execvp("sh", ["sh", "-c", _SCRIPT, "sh", sys.executable, "-m", "cppbatch", *map(str, arguments)])
    began, output, sent = time.monotonic(), b"", 0
    child: psutil.Process | None = None
    first = began + after if isinstance(after, (int, float)) else None
    try:
        while not (found := re.search(rb"\[exit code (\d+)\]", output)):
            now = time.monotonic()
            assert now < began + 90, f"it does not end: {output.decode(errors='replace')}"
            if isinstance(after, str) and first is None and after.encode() in output:
                first = now
            elif isinstance(after, str) and first is None and (child := _find(shell, after)):
                first = now + _START_S
            if sent < times and first is not None and now >= first + sent / 10:
                sent += 1
                if child and how is signal.SIGTERM:
                    child.suspend()
                _send(shell, terminal, how)
            output += _read(terminal, 0.01)
        members = [each for each in _session(shell) if each.pid != shell and each.name() != "sleep"]
        left = left_after(2, members)
        output += _read(terminal, 0.1)
        return Ended(int(found[1]), output.decode(errors="replace"), [" ".join(each.cmdline()) for each in left])
    finally:
        for each in _session(shell):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        os.waitpid(shell, 0)
        os.close(terminal)


def _send(shell: int, terminal: int, how: signal.Signals) -> None:
    if how is signal.SIGINT:
        os.write(terminal, b"\x03")
        return
    for command in psutil.Process(shell).children():
        command.send_signal(how)


def _read(terminal: int, seconds: float) -> bytes:
    with contextlib.suppress(OSError):  # Linux: the other end is closed
        if select.select([terminal], [], [], seconds)[0]:
            return os.read(terminal, 1 << 16)
    return b""


def _find(shell: int, module: str) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(shell).children(recursive=True):
            if any(module in argument for argument in child.cmdline()):
                return child
    return None


def _session(leader: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == leader:
                found.append(process)
    return found
