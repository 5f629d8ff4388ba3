"""An engine on a thread of this process, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cppbatch.cluster.engines.client import Health, WorkerState
from cppbatch.cluster.engines.worker_engine import WorkerEngine
from cppbatch.cluster.link import FromWorker, Stop, ToWorker
from cppbatch.cluster.worker.worker import Worker
from cppbatch.config import EngineConfig
from cppbatch.engine.access import OwnProcess
from cppbatch.engine.core import EngineCore
from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.engine.request import FinishReason, GenerationRequest
from cppbatch.engine.runtime import Runtime
from cppbatch.engine_settings import EngineSettings, engine_config
from cppbatch.unclosed import close_at_exit, warn_unclosed

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("cppbatch.engine")


class LocalEngine(WorkerEngine):
    """An `EngineClient` whose engine is a thread of this process. Created and used inside a running event loop.

    The engine's thread handles messages between steps and passes the event loop one list of events per step, so neither
    waits for the other. Example: `async with LocalEngine("model.gguf") as engine:`, which waits until the model is
    loaded. An engine that is dropped without `close` ends after its current step, with a `ResourceWarning`.
    """

    def __init__(
        self, model: str | Path | EngineConfig, *, runtime: Runtime | None = None, **settings: Unpack[EngineSettings]
    ) -> None:
        """Starts loading a GGUF file; `settings` and `runtime` as in `BatchInferenceEngine`.

        Raises `ConfigError`, also outside an event loop.
        """
        super().__init__(engine_config(model, settings))
        self._thread = _EngineThread(self.config, runtime, self._own_loop.loop, weakref.ref(self))

    def __del__(self) -> None:
        thread: _EngineThread | None = self.__dict__.get("_thread")  # missing if `__init__` raised
        if thread and thread.must_stop:
            try:
                warn_unclosed(self)
            finally:
                thread.stop()

    @property
    def _engine(self) -> EngineCore | None:
        return self._thread.worker.engine if self._thread.worker else None

    @property
    def _worker(self) -> _EngineThread | None:
        return self._thread if self._thread.health.status == "ok" and not self._thread.closing else None

    def health(self) -> Health:
        """The current state of the engine."""
        thread = self._thread
        return Health(status="closed") if thread.closing and thread.health.status != "failed" else thread.health

    def _check_usable(self, request: GenerationRequest | None) -> None:
        self._thread.process.check()
        super()._check_usable(request)

    def _state(self, stats: EngineStats | None = None) -> WorkerState:
        return WorkerState(
            name="local",
            pid=os.getpid(),
            device=self.config.device,
            health=self.health(),
            in_flight=self.in_flight,
            stats=stats,
        )

    # --- called by the thread, on the event loop ----------------------------------------------------------------

    def on_loaded(self, engine: EngineCore, stats: EngineStats) -> None:
        """Requests may be sent."""
        self._info = engine.runtime.info
        self._stats.received(stats)
        self._end_loading()

    def on_ended(self, error: BaseException | None) -> None:
        """Ends all requests. `error`: why the engine cannot be used; None: it was closed."""
        self._stats.reset()
        self._live.reset()
        if error:
            self._end_all(FinishReason.ERROR, self._thread.health.error)
            self._end_loading(error)
        else:
            self._end_open_calls()

    async def close(self) -> None:
        """Closes the engine after the current step; aborts loading."""
        self._closed = True
        self._thread.stop()  # now, not when a thread is free: no request may follow
        await asyncio.to_thread(self._thread.close)


class _EngineThread:
    """The thread of a `LocalEngine`, which it does not refer to: else the engine would never be dropped."""

    def __init__(
        self,
        config: EngineConfig,
        runtime: Runtime | None,
        loop: asyncio.AbstractEventLoop,
        client: weakref.ref[LocalEngine],
    ) -> None:
        self._config, self._runtime, self._loop, self._client = config, runtime, loop, client
        self.process = OwnProcess()
        self.worker: Worker | None = None
        """None until the model is loaded."""
        self.health = Health(status="loading")
        self.closing = False
        """Whether it accepts no more requests, and stops loading."""
        # A daemon, so that a second Ctrl-C does not wait for a model that is still loading.
        self._thread = threading.Thread(target=self._run, name="cppbatch-engine", daemon=True)
        self._thread.start()
        close_at_exit(self)

    # --- on any thread ------------------------------------------------------------------------------------------

    def send(self, message: ToWorker) -> None:
        """Sends the loaded engine a message; never waits."""
        assert self.worker
        self.worker.handle(message)

    @property
    def must_stop(self) -> bool:
        """Whether it runs, and neither `stop` nor `close` was called."""
        return self._thread.is_alive() and not self.closing and not self.process.is_fork

    def stop(self) -> None:
        """Ends the thread and closes the engine after the current step; aborts loading. Does not wait."""
        self.closing = True
        if self.worker:
            self.send(Stop())

    def close(self) -> None:
        """Stops the thread, and waits for its end."""
        if not self.process.is_fork:
            self.stop()
            self._thread.join()

    # --- on the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            worker = Worker(self._config, self._pass_on, progress=self._on_progress, runtime=self._runtime)
        except Exception as error:
            self._end(error, str(error))
            return
        self.worker, self.health = worker, Health(status="ok", progress=1.0)
        self._call(LocalEngine.on_loaded, worker.engine, worker.engine.stats())
        if self.closing:
            self.stop()
        try:
            worker.run()
            self._call(LocalEngine.on_ended, None)
        except BaseException as error:  # a bug
            log.exception("the engine failed")
            self._end(error, f"{type(error).__name__}: {error}")
        worker.close()

    def _end(self, error: BaseException, message: str) -> None:
        self.health = Health(status="failed", error=message)
        self._call(LocalEngine.on_ended, error)

    def _on_progress(self, fraction: float) -> bool:
        self.health = Health(status="loading", progress=fraction)
        return not self.closing

    def _pass_on(self, message: FromWorker) -> None:
        self._call(LocalEngine.on_worker_message, message)

    def _call(self, method: Callable[..., None], *args: object) -> None:
        """Calls a method of the `LocalEngine` on its event loop, unless either is gone."""

        def call() -> None:
            if client := self._client():
                method(client, *args)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)
