"""Child processes with time limits, which may hang or crash without harm to the measuring process, and servers."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from cppbatch.child_processes import ends_with_parent
from cppbatch.errors import UnusableServer
from cppbatch.interrupts import interrupt_on_termination

if TYPE_CHECKING:
    from cppbatch.bench.load.client import LoadClient
    from cppbatch.bench.load.workload import Endpoint

_HTTP_SECONDS, _LOAD_SECONDS = 600, 3600


class CommandResult(NamedTuple):
    """The result of a command."""

    seconds: float
    output: str
    """stdout and stderr together."""
    failure: str | None
    """Why the output cannot be trusted; None: success."""


class ChildProcess:
    """A command that runs until it ends or the `with` block ends. Then it and its own child processes are killed.

    From the first one on, SIGTERM and SIGHUP end this process as Ctrl-C does (`interrupt_on_termination`). On Linux,
    SIGKILL of this process ends the command too.
    """

    def __init__(self, command: Sequence[str | Path]) -> None:
        """Starts the command. Raises OSError."""
        interrupt_on_termination()
        self._folder = tempfile.TemporaryDirectory(prefix="cppbatch-child-")
        self._log = Path(self._folder.name, "output")  # not a pipe: a full pipe would block the process
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    list(map(str, command)),
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=ends_with_parent(),  # noqa: PLW1509
                )  # fmt: skip
        except BaseException:
            self._folder.cleanup()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, seconds: float) -> int | None:
        """Returns the exit code; None: it still runs after this time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=seconds)
        return None

    def wait_for(self, url: str, seconds: float) -> str | None:
        """Waits until a GET of `url` returns 200. Returns the reason if it does not, else None."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (code := self.wait(0.2)) is not None:
                return f"ended with exit code {code}"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return None
        return f"was not ready after {seconds:.0f} s"

    def output(self) -> str:
        """Returns what the process has printed so far."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Kills the process and its descendants."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()
        self._folder.cleanup()


def run_with_timeout(command: Sequence[str | Path], seconds: float) -> CommandResult:
    """Runs a command and kills it after `seconds`. Does not raise if the command fails."""
    began = time.monotonic()
    try:
        with ChildProcess(command) as child:
            code = child.wait(seconds)
            output = child.output()
    except OSError as error:
        return CommandResult(0.0, "", f"it could not be started: {error}")
    took = time.monotonic() - began
    if code is None:
        return CommandResult(took, output, f"it was stopped after its time limit of {seconds:.0f} s")
    return CommandResult(took, output, f"it ended with exit code {code}" if code else None)


class RunningServer(NamedTuple):
    """A server that answers."""

    url: str
    process: ChildProcess


def cpu_seconds(pid: int) -> float:
    """CPU time of the process and its descendants."""
    process, total = psutil.Process(pid), 0.0
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(each.cpu_times()[:2])
    return total


@contextlib.contextmanager
def running_server(command: Sequence[str | Path], seconds: float = 120) -> Iterator[RunningServer]:
    """Starts a server on a free port of 127.0.0.1, yields it when its /health answers, and kills it at the end.

    `command`: without `--port`, which is added. Raises `UnusableServer`, with the end of its output, if it does not
    answer within `seconds`, and OSError if it cannot be started.
    """
    port = free_port()
    with ChildProcess([*command, "--host", "127.0.0.1", "--port", str(port)]) as process:
        if problem := process.wait_for(f"http://127.0.0.1:{port}/health", seconds):
            raise UnusableServer(f"{' '.join(map(str, command))} {problem}: {process.output()[-1000:]}")
        yield RunningServer(f"http://127.0.0.1:{port}", process)


def free_port() -> int:
    """Returns a TCP port that is unused now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve_command(model: str | Path, *flags: object) -> list[str]:
    """Returns the command of `cppbatch serve` with this Python."""
    return [sys.executable, "-m", "cppbatch", "serve", "-m", str(model), *map(str, flags)]


@contextlib.contextmanager
def running_servers(commands: Mapping[str, Sequence[str | Path]]) -> Iterator[dict[str, RunningServer]]:
    """Starts a server for each name, and ends all of them after the block. Raises `UnusableServer`."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(running_server(command)) for name, command in commands.items()}


def get_json(url: str) -> Any:
    """Returns the decoded answer to a GET. Raises OSError."""
    with urllib.request.urlopen(url, timeout=_HTTP_SECONDS) as answer:
        return json.load(answer)


def load_client(url: str, endpoint: Endpoint = "completions") -> LoadClient:
    """Returns the client of `cppbatch bench serve` for one server: a context manager that sends streaming requests."""
    from cppbatch.bench.load.client import LoadClient, TargetServer

    return LoadClient(TargetServer(label="server", url=url, model="", endpoint=endpoint), _LOAD_SECONDS)
