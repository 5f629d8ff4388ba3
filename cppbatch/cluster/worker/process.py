"""Starts worker processes, even before their model is known: the first one imports in parallel with its server."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from subprocess import PIPE

from cppbatch.child_processes import child_command, start


class WorkerProcess:
    """A process that reads a `WorkerSetup` from its standard input. Raises `OSError` if none can be started."""

    def __init__(self) -> None:
        self._child = start(child_command("cppbatch.cluster.worker.main"), stdin=PIPE)
        self._exit_code: Future[int] = Future()
        threading.Thread(target=self._wait, name="cppbatch-worker-exit", daemon=True).start()

    def _wait(self) -> None:
        self._exit_code.set_result(self._child.wait())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    def set_up(self, setup: bytes) -> None:
        """Sends the `WorkerSetup`, as one line of JSON."""
        assert self._child.stdin
        with contextlib.suppress(OSError):  # it has died, which `wait` reports
            self._child.stdin.write(setup + b"\n")
            self._child.stdin.flush()

    async def wait(self) -> int:
        """Waits for the end of the process and returns its exit code; below 0, the number of a signal."""
        import asyncio  # takes as long as the rest of the command's imports, and the process is started before them

        return await asyncio.shield(asyncio.wrap_future(self._exit_code))

    def kill(self) -> None:
        """Kills the process if it still runs."""
        self._child.kill()


_early: list[WorkerProcess] = []


def start_early() -> None:
    """Starts the process that the next call of `worker_process` returns. Without such a call, it ends with this
    process."""
    _early.append(WorkerProcess())


def end_early() -> None:
    """Ends the process of `start_early`, for a server whose engine needs none."""
    while _early:
        _early.pop().kill()


def worker_process() -> WorkerProcess:
    """The process of `start_early`, or a new one. Raises `OSError` if none can be started."""
    return _early.pop() if _early else WorkerProcess()
