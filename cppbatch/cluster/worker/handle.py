"""The server's handle for a worker process: starts it, exchanges messages, detects its death, kills it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from cppbatch.cluster.link import LAST_WORDS, FromWorker, Hello, Stop, ToWorker, WorkerSetup
from cppbatch.cluster.shared_status import SharedStatus
from cppbatch.cluster.sockets import ServerLink, can_use_files
from cppbatch.cluster.worker.process import WorkerProcess, worker_process
from cppbatch.config import EngineConfig
from cppbatch.errors import says_out_of_memory, shorten

Result = TypeVar("Result")

_N_CHECKS = 20  # heartbeat checks within the timeout
_STOP_S = 10.0  # to close the engine
_MAX_PREPARATION_S = 60.0  # without progress: twice what one attempt to compile a grammar may take
_EXTERNAL_SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2")
"""Signals that a worker never sends to itself. The kernel sends SIGKILL too (out of memory), and counts that."""
_KERNEL_COUNTERS = Path("/proc/vmstat")


class WorkerDied(Exception):
    """A worker died or hung, as described by the message.

    `active`: the numbers of the requests that it was computing or preparing; one of them may be the cause. `external`:
    it was killed or stopped from outside, so no request is the cause. `computing`: whether it was loading the model or
    computing; otherwise a request that it was preparing is the cause. `ran_out`: it could not allocate memory on a
    device or the host.
    """

    def __init__(
        self, how: str, active: set[int], *, external: bool = False, computing: bool = True, ran_out: bool = False
    ) -> None:
        super().__init__(how)
        self.active = active
        self.external = external
        self.computing = computing
        self.ran_out = ran_out


class WorkerHandle:
    """Created by `start`. The caller must call `end`, even after the worker has died."""

    def __init__(self, folder: Path, link: ServerLink, status: SharedStatus, process: WorkerProcess) -> None:
        self._folder = folder
        self._link = link
        self._status = status
        self._process = process
        self._oom_kills_at_start = _oom_kills()

    @classmethod
    async def start(cls, config: EngineConfig, runtime: str | None) -> WorkerHandle:
        """Starts a process, which starts loading the model. Raises `OSError` if the process cannot be started."""
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
            status = SharedStatus(folder / "status")
            process = worker_process()
        except BaseException:
            link.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        process.set_up(msgspec.json.encode(setup))
        return cls(folder, link, status, process)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def active(self) -> set[int]:
        """The numbers of the requests that it is preparing or computing, or was when it died."""
        return self._status.active()

    def send(self, message: ToWorker) -> None:
        """Sends a message; never waits."""
        self._link.send(message)

    async def receive(self) -> FromWorker:
        """Returns the next message. Raises `msgspec.DecodeError` if it cannot be decoded."""
        message = await self._link.receive()
        if isinstance(message, Hello):
            self._link.connect(message)
        return message

    async def while_alive(self, work: Coroutine[Any, Any, Result], timeout: float) -> Result:
        """Returns what `work` returns. Raises `WorkerDied` if the process dies first or hangs for `timeout` seconds."""
        working, dying = asyncio.ensure_future(work), asyncio.ensure_future(self._wait_for_death())
        hanging = asyncio.ensure_future(self._wait_for_hang(timeout))
        try:
            await asyncio.wait([working, dying, hanging], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():  # messages sent before the death may still arrive
                await asyncio.wait([working], timeout=0.2)  # its last messages may still arrive
            if working.done():
                return working.result()
            raise dying.result() if dying.done() else hanging.result()
        except msgspec.DecodeError as error:
            raise WorkerDied(f"it sent an invalid message: {error}", self._status.active()) from error
        finally:
            for task in (working, dying, hanging):
                task.cancel()

    async def _wait_for_death(self) -> WorkerDied:
        """Returns how the process died."""
        code = await self._process.wait()
        words = self._last_words()
        ran_out = says_out_of_memory(words)
        if code >= 0:
            how = f"exit code {code}" if code < 0xC0000000 else f"exception {code:#x}"
            return WorkerDied(f"{how}{words}", self._status.active(), ran_out=ran_out)
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        if name == "SIGKILL" and (self._oom_kills_at_start is None or _oom_kills() != self._oom_kills_at_start):
            return WorkerDied("killed by SIGKILL, probably because memory ran out", self._status.active())
        external, computing = name in _EXTERNAL_SIGNALS, not self._status.preparing()
        how = f"killed by {name}{words}"
        return WorkerDied(how, self._status.active(), external=external, computing=computing, ran_out=ran_out)

    def _last_words(self) -> str:
        """What llama.cpp or the engine said before the end, without llama.cpp's source folder."""
        with contextlib.suppress(OSError):
            lines = (self._folder / LAST_WORDS).read_text(errors="replace").splitlines()
            words = " ".join(" ".join(line.rpartition("llama.cpp/")[2] for line in lines).split())
            return f": {shorten(words, 500)}"
        return ""

    async def _wait_for_hang(self, timeout: float) -> WorkerDied:
        """Waits until the worker has had no heartbeat for `timeout` seconds, or has been preparing a request for too
        long.

        Counts its own checks instead of reading the clock: while this process is stopped (Ctrl-Z), it cannot know
        whether the worker runs.
        """
        heartbeats, missed = self._status.heartbeats, 0
        n_checks: dict[tuple[int, int], int] = {}  # per request being prepared, since its last progress
        max_preparation = max(timeout, _MAX_PREPARATION_S)
        while missed < _N_CHECKS:
            await asyncio.sleep(timeout / _N_CHECKS)
            missed = missed + 1 if self._status.heartbeats == heartbeats else 0
            heartbeats = self._status.heartbeats
            n_checks = {key: n_checks.get(key, 0) + 1 for key in self._status.progress()}
            for (number, _), n in n_checks.items():
                if n * timeout / _N_CHECKS > max_preparation and not self._is_stopped():
                    return WorkerDied(f"preparing a request took longer than {max_preparation:.0f} s", {number})
        if self._is_stopped():
            return WorkerDied(f"it was stopped (SIGSTOP) for {timeout:.0f} s", set(), external=True)
        return WorkerDied(f"no heartbeat for {timeout:.0f} s", self._status.active())

    def _is_stopped(self) -> bool:
        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED)
        return False

    async def stop(self) -> bool:
        """Asks the process to close its engine and exit. Returns whether it did within 10 seconds."""
        self.send(Stop())
        try:
            return await asyncio.wait_for(self._process.wait(), _STOP_S) == 0
        except asyncio.TimeoutError:
            return False

    def kill(self) -> None:
        """Kills the process if it still runs."""
        self._process.kill()

    async def end(self) -> None:
        """Kills the process if it still runs, and removes its folder."""
        self.kill()
        await self._process.wait()
        self._link.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _oom_kills() -> int | None:
    """The number of processes killed by the kernel for lack of memory; None where this is not counted."""
    with contextlib.suppress(OSError, ValueError):
        for line in _KERNEL_COUNTERS.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None
