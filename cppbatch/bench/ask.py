"""A question to a module of ours in a process of its own, which llama.cpp may abort without harm to this one."""

from __future__ import annotations

import os
import subprocess
import sys


def ask(module: str, question: bytes, seconds: float) -> subprocess.CompletedProcess[bytes]:
    """Runs `python -m module` with the question as its input. What it answers is on its standard output.

    Raises `subprocess.TimeoutExpired` after so many seconds, and then it is gone; OSError where none can be started.
    """
    return subprocess.run(
        [sys.executable, "-m", module],
        input=question,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},  # a debugger's account of an abort takes seconds
        capture_output=True,
        timeout=seconds,
        check=False,
    )
