"""Starts worker processes, even before their model is known: the first one imports in parallel with its server."""

from __future__ import annotations

from asyncio.subprocess import PIPE, Process

from cppbatch.child_processes import child_command, start_in_loop

_started: list[Process] = []


async def start_early() -> None:
    """Starts the process that the next call of `worker_process` returns. Without such a call, it ends with this
    process.

    For a server that has yet to run its imports: both take about as long. Must run inside the event loop of the next
    call.
    """
    _started.append(await _start())


async def worker_process() -> Process:
    """A process that reads a `WorkerSetup` from its standard input. Raises `OSError` if none can be started."""
    return _started.pop() if _started else await _start()


async def _start() -> Process:
    return await start_in_loop(child_command("cppbatch.cluster.worker.main"), stdin=PIPE)
