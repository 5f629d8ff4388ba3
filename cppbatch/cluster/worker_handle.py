"""One worker process, seen from the server's: started, watched, spoken to, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from cppbatch.cluster.shared_status import SharedStatus
from cppbatch.cluster.worker_link import ServerLink, can_use_files
from cppbatch.cluster.worker_messages import FromWorker, Hello, ToWorker, WorkerSetup
from cppbatch.config import EngineConfig

_LAST_WORDS_S = 0.2
_TICKS = 20  # looks at the heartbeat within the time it may take

Result = TypeVar("Result")


_LONGEST_PREPARATION_S = 60.0  # of one request: reading a grammar may take 10 s, and a busy machine more
_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2")
"""Signals that nothing in a worker sends: somebody else has ended it, or the kernel, which keeps a record."""
_KERNEL_COUNTERS = Path("/proc/vmstat")


class WorkerDied(Exception):
    """Says how. `at_work`: the numbers of the requests it had in hand; of these one may be to blame.

    `from_outside`: none of them is. Somebody has killed or stopped the worker.
    """

    def __init__(self, how: str, at_work: set[int], *, from_outside: bool = False) -> None:
        super().__init__(how)
        self.at_work = at_work
        self.from_outside = from_outside


class WorkerHandle:
    """`start` makes one. `end` must be called once it is not wanted any more, however it fared."""

    def __init__(self, folder: Path, link: ServerLink, box: SharedStatus, process: Process) -> None:
        self._folder = folder
        self._link = link
        self._box = box
        self._process = process
        self._oom_kills = _oom_kills()

    @classmethod
    async def start(cls, config: EngineConfig, runtime: str | None) -> WorkerHandle:
        """Starts a process that begins to load the model. Raises `OSError` when that cannot be."""
        folder = Path(tempfile.mkdtemp(prefix="cppbatch-"))
        use_files = can_use_files(folder)
        link = ServerLink(folder, use_files=use_files)
        setup = WorkerSetup(
            config=config,
            folder=str(folder),
            endpoint=link.endpoint,
            keys=link.keys and (link.keys[0], link.keys[2], link.keys[3]),
            log_level=logging.getLogger("cppbatch").getEffectiveLevel(),
            runtime=runtime,
        )
        try:
            box = SharedStatus(folder / "box")
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "cppbatch.cluster.worker_main", stdin=asyncio.subprocess.PIPE
            )
        except BaseException:
            link.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        assert process.stdin
        process.stdin.write(msgspec.json.encode(setup) + b"\n")
        return cls(folder, link, box, process)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        """Never waits."""
        self._link.send(message)

    async def receive(self) -> FromWorker:
        """The next message. Raises `msgspec.DecodeError` when it cannot be read."""
        message = await self._link.receive()
        if isinstance(message, Hello):
            self._link.connect(message)
        return message

    async def _died(self) -> WorkerDied:
        """Waits for its death and says how it came."""
        code = await self._process.wait()
        if code >= 0:
            how = f"exit code {code}" if code < 0xC0000000 else f"exception {code:#x}"
            return WorkerDied(how, self._box.at_work())
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        if name == "SIGKILL" and (self._oom_kills is None or _oom_kills() != self._oom_kills):
            return WorkerDied("killed by SIGKILL, as the kernel does when memory runs out", self._box.at_work())
        return WorkerDied(f"killed by {name}", self._box.at_work(), from_outside=name in _OUTSIDE)

    async def _hung(self, seconds: float) -> WorkerDied:
        """Waits until it has shown no sign of life for so long, or has prepared one request for that long.

        Counted in looks at it, not by the clock: when this process was stopped as well, nothing can be said.
        """
        beats, missed = self._box.beats, 0
        seen: dict[int, int] = {}  # requests that are being prepared: in how many looks
        longest = max(seconds, _LONGEST_PREPARATION_S)
        while missed < _TICKS:
            await asyncio.sleep(seconds / _TICKS)
            missed = missed + 1 if self._box.beats == beats else 0
            beats = self._box.beats
            seen = {number: seen.get(number, 0) + 1 for number in self._box.preparing()}
            for number, looks in seen.items():
                if looks * seconds / _TICKS > longest and not self._is_stopped():
                    return WorkerDied(f"it prepared a request for more than {longest:.0f} s", {number})
        if self._is_stopped():
            return WorkerDied(f"it was stopped (SIGSTOP) for {seconds:.0f} s", set(), from_outside=True)
        return WorkerDied(f"it showed no sign of life for {seconds:.0f} s", self._box.at_work())

    def _is_stopped(self) -> bool:
        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED)
        return False

    async def watched(self, work: Coroutine[Any, Any, Result], patience: float) -> Result:
        """What `work` returns. Raises `WorkerDied` when the process dies before, or hangs for `patience` seconds."""
        working, dying = asyncio.ensure_future(work), asyncio.ensure_future(self._died())
        hanging = asyncio.ensure_future(self._hung(patience))
        try:
            await asyncio.wait([working, dying, hanging], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():  # it may have said something before it died
                await asyncio.wait([working], timeout=_LAST_WORDS_S)
            if working.done():
                return working.result()
            raise dying.result() if dying.done() else hanging.result()
        except msgspec.DecodeError as error:
            raise WorkerDied(f"it sent what is no message: {error}", self._box.at_work()) from error
        finally:
            for task in (working, dying, hanging):
                task.cancel()

    async def end(self) -> None:
        """Ends the process, at once: it has nothing that would have to be saved."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._link.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _oom_kills() -> int | None:
    """How many processes the kernel has killed for want of memory since it started; None where it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        for line in _KERNEL_COUNTERS.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None
