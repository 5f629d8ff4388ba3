"""Starts worker processes, also before it is known what they will load: the first one imports beside its server."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process

_started: list[Process] = []


async def start_early() -> None:
    """Starts the process that the next call of `worker_process` returns. It ends with this process, if none is made.

    For a server that has yet to import what it needs: both take about as long. Must run inside an event loop, that of
    the next call.
    """
    _started.append(await _start())


async def worker_process() -> Process:
    """A process that reads a `WorkerSetup` from its standard input. Raises `OSError` if none can be started."""
    return _started.pop() if _started else await _start()


async def _start() -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "cppbatch.cluster.worker.main", stdin=PIPE)
