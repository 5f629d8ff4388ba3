"""RPC workers of this machine, as their users start them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

_CARD = Path(__file__).with_name("rpc_card.py")


class RpcWorker:
    """`cppbatch rpc-worker` on a free port. A context manager."""

    def __init__(self, *flags: str, memory: int | None = None) -> None:
        """`memory`: bytes of its device (`set_memory`); None: that of the machine."""
        program = ["-m", "cppbatch", "rpc-worker"]
        self._memory: Path | None = None
        if memory is not None:
            self._memory = Path(tempfile.mkdtemp()) / "bytes"
            self.set_memory(memory)
            program = [str(_CARD), str(self._memory)]
        command = [sys.executable, *program, "--port", "0", "-t", "1", *flags]
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

    def set_memory(self, n_bytes: int) -> None:
        """From now on, its device has this much memory."""
        assert self._memory
        part = self._memory.with_suffix(".part")  # its server may be reading
        part.write_text(str(n_bytes))
        part.replace(self._memory)

    def stop(self) -> str:
        """Ends it, and returns what it wrote to stderr."""
        self.process.terminate()
        if self._memory:
            shutil.rmtree(self._memory.parent)
        return self.process.communicate(timeout=30)[1]

    def __exit__(self, *exc: object) -> None:
        self.stop()
