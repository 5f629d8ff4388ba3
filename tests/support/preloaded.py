"""`cppbatch` in new processes that need not import the package: forks of one that has done so, and nothing else.

A command spends most of its processor time on imports, and the tests start hundreds. What a command is started with
(arguments, environment, folder, streams, signals) is its own, as with `subprocess`; only the imports are made already.

    python -S tests/support/preloaded.py SOCKET serve -m model.gguf      a command for shells, of `Preloader.socket`
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

AVAILABLE = sys.platform == "linux"
"""Elsewhere a fork of a process with threads, such as those of numpy, may hang."""
is_used = False
"""Whether servers, workers and commands start like this; set by rings that start many."""

_MAX_ANSWER = 1 << 10


def connect(
    path: str, arguments: list[str], streams: list[int], *, module: str = "cppbatch.cli", in_group: bool = False
) -> socket.socket:
    """Starts a command with these three streams. The process answers its id, and at its end its exit code."""
    import resource  # not on Windows

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    started = {
        "module": module,
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "in_group": in_group,
        "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }
    socket.send_fds(connection, [json.dumps(started).encode()], streams)
    return connection


class Preloader:
    """The process that is forked. It ends with this one."""

    def __init__(self, folder: Path) -> None:
        self.socket = str(folder / "preloaded")
        command = [sys.executable, "-m", "tests.support.preloaded_main", self.socket]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        )
        assert self._process.stdout
        assert self._process.stdout.readline() == b"ready\n"

    def running(self) -> list[psutil.Process]:
        """The commands that have not ended."""
        import psutil

        children: list[psutil.Process] = psutil.Process(self._process.pid).children()
        return children

    def close(self) -> None:
        """Ends it. The commands continue."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)


_lock = threading.Lock()
_preloaders: list[Preloader] = []


def preloader() -> Preloader:
    """That of this process, started when it is first needed."""
    import tempfile

    with _lock:
        if not _preloaders:
            folder = tempfile.TemporaryDirectory(prefix="t")  # a short path, for the socket
            _preloaders.append(made := Preloader(Path(folder.name)))
            atexit.register(folder.cleanup)
            atexit.register(made.close)
        return _preloaders[0]


class PreloadedProcess:
    """`cppbatch` with these arguments: what the tests use of `subprocess.Popen(..., text=True)`.

    `module`: whose `main` it runs.
    """

    def __init__(
        self,
        arguments: list[str],
        *,
        module: str = "cppbatch.cli",
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.returncode: int | None = None
        self._lock = threading.Lock()
        with contextlib.ExitStack() as ours:
            streams: list[int] = []
            self.stdin: IO[str] | None = None
            if stdin == subprocess.PIPE:
                theirs, mine = os.pipe()
                ours.callback(os.close, theirs)
                self.stdin = os.fdopen(mine, "w", encoding="utf-8")
                streams.append(theirs)
            else:
                streams.append(_descriptor(stdin, 0, ours))
            self.stdout = _reader(stdout, 1, streams, ours)
            self.stderr = _reader(stderr, 2, streams, ours)
            self._connection = connect(
                preloader().socket, arguments, streams, module=module, in_group=start_new_session
            )
        self.pid: int = json.loads(self._connection.recv(_MAX_ANSWER))["pid"]

    def poll(self) -> int | None:
        """The exit code, if it has ended; below 0, the number of a signal."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, at its end. Raises `subprocess.TimeoutExpired`."""
        answers = select.poll()
        answers.register(self._connection, select.POLLIN)
        if self.returncode is None and not answers.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired("cppbatch", timeout or 0)
        with self._lock:
            if self.returncode is None:
                self.returncode = json.loads(self._connection.recv(_MAX_ANSWER))["code"]
            assert self.returncode is not None
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Has no effect on a process that has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _reader(wanted: int | None, usual: int, streams: list[int], ours: contextlib.ExitStack) -> IO[str] | None:
    if wanted != subprocess.PIPE:
        streams.append(_descriptor(wanted, usual, ours))
        return None
    mine, theirs = os.pipe()
    ours.callback(os.close, theirs)
    streams.append(theirs)
    return os.fdopen(mine, encoding="utf-8")


def _descriptor(wanted: int | None, usual: int, ours: contextlib.ExitStack) -> int:
    if wanted == subprocess.DEVNULL:
        found = os.open(os.devnull, os.O_RDWR)
        ours.callback(os.close, found)
        return found
    return usual if wanted is None else wanted


def _main() -> None:
    path, *arguments = sys.argv[1:]
    connection = connect(path, arguments, [0, 1, 2])
    pid: int = json.loads(connection.recv(_MAX_ANSWER))["pid"]

    def pass_on(number: int, _frame: Any) -> None:
        os.kill(pid, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    code: int = json.loads(connection.recv(_MAX_ANSWER))["code"]
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    _main()
