"""Ctrl-C during imports ends the process at once. A KeyboardInterrupt would print a traceback, since some modules wrap
it in errors of their own."""

import os
import signal
import threading


class QuietImports:
    """`with QuietImports():` around slow imports. Does nothing if Ctrl-C already has another handler."""

    def __enter__(self) -> None:
        self._is_default = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._is_default:
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))

    def __exit__(self, *_: object) -> None:
        if self._is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
