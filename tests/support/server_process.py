"""A `cppbatch` server as users start it: a separate process, on a free port of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from tests.support import preloaded
from tests.support.blocking_client import BlockingClient
from tests.support.preloaded import PreloadedProcess

COMMAND = [sys.executable, "-m", "cppbatch"]


class ServerProcess(BlockingClient):
    """`cppbatch serve` with these arguments. `wait_ready` returns once it prints its address.

    `in_group`: its processes are a group of their own, which `kill_group` ends. `python`: the interpreter that has
    cppbatch, if it is not the one of the test. `module`: its program, such as `tests.support.paced_server`.
    """

    def __init__(
        self,
        *args: str | Path,
        in_group: bool = False,
        python: str | Path = sys.executable,
        module: str = "cppbatch",
    ) -> None:
        serve = ["serve", "--port", "0", *map(str, args)]
        options: dict[str, Any] = {
            "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": in_group,
        }  # fmt: skip
        self.process: subprocess.Popen[str] | PreloadedProcess
        if preloaded.is_used and str(python) == sys.executable:
            program = "cppbatch.cli" if module == "cppbatch" else module
            self.process = PreloadedProcess(serve, module=program, **options)
        else:
            self.process = subprocess.Popen([str(python), "-m", module, *serve], text=True, **options)
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as stream:
            for line in stream:
                self.lines.append(line)
                if found := re.search(r"ready at (http://\S+)", line):
                    self.url = found[1]
                if line.startswith("try:"):
                    self._ready.set()
        self._ready.set()

    def _read_errors(self) -> None:
        assert self.process.stderr
        with self.process.stderr as stream:
            for line in stream:
                self.errors.append(line)

    def wait_ready(self, seconds: float = 60) -> ServerProcess:
        assert self._ready.wait(seconds), "the server does not get ready"
        assert self.url, f"the server ended: {self.stop()}"
        return self

    @property
    def workers(self) -> list[psutil.Process]:
        """The processes of its engines."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if "cppbatch.cluster.worker.main" in child.cmdline():
                    found.append(child)
        return found

    def wait_idle(self, seconds: float = 30) -> dict[str, Any]:
        """The counters, once nothing runs or waits any more."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            stats: dict[str, Any] = self.get("/stats")
            if stats["running"] == stats["waiting"] == 0:
                return stats
            time.sleep(0.05)
        raise AssertionError(f"still busy after {seconds} s: {stats}")

    def wait_line(self, part: str, seconds: float = 10) -> None:
        """Until it prints or logs this."""
        end = time.monotonic() + seconds
        while not any(part in line for line in [*self.lines, *self.errors]):
            assert time.monotonic() < end, f"it does not say {part!r} but {self.lines} {self.errors}"
            time.sleep(0.01)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def kill_group(self) -> None:
        """kill -9 for it and its workers, all at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = 30) -> int:
        """The exit code."""
        return self.process.wait(seconds)

    def stop(self) -> str:
        """Ends it, whatever its state, and returns its stderr."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        for reader in self._readers:
            reader.join(10)
        return "".join(self.errors)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def answers(url: str) -> bool:
    """Whether something answers there."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
