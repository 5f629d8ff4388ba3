"""Ctrl-C: delayed until the end of a block, such as a call into C that calls back into Python; and other signals that
end a process in the same way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


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


def interrupt_on_termination() -> None:
    """From now on, SIGTERM and SIGHUP end this process as Ctrl-C does, so that the `with` blocks end: by default they
    would leave child processes and unfinished files. After the first one, both do nothing.

    Only has an effect on the main thread. Signals that have a handler or are ignored (nohup) stay so.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no SIGHUP
    taken = [number for name in names if signal.getsignal(number := getattr(signal, name)) == signal.SIG_DFL]

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, lambda *_: None)  # unlike SIG_IGN, not inherited by child processes
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # ignored, as in a background job of a shell script
            raise KeyboardInterrupt
        handler(number, frame)

    for each in taken:
        signal.signal(each, interrupt)
