"""Ctrl-C, SIGTERM and SIGHUP for asyncio: the first asks for an orderly end, a second one ends the process at once."""

from __future__ import annotations

import asyncio
import os
import signal

AT_ONCE = 130
"""The exit code of a process that a second signal has ended."""


def on_signals(stop: asyncio.Event) -> None:
    """Sets the event at SIGINT, SIGTERM or SIGHUP, and ends the process when one of the first two comes again.

    A terminal that is closed sends SIGHUP, often twice. Where it is ignored (nohup) it stays so.
    """
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
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, stop.set)
