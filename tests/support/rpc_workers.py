"""RPC workers of this machine, as their users start them."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil


class RpcWorker:
    """`cppbatch rpc-worker` on a free port. A context manager."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "cppbatch", "rpc-worker", "--port", "0", "-t", "1", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.endpoint = ""

    def __enter__(self) -> RpcWorker:
        assert self.process.stdout
        self.line = self.process.stdout.readline()
        assert self.line, self.stop()
        self.endpoint = self.line.split()[-1]
        return self

    @property
    def server(self) -> psutil.Process:
        """llama.cpp's RPC server, once there is one."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if children := psutil.Process(self.process.pid).children():
                return children[0]
            time.sleep(0.01)
        raise AssertionError("no RPC server runs")

    def kill_server(self) -> None:
        """kill -9; the worker starts another one."""
        self.server.kill()

    def stop(self) -> str:
        """Ends it, and returns what it wrote to stderr."""
        self.process.terminate()
        return self.process.communicate(timeout=30)[1]

    def __exit__(self, *exc: object) -> None:
        self.stop()
