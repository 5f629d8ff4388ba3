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

from cppbatch.cluster.black_box import BlackBox
from cppbatch.cluster.link import ServerLink, can_use_files
from cppbatch.cluster.messages import FromWorker, Hello, ToWorker, WorkerSetup
from cppbatch.config import EngineConfig

_LAST_WORDS_S = 0.2
_TICKS = 20  # looks at the heartbeat within the time it may take

Result = TypeVar("Result")


class WorkerDied(Exception):
    """Says how. `at_work`: the numbers of the requests it had in hand."""

    def __init__(self, how: str, at_work: set[int]) -> None:
        super().__init__(how)
        self.at_work = at_work


class WorkerProcess:
    """`start` makes one. `end` must be called once it is not wanted any more, however it fared."""

    def __init__(self, folder: Path, link: ServerLink, box: BlackBox, process: Process) -> None:
        self._folder = folder
        self._link = link
        self._box = box
        self._process = process

    @classmethod
    async def start(cls, config: EngineConfig, runtime: str | None) -> WorkerProcess:
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
            box = BlackBox(folder / "box")
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "cppbatch.cluster.worker", stdin=asyncio.subprocess.PIPE
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

    async def _died(self) -> str:
        """Waits for its death and says how it came."""
        code = await self._process.wait()
        if code >= 0:
            return f"exit code {code}" if code < 0xC0000000 else f"exception {code:#x}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"

    async def _hung(self, seconds: float) -> str:
        """Waits until its heart has not beaten for so long.

        Counted in looks at it, not by the clock: when this process was stopped as well, nothing can be said.
        """
        beats, missed = self._box.beats, 0
        while missed < _TICKS:
            await asyncio.sleep(seconds / _TICKS)
            missed = missed + 1 if self._box.beats == beats else 0
            beats = self._box.beats
        return f"it showed no sign of life for {seconds:.0f} s"

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
            raise WorkerDied(dying.result() if dying.done() else hanging.result(), self._box.at_work())
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
