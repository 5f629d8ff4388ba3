"""Keeps llama.cpp's RPC server running in a child process, because clients' data may crash it."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from cppbatch.child_processes import child_command, start
from cppbatch.errors import ConfigError, LlamaError
from cppbatch.retries import RestartPauses

log = logging.getLogger("cppbatch.rpc")

_START_S = 60.0


class RpcServerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The devices and address of an RPC worker. Sent to its child process as a line of JSON."""

    host: str
    """An IPv4 address of this machine."""
    port: int
    devices: tuple[str, ...] = ()
    """ggml's device names; (): all GPUs, or else the CPU."""
    n_threads: int
    """Threads of a CPU."""
    cache: str | None = None
    """A folder to cache large tensors, so that they are not sent again."""


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. Raises `ConfigError` if it is not possible to listen there."""
    with socket.socket() as probe:
        if sys.platform != "win32":  # where it has a different meaning
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another --port or --host"
            ) from error
        return int(probe.getsockname()[1])


def run_rpc_server(setup: RpcServerSetup, say: Callable[[str], object]) -> None:
    """Serves until an exception (Ctrl-C) ends it. `say` gets the line when it is ready.

    A crashed server is restarted after a growing pause. Raises `LlamaError` if the first one does not start.
    """
    pauses = RestartPauses()
    is_first = True
    while True:
        began = time.monotonic()
        server = _Server(setup)
        try:
            server.wait_ready()
            if is_first:
                say(f"serving {server.devices} on {setup.host}:{setup.port}")
                is_first = False
            code = server.process.wait()
        except _NotStarted as error:
            if is_first:
                raise LlamaError(str(error)) from None
            code = server.process.returncode
        finally:
            server.end()
        pause = pauses.next(time.monotonic() - began)
        log.error("the RPC server died (%s); starting another one in %.1f s", _how(code), pause)
        time.sleep(pause)


class _NotStarted(Exception):
    pass


class _Server:
    """The child process."""

    def __init__(self, setup: RpcServerSetup) -> None:
        self._setup = setup
        self.devices = ""
        self.process: subprocess.Popen[bytes] = start(
            child_command("cppbatch.llama.rpc_server_child"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin
        self.process.stdin.write(msgspec.json.encode(setup) + b"\n")
        self.process.stdin.flush()
        self._reader = threading.Thread(target=self._read, name="cppbatch-rpc-log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """The first line is the child's own, the others are llama.cpp's."""
        assert self.process.stdout
        with self.process.stdout as stream:
            for line in stream:
                text = line.decode(errors="replace").strip()
                if self.devices:
                    log.debug("%s", text)
                else:
                    self.devices = text

    def wait_ready(self) -> None:
        """Waits until it listens. Raises `_NotStarted` if it ends before, after it has logged the reason."""
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            if (code := self.process.poll()) is not None:
                raise _NotStarted(f"the RPC server did not start ({_how(code)}); see the log lines above")
            if self.devices:
                with contextlib.suppress(OSError), socket.create_connection((self._setup.host, self._setup.port), 1):
                    return
            time.sleep(0.05)
        raise _NotStarted(f"the RPC server did not start within {_START_S:.0f} s")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
