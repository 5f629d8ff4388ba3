"""Ctrl-C at any line of an engine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

TraceFunction = Callable[[FrameType, str, Any], Any]


def is_subsequence(part: list[int], whole: list[int]) -> bool:
    rest = iter(whole)
    return all(token in rest for token in part)


NOT_THERE = (
    "step", "take_all", "ended", "_restart_if_interrupted", "rebuild", "_all_free", "clear",
    "restart", "restarted",
)  # fmt: skip
"""Where events are handed over, and the recovery itself: a second interrupt in the microsecond of the first."""


@contextlib.contextmanager
def interrupted_after(n_lines: int) -> Iterator[None]:
    """Raises KeyboardInterrupt in here when so many lines of the engine have run."""
    left = n_lines

    def trace(frame: FrameType, what: str, _: object) -> TraceFunction | None:
        nonlocal left
        if "cppbatch/engine" not in frame.f_code.co_filename:
            return None
        if what == "line":
            left -= 1
            if left == 0 and frame.f_code.co_name not in NOT_THERE:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
