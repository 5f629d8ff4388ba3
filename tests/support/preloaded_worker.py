"""The worker process of an engine, whose packages are imported already."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from concurrent.futures import Future

from cppbatch.child_processes import _signals_blocked
from cppbatch.cluster.worker.process import WorkerProcess
from tests.support.preloaded import PreloadedProcess


class PreloadedWorker(WorkerProcess):
    """In place of `WorkerProcess`. It ends with the link to the server, not by the signal of a parent's end."""

    def __init__(self) -> None:
        with _signals_blocked():
            self._process = PreloadedProcess([], module="cppbatch.cluster.worker.main", stdin=subprocess.PIPE)
        self._exit_code: Future[int] = Future()
        threading.Thread(target=lambda: self._exit_code.set_result(self._process.wait()), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def set_up(self, setup: bytes) -> None:
        assert self._process.stdin
        with contextlib.suppress(OSError):
            self._process.stdin.write(setup.decode() + "\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
