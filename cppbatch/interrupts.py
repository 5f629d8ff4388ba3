"""Delays Ctrl-C until the end of a block, such as a call into C that calls back into Python."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_deferred() -> Iterator[Callable[[], bool]]:
    """Delays the Ctrl-C handler to the end of the block. Only has an effect on the main thread.

    Yields a function that returns whether Ctrl-C was pressed.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if in_main_thread else None
    is_pressed = False
    if not callable(handler):
        yield lambda: is_pressed
        return

    def note(*_: object) -> None:
        nonlocal is_pressed
        is_pressed = True

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: is_pressed
    finally:
        signal.signal(signal.SIGINT, handler)
        if is_pressed:
            handler(signal.SIGINT, None)
