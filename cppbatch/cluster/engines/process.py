"""An engine in a worker process. When the worker dies, its requests continue in the next one; clients see a pause."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from cppbatch.cluster.engines.client import Health, WorkerState
from cppbatch.cluster.engines.in_flight import MAX_CRASHES, InFlightRequest
from cppbatch.cluster.engines.supervisor import Refit, Supervisor
from cppbatch.cluster.engines.worker_engine import WorkerEngine
from cppbatch.cluster.link import LimitThreads
from cppbatch.cluster.rules import check_times
from cppbatch.cluster.worker.handle import WorkerHandle
from cppbatch.config import EngineConfig
from cppbatch.engine.access import OwnProcess
from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.engine.request import FinishReason, GenerationEvent, ResumeState
from cppbatch.engine_settings import EngineSettings, engine_config
from cppbatch.errors import CppBatchError
from cppbatch.unclosed import warn_unclosed

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("cppbatch.cluster")


class Withdrawn(Exception):
    """Raised by `OutputCollector.get` for a request taken back by `EngineProcess.withdraw`: it continues elsewhere with
    `resume`."""

    def __init__(self, resume: ResumeState) -> None:
        super().__init__("withdrawn")
        self.resume = resume


class EngineProcess(WorkerEngine):
    """An `EngineClient` whose engine is a worker process. Created and used inside a running event loop.

    Requests and their tokens so far are kept in this process, so a new worker can continue them. Example:
    `async with EngineProcess("model.gguf") as engine:`, which waits until the model is loaded. The worker of an engine
    that is dropped without `close` is killed, with a `ResourceWarning`.
    """

    _other_process = "the engine process"

    def __init__(
        self,
        model: str | Path | EngineConfig,
        *,
        name: str = "0",
        step_timeout: float = 300.0,
        sleep_idle_seconds: float = -1,
        refit: Refit | None = None,
        runtime: str | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        """Starts a worker that loads a GGUF file; `settings` as in `BatchInferenceEngine`.

        `name` identifies the worker in `workers`. `step_timeout`: seconds after which a step is considered hung.
        `sleep_idle_seconds`: after this time without requests, the worker stops, which frees its memory; the next
        request starts it and waits for it; -1: never. `refit`: as in `Supervisor`; `config` has the sizes in use.
        `runtime` is for tests: `module:function` that creates the `Runtime` instead of loading the model. Raises
        `ConfigError`, also outside an event loop and for times out of range.
        """
        check_times(step_timeout, sleep_idle_seconds)
        super().__init__(engine_config(model, settings))
        self.name = name
        self.draining = False
        """Whether it gets no new requests (`AutoscaledGroup`)."""
        self._supervisor = Supervisor(
            self.config,
            weakref.proxy(self),  # or the engine would never be dropped
            step_timeout=step_timeout,
            sleep_idle_seconds=sleep_idle_seconds,
            refit=refit,
            runtime=runtime,
        )
        self._max_threads = 0
        self._process = OwnProcess()
        self._task = asyncio.ensure_future(_supervise(self._supervisor, weakref.ref(self)))

    def __del__(self) -> None:
        task: asyncio.Task[None] | None = self.__dict__.get("_task")  # missing if `__init__` raised
        if task is None or task.done() or self._closed or self._process.is_fork:
            return
        try:
            warn_unclosed(self)
        finally:
            self._supervisor.kill()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._own_loop.loop.call_soon_threadsafe(task.cancel)

    def health(self) -> Health:
        """The current state of the engine."""
        return Health(status="closed") if self._closed else self._supervisor.health

    # --- requests -----------------------------------------------------------------------------------------------

    def withdraw(self, request_id: str) -> bool:
        """Withdraws a request, if it has no output yet and is not suspected of a crash. Returns whether it did.

        Its `OutputCollector.get` then raises `Withdrawn`.
        """
        request = self._by_id.get(request_id)
        if request is None or request not in self._in_flight or request.cancelled or not request.is_untouched:
            return False
        self._send_cancel(request)
        self._fail(request, Withdrawn(request.resume_state()))
        return True

    @property
    def _worker(self) -> WorkerHandle | None:
        return self._supervisor.worker

    def _send_requests(self) -> None:
        if self._in_flight:
            self._supervisor.wake()
        super()._send_requests()

    def sleep_after(self, seconds: float | None) -> bool:
        """Sets when the supervisor stops the idle worker."""
        self._supervisor.sleep_after(seconds)
        return True

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the supervisor stops the idle worker."""
        return self._supervisor.seconds_left

    def limit_threads(self, n: int) -> None:
        """Limits the worker to `n` compute threads from its next step on. No effect on a GPU or with `n_threads`."""
        self._max_threads = n
        self._send_thread_limit()

    def _send_thread_limit(self) -> None:
        if self._max_threads and (worker := self._supervisor.worker):
            worker.send(LimitThreads(self._max_threads))

    # --- called by the supervisor -------------------------------------------------------------------------------

    async def before_sleep(self) -> None:
        """Asks for the last report, which `stats` returns while no worker is running."""
        await self._fetch_stats()

    def on_supervision_failed(self, error: Exception) -> None:
        """No worker will be started any more."""
        if isinstance(error, CppBatchError):
            if self._loaded.done():
                log.error("%s", error)
        elif self._loaded.done():  # a bug: fail all requests, so that none waits forever
            log.error("supervision of the worker failed", exc_info=error)
        self._supervisor.health = Health(status="failed", error=str(error))
        self._end_all(FinishReason.ERROR, f"{type(error).__name__}: {error}")
        self._end_loading(error)

    def on_worker_ready(self, stats: EngineStats) -> None:
        """Sends the requests waiting for this worker."""
        self.config = self._supervisor.config
        self._info = self._supervisor.info
        self._stats.received(stats)
        self._live.reset()
        self._end_loading()
        self._send_thread_limit()
        self._send_requests()

    def _handle_event(self, request: InFlightRequest, event: GenerationEvent) -> None:
        if event.is_report:  # no token: a crash would repeat it
            request.put(event)
            return
        self._supervisor.made_progress()
        must_requeue = self._in_flight.token_received(request)
        self._put(request, event)
        if must_requeue and not (event.finish_reason or request.cancelled):
            self._send_cancel(request)
            self._in_flight.requeue(request)

    def on_worker_died(self, active: set[int], give_up: str | None) -> None:
        """Fails the requests that crash workers, ends the cancelled ones, and keeps the others for the next worker.

        With `give_up`, fails all of them with this reason.
        """
        for request in self._in_flight.worker_died(active):
            self._supervisor.found_culprit()
            reason = f"the engine crashed {MAX_CRASHES} times in a row while processing this request"
            self._end(request, FinishReason.ERROR, reason)
        for request in self._in_flight:
            if request.cancelled:
                self._end(request, FinishReason.CANCELLED)
        if give_up:
            self._end_all(FinishReason.ERROR, give_up)
        self._stats.stop_waiting()
        self._live.reset()

    # --- state, closing -----------------------------------------------------------------------------------------

    def _state(self, stats: EngineStats | None = None) -> WorkerState:
        worker = self._supervisor.worker
        return WorkerState(
            name=self.name,
            pid=worker.pid if worker else None,
            device=self.config.device,
            health=self.health(),
            in_flight=self.in_flight,
            restarts=self._supervisor.restarts,
            draining=self.draining,
            stats=stats,
        )

    async def close(self) -> None:
        """Stops the worker, gracefully if it has no requests; unfinished requests get a last event (cancelled)."""
        if self._own_loop.loop.is_closed():
            self._closed = True
            self._supervisor.kill()
            return
        self._own_loop.check()
        self._closed = True
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._end_open_calls()


async def _supervise(supervisor: Supervisor, of: weakref.ref[EngineProcess]) -> None:
    """Runs the workers until cancelled. Does not keep the engine alive."""
    try:
        await supervisor.run()
    except Exception as error:
        if engine := of():  # else it was dropped
            engine.on_supervision_failed(error)
