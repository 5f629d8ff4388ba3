"""RPC workers of this machine, as their users start them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.support import preloaded
from tests.support.preloaded import PreloadedProcess
from tests.support.server_process import COMMAND

_CARD = Path(__file__).with_name("rpc_card.py")


class RpcWorker:
    """`cppbatch rpc-worker` on a free port. A context manager."""

    def __init__(self, *flags: str, memory: int | None = None) -> None:
        """`memory`: bytes of its device (`set_memory`); None: that of the machine."""
        flags = ("--port", "0", "-t", "1", *flags)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._memory: Path | None = None
        self.process: subprocess.Popen[str] | PreloadedProcess
        if memory is not None:
            self._memory = Path(tempfile.mkdtemp()) / "bytes"
            self.set_memory(memory)
            self.process = subprocess.Popen([sys.executable, _CARD, self._memory, *flags], text=True, **pipes)
        elif preloaded.is_used:
            self.process = PreloadedProcess(["rpc-worker", *flags], **pipes)
        else:
            self.process = subprocess.Popen([*COMMAND, "rpc-worker", *flags], text=True, **pipes)
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
        """Ends it, and returns what it wrote to stderr; nothing the second time."""
        self.process.terminate()
        if self._memory:
            shutil.rmtree(self._memory.parent)
        assert self.process.stdout
        assert self.process.stderr
        said = ""
        if not self.process.stderr.closed:
            with self.process.stdout, self.process.stderr:
                said = self.process.stderr.read()
        self.process.wait(30)
        return said

    def __exit__(self, *exc: object) -> None:
        self.stop()
