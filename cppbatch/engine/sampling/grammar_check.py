"""Compiles a grammar in a child process first, which is killed if that takes too long."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic

from cppbatch.errors import EngineClosed

_TIMEOUT_S = 10.0


class CheckFailed(Exception):
    """The child process died, for a reason that may not be the grammar."""


class GrammarChecker:
    """Checks grammars in a child process. Thread-safe; one grammar at a time. The first grammar starts the child.

    llguidance limits matching, but not the compilation of a grammar: some grammars take hours or all memory, or
    overflow the stack, which would end this process.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def definition(self, field: str, text: str) -> str:
        """The grammar in llguidance's format. `field`: the field of `SamplingParams` that contains it, as `text`.

        Raises `ValueError` with the reason for a bad grammar, `CheckFailed` when the child died twice, `EngineClosed`.
        """
        with self._lock:
            line = self._ask(field, text) or self._ask(field, text)
        if not line:
            raise CheckFailed(
                "could not be checked: the process that compiles it died, possibly because it needs too much memory"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        definition: str = answer["definition"]
        return definition

    def _ask(self, field: str, text: str) -> str:
        """The child's answer, a line of JSON; empty if the child died."""
        if self._closed:
            raise EngineClosed("the engine is closed")
        if self._child is None or self._child.poll() is not None:
            self._child = _start()
        child = self._child
        assert child.stdin
        assert child.stdout
        timer = threading.Timer(_TIMEOUT_S, child.kill)
        timer.start()
        began = monotonic()
        try:
            child.stdin.write(json.dumps([field, text]) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:  # Ctrl-C: its answer would be taken for that to the next grammar
            self._end()
            raise
        finally:
            timer.cancel()
        if not line:
            self._end()
        if not line and monotonic() - began >= _TIMEOUT_S:
            raise ValueError(f"is too complex: compiling it takes more than {_TIMEOUT_S:.0f} seconds")
        return line

    def _end(self) -> None:
        if self._child:
            with self._child as child:
                child.kill()
            self._child = None

    def close(self) -> None:
        """Ends the child. No other one is started."""
        with self._lock:
            self._closed = True
            self._end()


def _start() -> subprocess.Popen[str]:
    program = Path(__file__).with_name("grammar_child.py")  # run by path: it imports nothing of this package
    return subprocess.Popen(
        [sys.executable, str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # Ctrl-C in a terminal reaches the engine only, which ends the child
    )
