"""Compiles a grammar in a child process first, which is killed if it takes too long.

Most grammars take milliseconds. Those that take more than a second are compiled again by another child, so that other
requests do not wait for them.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

from cppbatch.child_processes import child_command, start
from cppbatch.errors import EngineClosed

_CPU_S = 10.0
QUICK_S = 1.0
_START_S = 60.0
TOO_COMPLEX = "is too complex"
if sys.platform == "win32":  # has no limit for CPU time
    _TIMEOUT_S, _OUT_OF_CPU_TIME = _CPU_S, None
else:  # a busy machine gives the child, at its low priority, a tenth of a core
    _TIMEOUT_S, _OUT_OF_CPU_TIME = 30.0, -signal.SIGPROF


class SlowGrammar(Exception):
    """The grammar takes too long to compile while others wait; `constraint` with `patient` may compile it."""


class CheckFailed(Exception):
    """The child process died or was too slow, possibly not because of the grammar."""


class TooComplex(ValueError):
    """Compiling the grammar takes too long."""


class GrammarChecker:
    """Checks grammars in a child process. Thread-safe; one grammar at a time. The first grammar starts the child.

    llguidance limits matching, but not compilation: some grammars take hours or all memory, or overflow the stack,
    which would crash this process.
    """

    def __init__(self, cpu_s: float = _CPU_S, timeout_s: float = _TIMEOUT_S) -> None:
        self._cpu_s, self._timeout_s = cpu_s, timeout_s
        self._child: subprocess.Popen[str] | None = None
        self._is_ready = False  # the child has made its imports
        self._closed = False
        self._lock = threading.Lock()  # held while the child reads a grammar
        self._starting = threading.Lock()  # so that none starts after `close` has looked for it

    def definition(self, field: str, text: str) -> str:
        """The grammar in llguidance's format. `field`: the field of `SamplingParams` with the grammar, `text`.

        Raises `ValueError` with the reason for an invalid grammar (`TooComplex` for one that takes too long),
        `CheckFailed` if the child died twice or the cores are busy, `EngineClosed` if `close` was called, also
        meanwhile.
        """
        with self._lock:
            line = self._ask(field, text) or self._ask(field, text)
        if not line:
            raise CheckFailed(
                "could not be checked: the process that compiles it died, possibly because it needs too much memory; "
                "use smaller bounds or fewer alternatives"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        definition: str = answer["definition"]
        return definition

    def _ask(self, field: str, text: str) -> str:
        """The child's answer, a line of JSON; empty if the child died."""
        with self._starting:
            if self._closed:
                raise EngineClosed("the engine is closed")
            if self._child is None or self._child.poll() is not None:
                self._is_ready = False
                self._child = _start()
            child = self._child
        assert child.stdin
        assert child.stdout
        try:
            if not self._is_ready:  # on a busy machine its imports can take longer than a grammar may
                with _killed_after(child, _START_S):
                    self._is_ready = bool(child.stdout.readline())
            began = monotonic()
            with _killed_after(child, self._timeout_s):
                child.stdin.write(json.dumps([field, text, self._cpu_s]) + "\n")
                child.stdin.flush()
                line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:  # Ctrl-C: its answer would be mistaken for that to the next grammar
            self._end()
            raise
        if line:
            return line
        self._end()
        is_late = monotonic() - began >= self._timeout_s
        if child.returncode == _OUT_OF_CPU_TIME or (is_late and self._timeout_s <= self._cpu_s):
            raise TooComplex(f"{TOO_COMPLEX}: compiling it takes more than {self._cpu_s:.0f} seconds")
        if is_late:
            message = f"was not compiled within {self._timeout_s:.0f} seconds: other programs use the cores; try again"
            raise CheckFailed(message)
        return ""

    def _end(self) -> None:
        if self._child:
            with contextlib.suppress(BrokenPipeError), self._child as child:  # a grammar that it has not read
                child.kill()
            self._child = None

    def close(self) -> None:
        """Stops the child, also while it reads a grammar (then `definition` raises), and prevents starting another."""
        with self._starting:
            self._closed = True
            if child := self._child:
                child.kill()
        with self._lock:
            self._end()


@contextlib.contextmanager
def _killed_after(child: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _start() -> subprocess.Popen[str]:
    return start(
        child_command(str(Path(__file__).with_name("grammar_child.py"))),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
    )
