"""Keeps a worker process running: starts it, watches it, and starts another one if it dies.

With `sleep_idle_seconds`, it also stops an idle worker, which frees the memory, and starts one for the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec

from cppbatch import child_processes, errors
from cppbatch.cluster.engines.client import Health
from cppbatch.cluster.engines.rpc_watch import RpcWatch, RpcWorkerLost
from cppbatch.cluster.link import FromWorker, Loaded, LoadFailed, Loading, Log
from cppbatch.cluster.worker.handle import WorkerDied, WorkerHandle
from cppbatch.config import SETTINGS, EngineConfig, setting_name
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.errors import CppBatchError, LoadInterrupted, ModelError, OutOfMemory, RpcUnreachable
from cppbatch.retries import Pauses
from cppbatch.rpc_endpoint import check_worker, parse_endpoint

log = logging.getLogger("cppbatch.cluster")

Result = TypeVar("Result")

_MAX_FAILURES = 5  # consecutive deaths without a token in between, after which requests fail
_MAX_EXTERNAL_KILLS = 20  # consecutive deaths with a (probably) external cause
_PAUSES = Pauses(0.2, 30.0)  # before the next worker, after consecutive deaths
_FAULTS = ("SIGSEGV", "SIGILL", "SIGBUS")
_LOAD_ERRORS = (
    errors.LibraryError, errors.ModelError, errors.ConfigError, errors.LlamaError, errors.OutOfMemory,
    errors.RpcUnreachable,
)  # fmt: skip
_LEAST_IDLE_S = 0.1  # of `sleep_after`: requests that have arrived are sent meanwhile
_RPC_PAUSE_S = 0.5  # between two checks whether an RPC worker is back


Refit = Callable[[EngineConfig, int], EngineConfig]
"""Settings that need less memory than those of an engine whose memory has run out, and fit into what is free now; the
number counts how often it has run out. Called on a thread. Raises `OutOfMemory` if there are none."""


class WorkerListener(Protocol):
    """The callbacks of a `Supervisor`."""

    @property
    def idle_seconds(self) -> float:
        """Seconds without requests; 0.0 while there are any."""

    async def before_sleep(self) -> None:
        """Called before the worker stops, while it still responds; a request meanwhile keeps it running."""

    def on_worker_ready(self, stats: EngineStats) -> None:
        """Called when a worker has loaded the model and requests may be sent."""

    def on_worker_message(self, message: FromWorker) -> None:
        """A message about requests or stats."""

    def on_worker_died(self, active: set[int], give_up: str | None) -> None:
        """`active`: the requests that may have caused the death. `give_up`: why unfinished requests must fail now."""


class Supervisor:
    """Runs one worker after another. `worker` is the current worker; None until it is ready for requests.

    `sleep_idle_seconds`: after this time without requests, the worker stops until `wake` is called; -1: never. `refit`:
    chooses the settings of the next worker if the memory of a device or the host runs out; None: they stay the same.
    """

    def __init__(
        self,
        config: EngineConfig,
        listener: WorkerListener,
        *,
        step_timeout: float,
        sleep_idle_seconds: float = -1,
        refit: Refit | None = None,
        runtime: str | None = None,
    ) -> None:
        self.config = config
        """The settings of the workers, as `refit` has changed them."""
        self._full_config = config
        self._refit = refit
        self._n_refits = 0  # since the last worker with the settings of `_full_config`
        self._listener = listener
        self._step_timeout = step_timeout
        self._sleep_idle_seconds = self._sleep_after = sleep_idle_seconds
        self._has_new_limit = asyncio.Event()
        self._ready_at = 0.0
        self._woken = asyncio.Event()
        self._runtime = runtime
        self.worker: WorkerHandle | None = None
        self.info: ModelInfo | None = None
        self.health = Health(status="loading")
        self.restarts = 0
        self._failures = 0  # consecutive
        self._external_kills = 0  # consecutive
        self._failures_at_start = 0  # deaths before any token
        self._has_worked = False
        self._repack = config.repack
        self._rpc = [parse_endpoint(each) for each in config.rpc]
        self._running: WorkerHandle | None = None  # also while it loads or ends
        self._is_killed = False

    def made_progress(self) -> None:
        """Resets the counts of consecutive deaths, because the worker has produced output."""
        self._failures = self._external_kills = 0
        self._has_worked = True

    def found_culprit(self) -> None:
        """Resets the counts of consecutive deaths: without the failed request, the next worker should survive."""
        self._failures = self._external_kills = 0

    def wake(self) -> None:
        """Called for a request: starts a worker if the last one was stopped for idleness."""
        self._woken.set()

    def sleep_after(self, seconds: float | None) -> None:
        """Lets the worker stop after this time without requests instead, once; -1: never; None: as set at first."""
        given = seconds if seconds is None or seconds == -1 else max(_LEAST_IDLE_S, seconds)
        self._sleep_after = self._sleep_idle_seconds if given is None else given
        self._has_new_limit.set()

    @property
    def seconds_left(self) -> float | None:
        """Until the worker stops if no request comes; None: never, or it has stopped."""
        return None if self._sleep_after == -1 or not self.worker else self._sleep_after - self._idle_seconds

    def kill(self) -> None:
        """Kills the worker and ends `run`, whose listener may be gone. Any thread may call this, also after the event
        loop was closed."""
        self._is_killed = True
        if self._running:
            self._running.kill()

    async def run(self) -> None:
        """Runs until cancelled. Raises errors that prevent the first worker from loading: `CppBatchError`, `OSError`;
        and `ModelError` if consecutive workers die before any has computed a token."""
        while True:
            active: set[int] = set()
            external = False
            try:
                await self._run_worker()
                await self._woken.wait()
                self._grow()
                continue
            except WorkerDied as death:
                if self._is_killed:
                    return
                why, active = await self._prepare_next(death)
                external = death.external
            except OutOfMemory as error:
                is_smaller, reason = await self._shrink()
                if self.info is None and not is_smaller:
                    raise OutOfMemory(f"{error}{reason}") from error
                why = f"the model could not be loaded: {error}{reason}"
            except RpcUnreachable as error:  # it was reachable a moment ago
                if self.info is None:
                    raise
                why, external = str(error), True
            except (CppBatchError, OSError) as error:
                if self.info is None:
                    raise
                why = f"the model could not be reloaded: {error}"
            except Exception as error:  # a bug in this process: the next worker gets the same requests
                if self.info is None or self._is_killed:
                    raise
                log.exception("supervision of the worker failed")
                why = f"supervision of the worker failed: {type(error).__name__}: {error}"
            await self._report_and_pause(why, active, external=external)

    async def _prepare_next(self, death: WorkerDied) -> tuple[str, set[int]]:
        """Changes the settings if they may be the cause. Returns what has happened, and the requests that may be the
        cause. Raises as `run`."""
        # An RPC worker whose device runs out in a step ends without a reason.
        # lost twice in steps, with no token in between
        is_lost_again = self._rpc and death.external and death.active and self._external_kills >= 2
        is_smaller, reason = await self._shrink() if death.ran_out or is_lost_again else (False, "")
        why = f"{death}{reason}"
        if is_smaller:
            return why, set()
        if self._switch_cpu_path(str(death)):
            path = "without" if self.config.repack == "off" else "with"
            why = f"{why}; retrying {path} the fast CPU path"
        elif self.info is None:
            message = f"the process that was loading {self.config.model_path} died: {why}"
            kind = OutOfMemory if death.ran_out else LoadInterrupted if death.external else ModelError
            raise kind(f"{message}. See llama.cpp's log above") from death
        self._count_at_start(death)
        return why, death.active

    async def _run_worker(self) -> None:
        """Runs a worker from its start until it sleeps. Raises `WorkerDied`, or the error that prevented loading."""
        if self.info is not None:
            await self._wait_for_rpc_workers()
        watch = RpcWatch(self._rpc)
        worker = self._running = await WorkerHandle.start(self.config, self._runtime)
        is_ready = False
        try:
            # 600 s without progress: the self-check of a new machine may take several minutes
            loaded = await self._while_alive(worker, watch, self._load(worker, watch), 600)
            if self.info is not None and not self.info.is_same_model(loaded.info):
                raise ModelError(
                    f"{self.config.model_path} is now a different model ({loaded.info.description} instead of "
                    f"{self.info.description}): restart the server to serve it, or restore the file"
                )
            self.info = loaded.info
            self.worker = worker
            is_ready = True
            self.health = Health(status="ok", progress=1.0)
            ready_at = time.monotonic()
            self._listener.on_worker_ready(loaded.stats)
            try:
                await self._while_alive(worker, watch, self._listen_until_idle(worker), self._step_timeout)
            finally:
                self.worker = None
                if time.monotonic() - ready_at > 60.0:  # the next death is the first in a row
                    self._failures = self._external_kills = 0
            await self._stop(worker)
        except asyncio.CancelledError:
            if is_ready and self._listener.idle_seconds > 0:
                await self._stop(worker)
            raise
        finally:
            await worker.end()
            self._running = None
            await watch.close()

    async def _wait_for_rpc_workers(self) -> None:
        """Waits without a limit, like the requests, as long as their clients do. Raises `ConfigError`."""
        for endpoint in self._rpc:
            while True:
                try:
                    await asyncio.to_thread(check_worker, endpoint)
                    break
                except RpcUnreachable as error:
                    if self.health.error != str(error):
                        log.warning("%s; waiting for it", error)
                    self.health = Health(status="restarting", error=str(error))
                await asyncio.sleep(_RPC_PAUSE_S)

    async def _while_alive(
        self, worker: WorkerHandle, watch: RpcWatch, work: Coroutine[Any, Any, Result], timeout: float
    ) -> Result:
        """Returns what `work` returns. Raises `WorkerDied`, with the loss of an RPC worker as an external cause."""
        if not self._rpc:
            return await worker.while_alive(work, timeout)
        try:
            return await worker.while_alive(watch.while_there(work), timeout)
        except RpcWorkerLost as lost:
            raise WorkerDied(str(lost), worker.active, external=True) from None
        except WorkerDied as death:
            # llama.cpp may abort before the loss of an RPC worker is noticed here
            if reason := await watch.lost(within=0.5):
                raise WorkerDied(reason, death.active, external=True) from death
            raise

    async def _load(self, worker: WorkerHandle, watch: RpcWatch) -> Loaded:
        while True:
            message = await worker.receive()
            if isinstance(message, (Loading, Loaded)):  # the RPC workers serve it now
                watch.start()
            if isinstance(message, Loaded):
                return message
            if isinstance(message, LoadFailed):
                raise _load_error(message)
            if isinstance(message, Loading):
                self.health = msgspec.structs.replace(self.health, progress=message.progress)
            elif isinstance(message, Log):
                _write_log(message)

    async def _listen_until_idle(self, worker: WorkerHandle) -> None:
        """Handles the worker's messages until it sleeps. When this returns, requests can no longer reach the worker,
        and any later one has called `wake`."""
        listening = asyncio.ensure_future(self._listen(worker))
        self._ready_at = time.monotonic()
        idling = asyncio.ensure_future(self._sleep_when_idle())
        try:
            await asyncio.wait([listening, idling], return_when=asyncio.FIRST_COMPLETED)
            if not idling.done():
                await listening  # raises
            idling.result()
        finally:
            for task in (listening, idling):
                task.cancel()

    @property
    def _idle_seconds(self) -> float:
        """The time for which the worker has had no requests."""
        return min(self._listener.idle_seconds, time.monotonic() - self._ready_at)

    async def _sleep_when_idle(self) -> None:
        """Waits until there have been no requests for `sleep_idle_seconds`, or the time of `sleep_after`, and stops
        sending requests to the worker."""
        while True:
            most = None if self._sleep_after == -1 else self._sleep_after
            idle = self._idle_seconds
            if most is None or idle < most:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._has_new_limit.wait(), None if most is None else most - idle)
                self._has_new_limit.clear()
                continue
            await self._listener.before_sleep()
            if self._listener.idle_seconds >= most:
                break
        self._sleep_after = self._sleep_idle_seconds
        self._woken.clear()
        self.worker = None
        self.health = Health(status="sleeping")
        self._failures = self._external_kills = 0
        log.info("no request for %g s: stopping the worker; the next request starts it again", most)

    async def _stop(self, worker: WorkerHandle) -> None:
        """Lets a worker without requests close its engine, which may have data to write."""
        listening = asyncio.ensure_future(self._listen(worker))
        try:
            if not await worker.stop():
                log.warning("the idle worker did not close its engine; killing it")
        finally:
            listening.cancel()

    async def _listen(self, worker: WorkerHandle) -> NoReturn:
        while True:
            message = await worker.receive()
            if isinstance(message, Log):
                _write_log(message)
            else:
                self._listener.on_worker_message(message)

    async def _shrink(self) -> tuple[bool, str]:
        """After the memory has run out: gives the next worker smaller settings. Returns whether there are any, and a
        text for the log."""
        # at most 4 times before the first worker has loaded the model
        if self._refit is None or (self.info is None and self._n_refits >= 4):
            return False, ""
        self._n_refits += 1
        try:
            if self.info is not None:
                await self._wait_for_rpc_workers()
            config = await child_processes.to_thread(self._refit, self.config, self._n_refits)
        except (CppBatchError, OSError) as error:
            return False, f"; {error}"
        pairs = [(name, getattr(self.config, name), getattr(config, name)) for name in SETTINGS]
        changes = [f"{setting_name(name)} {new} instead of {old}" for name, old, new in pairs if new != old]
        self.config = config
        return True, f"; the next worker has {', '.join(changes)}"

    def _grow(self) -> None:
        """Gives the next worker the original sizes, because its predecessor has slept: the memory may be free again."""
        self.config = msgspec.structs.replace(self._full_config, repack=self.config.repack)
        self._n_refits = 0

    def _switch_cpu_path(self, why: str) -> bool:
        """Disables or re-enables the fast CPU path (weight repacking). Returns whether it did.

        Only after a fault (`_FAULTS`), and before any worker has produced a token: the self-check's tiny models
        may miss a crash that this model hits. If a worker dies without the fast path too, the fast path was not the
        cause.
        """
        is_plain = self.config.repack == "off"
        if self._has_worked or self._repack == "off" or not why.endswith(_FAULTS) or (is_plain and self.info is None):
            return False
        self.config = msgspec.structs.replace(self.config, repack=self._repack if is_plain else "off")
        return True

    def _count_at_start(self, death: WorkerDied) -> None:
        """Raises `ModelError` for the fifth death during loading or the first steps, which no request caused."""
        if self._has_worked or death.external or not death.computing:
            return
        self._failures_at_start += 1
        if self._failures_at_start < _MAX_FAILURES:
            return
        assert self.info
        raise ModelError(
            f"the model {self.info.name} ({self.info.description}) cannot be computed here: {self._failures_at_start} "
            f"workers died while loading it or in their first steps, before computing a token; the last one: {death}. "
            "Restart the server with another model, or with -np 1, -fa off or another device"
        ) from death

    async def _report_and_pause(self, why: str, active: set[int], *, external: bool) -> None:
        """Reports the death, and waits before the next attempt: longer after each consecutive death.

        An external kill counts against no request. After 20 in a row with no token in between it does: a request may be
        the cause if another program kills processes that take too much memory.
        """
        self.restarts += 1
        if external and self._external_kills < _MAX_EXTERNAL_KILLS:
            self._external_kills += 1
            active = set()
        else:
            self._failures += 1
        n_in_a_row = self._failures + self._external_kills
        give_up = self._failures >= _MAX_FAILURES
        if self.info is not None:
            self.health = Health(status="failed" if give_up else "restarting", error=why)
        log.error("the worker died (%s), %d in a row; starting another one", why, n_in_a_row)
        reason = f"{n_in_a_row} workers died in a row; the last one: {why}"
        self._listener.on_worker_died(active, reason if give_up else None)
        await asyncio.sleep(_PAUSES.after(n_in_a_row))


def _load_error(message: LoadFailed) -> CppBatchError:
    """The exception that the worker raised while loading."""
    kind = getattr(errors, message.kind, CppBatchError)
    return kind(message.message) if kind in _LOAD_ERRORS else CppBatchError(message.message)


def _write_log(message: Log) -> None:
    logging.getLogger(message.name).log(message.level, "%s", message.message)
