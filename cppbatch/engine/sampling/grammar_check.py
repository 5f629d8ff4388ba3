"""Tries a grammar out in a child process, which is killed if that takes too long."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_PATIENCE_S = 10.0


class GrammarChecker:
    """llguidance has limits for parsing, but none for reading a grammar: some take hours, or all memory, or overflow
    the stack, which would end the process. Thread-safe; one grammar at a time. The child starts with the first one.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def definition(self, field: str, text: str) -> str:
        """A field of `SamplingParams` as llguidance wants it. Raises `ValueError` with the reason for a bad grammar."""
        with self._lock:
            answer = self._ask(field, text)
        if "error" in answer:
            raise ValueError(answer["error"])
        definition: str = answer["definition"]
        return definition

    def _ask(self, field: str, text: str) -> dict[str, Any]:
        if self._child is None or self._child.poll() is not None:
            self._child = _start()
        child = self._child
        assert child.stdin
        assert child.stdout
        timer = threading.Timer(_PATIENCE_S, child.kill)
        timer.start()
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
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._end()
        return {
            "error": f"is too complex: it takes more than {_PATIENCE_S:.0f} seconds, or too much memory, to compile"
        }

    def _end(self) -> None:
        if self._child:
            with self._child as child:
                child.kill()
            self._child = None

    def close(self) -> None:
        """Ends the child."""
        with self._lock:
            self._end()


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("grammar_child.py"))],  # by its path, it imports nothing else
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
    )
