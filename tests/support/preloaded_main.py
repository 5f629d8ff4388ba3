"""The process of `Preloader`: imports what the commands of `cppbatch` import, and becomes one of them in each fork."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
from typing import Any

_IMPORTED_BY_COMMANDS = (
    "aiohttp", "cppbatch.bench.memory_report", "cppbatch.cli.batch_command", "cppbatch.cli.chat_command",
    "cppbatch.cli.doctor_command", "cppbatch.cli.generate_command", "cppbatch.cli.memory_command",
    "cppbatch.cli.models_command", "cppbatch.cli.rpc_worker_command", "cppbatch.cli.serve_command",
    "cppbatch.cluster.deployment", "cppbatch.cluster.rpc_server_process",
    "cppbatch.cluster.worker.main",
    "cppbatch.server.api.batches.offline", "cppbatch.server.run_server",
)  # fmt: skip
"""Not what loads llama.cpp's library, which a server does not."""


class Command:
    """What a fork has to run."""

    def __init__(self, request: bytes, streams: list[int]) -> None:
        self._request: dict[str, Any] = json.loads(request)
        self._streams = streams

    def run(self) -> None:
        """Runs it in this process."""
        self._prepare()
        importlib.import_module(self._request["module"]).main()

    def _prepare(self) -> None:
        """Gives this process the arguments, environment, folder and streams of the command."""
        its = self._request
        if its["in_group"]:
            os.setsid()
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(its["files"]))
        for number, stream in enumerate(self._streams):
            os.dup2(stream, number)
        for stream in self._streams:
            if stream > 2:
                os.close(stream)
        os.chdir(its["folder"])
        os.environ.clear()
        os.environ.update(its["environment"])
        sys.argv = ["cppbatch", *its["arguments"]]
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, its["blocked"])


class Forks:
    """Starts commands, and reports their ends."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(100)
        self._clients: dict[int, socket.socket] = {}
        self._woken, wake = socket.socketpair()
        for end in (self._woken, wake):
            end.setblocking(False)
        self._wake = wake

    def next_command(self) -> Command | None:
        """Returns in each fork, with the command to run; in this process, None at the end of standard input."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno())
        with selectors.DefaultSelector() as selector:
            for each in (self._listener, self._woken, sys.stdin.fileno()):
                selector.register(each, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if sys.stdin.fileno() in ready:
                    return None
                if self._woken in ready:
                    self._woken.recv(1 << 10)
                    self._report_ends()
                if self._listener in ready and (command := self._fork()):
                    return command

    def _fork(self) -> Command | None:
        client = self._listener.accept()[0]
        request, streams, _, _ = socket.recv_fds(client, 1 << 20, 3)
        pid = os.fork()
        if pid:
            for stream in streams:
                os.close(stream)
            self._clients[pid] = client
            client.send(json.dumps({"pid": pid}).encode())
            return None
        signal.set_wakeup_fd(-1)
        for each in (client, self._listener, self._woken, self._wake, *self._clients.values()):
            each.close()
        return Command(request, streams)

    def _report_ends(self) -> None:
        while self._clients:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            client = self._clients.pop(pid)
            with contextlib.suppress(OSError):  # it has left
                client.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
            client.close()


def main() -> None:
    """Ends with its standard input."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as cppbatch sets it: a fork has no threads
    forks = Forks(sys.argv[1])
    for name in _IMPORTED_BY_COMMANDS:
        importlib.import_module(name)
    assert "llama_cpp" not in sys.modules
    assert len(os.listdir("/proc/self/task")) == 1
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    if command := forks.next_command():
        command.run()


if __name__ == "__main__":
    main()
