"""Keeps a worker process alive: starts it, watches it, starts another one when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NoReturn, Protocol

import msgspec

from cppbatch import errors
from cppbatch.cluster.engine_client import Health
from cppbatch.cluster.worker_handle import WorkerDied, WorkerHandle
from cppbatch.cluster.worker_messages import FromWorker, Loaded, LoadFailed, Loading, Log
from cppbatch.config import EngineConfig
from cppbatch.engine.metrics import EngineStats
from cppbatch.engine.model_info import ModelInfo
from cppbatch.errors import CppBatchError, ModelError

log = logging.getLogger("cppbatch.cluster")

_LOAD_PATIENCE_S = 600  # without any progress; the self-check of a new machine takes some minutes at worst
_MOST_FAILURES = 5  # deaths in a row, with nothing done in between, after which nobody is asked to wait any longer
_MOST_FROM_OUTSIDE = 20  # as many of deaths that nothing in the worker has caused, as far as anybody can tell
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_STEADY_S = 60.0  # a worker that lived so long did not die of what its predecessor died of
_BAD_CODE = ("SIGSEGV", "SIGILL", "SIGBUS")
_PLAIN_ERRORS = (errors.LibraryError, errors.ModelError, errors.ConfigError, errors.LlamaError)


class Owner(Protocol):
    """Whom a supervisor tells what happens."""

    def worker_ready(self, stats: EngineStats) -> None:
        """Requests may be sent."""

    def worker_says(self, message: FromWorker) -> None:
        """A message that is none of the supervisor's business."""

    def worker_died(self, at_work: set[int], hopeless: str | None) -> None:
        """With these requests in hand. `hopeless`: why nobody should wait for another worker to do better."""


class Supervisor:
    """One worker after another. `worker` is there when it is ready for requests, else None."""

    def __init__(self, config: EngineConfig, owner: Owner, *, step_timeout: float, runtime: str | None) -> None:
        self._config = config
        self._owner = owner
        self._step_timeout = step_timeout
        self._runtime = runtime
        self.worker: WorkerHandle | None = None
        self.info: ModelInfo | None = None
        self.health = Health(status="loading")
        self.restarts = 0
        self._failures = 0  # in a row
        self._from_outside = 0  # deaths in a row that somebody else has caused
        self._has_worked = False
        self._may_repack = config.use_extra_bufts

    def made_progress(self) -> None:
        """The worker did what it is there for."""
        self._failures = self._from_outside = 0
        self._has_worked = True

    async def run(self) -> None:
        """For ever. Raises what keeps the first worker from loading its model: `CppBatchError`, `OSError`."""
        while True:
            at_work: set[int] = set()
            from_outside = False
            try:
                await self._one_life()
            except WorkerDied as death:
                why, at_work, from_outside = str(death), death.at_work, death.from_outside
                if self._tries_the_other_path(why):
                    path = "with" if self._config.use_extra_bufts else "without"
                    why = f"{why}; the next one tries it {path} the fast CPU path"
                elif self.info is None:
                    message = f"the process that was loading {self._config.model_path} died: {why}"
                    raise ModelError(f"{message}. What llama.cpp had to say is in the lines above") from death
            except (CppBatchError, OSError) as error:
                if self.info is None:
                    raise
                why = f"the model could not be loaded again: {error}"
            except Exception as error:  # a bug on this side of the link: the next worker gets the same requests
                if self.info is None:
                    raise
                log.exception("the supervision of the worker failed")
                why = f"its supervision failed: {type(error).__name__}: {error}"
            await self._recover(why, at_work, from_outside=from_outside)

    async def _one_life(self) -> None:
        """A worker from its start to its death. Raises `WorkerDied`, or why the model could not be loaded."""
        worker = await WorkerHandle.start(self._config, self._runtime)
        try:
            loaded = await worker.watched(self._load(worker), _LOAD_PATIENCE_S)
            self.info = loaded.info
            self.worker = worker
            self.health = Health(status="ok", progress=1.0)
            ready_at = time.monotonic()
            self._owner.worker_ready(loaded.stats)
            try:
                await worker.watched(self._listen(worker), self._step_timeout)
            finally:
                self.worker = None
                if time.monotonic() - ready_at > _STEADY_S:
                    self._failures = self._from_outside = 0
        finally:
            await worker.end()

    async def _load(self, worker: WorkerHandle) -> Loaded:
        while True:
            message = await worker.receive()
            if isinstance(message, Loaded):
                return message
            if isinstance(message, LoadFailed):
                raise _error(message)
            if isinstance(message, Loading):
                self.health = msgspec.structs.replace(self.health, progress=message.progress)
            elif isinstance(message, Log):
                _write(message)

    async def _listen(self, worker: WorkerHandle) -> NoReturn:
        while True:
            message = await worker.receive()
            if isinstance(message, Log):
                _write(message)
            else:
                self._owner.worker_says(message)

    def _tries_the_other_path(self, why: str) -> bool:
        """Before anything has worked: without repacked weights, as the self-check's tiny models may miss what this one
        hits; and when that was not it, with them again."""
        is_plain = not self._config.use_extra_bufts
        if self._has_worked or not self._may_repack or not why.endswith(_BAD_CODE) or (is_plain and self.info is None):
            return False
        self._config = msgspec.structs.replace(self._config, use_extra_bufts=is_plain)
        return True

    async def _recover(self, why: str, at_work: set[int], *, from_outside: bool) -> None:
        """Tells everybody, and waits before the next attempt: the longer, the more have failed.

        A death from outside blames nobody. Only when one follows the other and no token comes in between, the cause
        may be a request all the same: some programs kill a process that takes too much memory.
        """
        self.restarts += 1
        if from_outside and self._from_outside < _MOST_FROM_OUTSIDE:
            self._from_outside += 1
            at_work = set()
        else:
            self._failures += 1
        n_in_a_row = self._failures + self._from_outside
        hopeless = self._failures >= _MOST_FAILURES
        if self.info is not None:
            self.health = Health(status="failed" if hopeless else "restarting", error=why)
        log.error("the worker died (%s), number %d in a row; starting another one", why, n_in_a_row)
        last = f"{n_in_a_row} workers died in a row, the last one: {why}"
        self._owner.worker_died(at_work, last if hopeless else None)
        await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**n_in_a_row))


def _error(message: LoadFailed) -> CppBatchError:
    """As it was raised in the worker."""
    kind = getattr(errors, message.kind, CppBatchError)
    return kind(message.message) if kind in _PLAIN_ERRORS else CppBatchError(message.message)


def _write(message: Log) -> None:
    logging.getLogger(message.name).log(message.level, "%s", message.message)
