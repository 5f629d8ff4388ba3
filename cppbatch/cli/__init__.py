"""The command line: reads flags, calls the other packages, prints. It contains no logic of its own."""

import os
import signal
import threading

_has_traceback = (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
)
if _has_traceback:  # of a KeyboardInterrupt in any line of an import, some of which wrap it in errors of their own
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from cppbatch.cli.main import main  # noqa: E402

if _has_traceback:
    signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["main"]
