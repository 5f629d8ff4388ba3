"""Engines that are dropped, or still open when the interpreter ends, instead of being closed."""

from __future__ import annotations

import atexit
import contextlib
import warnings
import weakref
from collections.abc import Callable
from typing import Protocol

from cppbatch.config import EngineConfig


class Engine(Protocol):
    """An engine of any kind."""

    @property
    def config(self) -> EngineConfig: ...


class Closeable(Protocol):
    """An engine, or its thread. `close` does nothing when called again, or in a forked process."""

    def close(self) -> object: ...


def warn_unclosed(engine: Engine) -> None:
    """Issues the `ResourceWarning` of an engine that was dropped without `close`, as Python does for a file."""
    message = f"unclosed {type(engine).__name__} of {engine.config.model_path}; use `with`, or call `close`"
    warnings.warn(message, ResourceWarning, stacklevel=3, source=engine)


_open: weakref.WeakSet[Closeable] = weakref.WeakSet()
_then: list[Callable[[], object]] = []


def close_at_exit(engine: Closeable) -> None:
    """Closes an engine when the interpreter ends, unless it is gone by then: a thread inside llama.cpp while its
    statics are destroyed would crash, and some devices abort the process if anything is left on them."""
    _open.add(engine)


def call_at_exit(function: Callable[[], object]) -> None:
    """Calls a function when the interpreter ends, after all engines were closed."""
    _then.append(function)


@atexit.register
def _close_all() -> None:
    with contextlib.ExitStack() as stack:  # one that fails does not keep the others open
        for function in _then:
            stack.callback(function)
        for engine in list(_open):
            stack.callback(engine.close)
