"""Ctrl-C that waits for the end of a block, such as a call into C that calls Python back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_deferred() -> Iterator[Callable[[], bool]]:
    """Calls the handler of Ctrl-C at the end of the block, if it is pressed within. Only the main thread has one.

    Yields a function that returns whether it has been pressed.
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
