"""Ctrl-C and SIGTERM for asyncio: the first asks for an orderly end, the second gets one at once."""

from __future__ import annotations

import asyncio
import os
import signal

AT_ONCE = 130
"""The exit code of a process that a second signal has ended."""


def on_signals(stop: asyncio.Event) -> None:
    """Sets the event at SIGINT or SIGTERM, and ends the process when another one comes."""
    loop = asyncio.get_running_loop()

    def received() -> None:
        if stop.is_set():
            os._exit(AT_ONCE)  # a second signal: now, whatever a thread is doing
        stop.set()

    for name in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(name, received)
        except NotImplementedError:  # Windows
            signal.signal(name, lambda *_: loop.call_soon_threadsafe(received))
