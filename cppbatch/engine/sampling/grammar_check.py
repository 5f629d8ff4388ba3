"""Tries a grammar out in a child process, which is killed if that takes too long."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic

from cppbatch.errors import EngineClosed

_PATIENCE_S = 10.0


class CheckFailed(Exception):
    """The child died, for a reason that may not be the grammar's."""


class GrammarChecker:
    """llguidance has limits for parsing, but none for reading a grammar: some take hours, or all memory, or overflow
    the stack, which would end the process. Thread-safe; one grammar at a time. The child starts with the first one.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def definition(self, field: str, text: str) -> str:
        """A field of `SamplingParams` as llguidance wants it.

        Raises `ValueError` with the reason for a bad grammar, `CheckFailed` when the child died twice, `EngineClosed`.
        """
        with self._lock:
            line = self._ask(field, text) or self._ask(field, text)
        if not line:
            raise CheckFailed("could not be read: the process that tries it out died; it may need too much memory")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        definition: str = answer["definition"]
        return definition

    def _ask(self, field: str, text: str) -> str:
        """The child's answer; nothing when it died."""
        if self._closed:
            raise EngineClosed("the engine is closed")
        if self._child is None or self._child.poll() is not None:
            self._child = _start()
        child = self._child
        assert child.stdin
        assert child.stdout
        timer = threading.Timer(_PATIENCE_S, child.kill)
        timer.start()
        began = monotonic()
        try:
            child.stdin.write(json.dumps([field, text]) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:  # Ctrl-C: what it answers now would be taken for the answer to the next
            self._end()
            raise
        finally:
            timer.cancel()
        if not line:
            self._end()
        if not line and monotonic() - began >= _PATIENCE_S:
            raise ValueError(f"is too complex: it takes more than {_PATIENCE_S:.0f} seconds to read")
        return line

    def _end(self) -> None:
        if self._child:
            with self._child as child:
                child.kill()
            self._child = None

    def close(self) -> None:
        """Ends the child, for good."""
        with self._lock:
            self._closed = True
            self._end()


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("grammar_child.py"))],  # by its path: it needs nothing else of us
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # a terminal's Ctrl-C is for the engine, which ends it
    )
