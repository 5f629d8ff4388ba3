"""SIGINT, SIGTERM and SIGHUP in asyncio: the first signal asks for an orderly end, a second one ends the process."""

from __future__ import annotations

import asyncio
import os
import signal

IMMEDIATE_EXIT_CODE = 130
"""The exit code of a process that a second signal ended."""


def set_on_signals(stop: asyncio.Event) -> None:
    """Sets the event on SIGINT, SIGTERM or SIGHUP. A second SIGINT or SIGTERM ends the process.

    Closing a terminal sends SIGHUP, often twice. Where SIGHUP is ignored (nohup), it stays ignored.
    """
    loop = asyncio.get_running_loop()

    def received() -> None:
        if stop.is_set():
            os._exit(IMMEDIATE_EXIT_CODE)  # at once, even while other threads are busy
        stop.set()

    for name in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(name, received)
        except NotImplementedError:  # Windows
            signal.signal(name, lambda *_: loop.call_soon_threadsafe(received))
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, stop.set)
