"""Ctrl-C at any line of an engine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from cppbatch import BatchInferenceEngine, GenerationEvent, SamplingParams
from tests.support.fakes import drain, reference, tokens_of

TraceFunction = Callable[[FrameType, str, Any], Any]


def is_subsequence(part: list[int], whole: list[int]) -> bool:
    rest = iter(whole)
    return all(token in rest for token in part)


NOT_THERE = (
    "take_all", "keep", "finished_ids", "rebuild", "_all_free", "clear", "restart", "restarted",
)  # fmt: skip
"""Where events are handed over, and the recovery itself: a second interrupt in the microsecond of the first."""


@contextlib.contextmanager
def interrupted_after(n_lines: int) -> Iterator[None]:
    """Raises KeyboardInterrupt within this context after this number of lines of the engine."""
    left = n_lines

    def trace(frame: FrameType, what: str, _: object) -> TraceFunction | None:
        nonlocal left
        file = frame.f_code.co_filename
        if "cppbatch/engine" not in file or file.endswith(("engine/request_engine.py", "engine/access.py")):
            return None  # an access defers Ctrl-C
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


def assert_survives_ctrl_c(
    engine: BatchInferenceEngine, prompts: list[list[int]], params: SamplingParams, *, after: int, n_priorities: int = 1
) -> None:
    """Runs the prompts and interrupts that once `after` lines have run: each request ends exactly once, with a part of
    its own text, and nothing is lost."""
    engine.generate([prompts[0]], SamplingParams(temperature=0, max_tokens=1))
    names = [engine.add_request(prompt, params, priority=i % n_priorities) for i, prompt in enumerate(prompts)]
    events: list[GenerationEvent] = []
    with interrupted_after(after):
        for _ in range(40):
            events += engine.step()
    engine.core.kv.check()
    events += drain(engine)
    assert sorted(event.request_id for event in events if event.finish_reason) == sorted(names)
    for name, prompt in zip(names, prompts, strict=True):
        expected = reference(prompt, params)[0]
        assert is_subsequence(tokens_of(events, name), expected)
        assert len(tokens_of(events, name)) >= len(expected) - 4
    engine.clear_prefix_cache()
    engine.core.kv.check()
