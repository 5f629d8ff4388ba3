"""An engine on a thread of this process, for asyncio."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cppbatch.cluster.engine_client import Health, WorkerState
from cppbatch.cluster.engine_threads import StepLoop
from cppbatch.cluster.intake_threads import IntakeThreads
from cppbatch.cluster.opened import Opened
from cppbatch.cluster.output_collector import OutputCollector
from cppbatch.config import EngineConfig, engine_config
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.metrics import EngineStats
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.params import replaced
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest, TokenPiece
from cppbatch.engine.runtime import Runtime
from cppbatch.engine.sequence import Seq
from cppbatch.errors import EngineClosed, InvalidRequest, QueueFull

log = logging.getLogger("cppbatch.engine")

Result = TypeVar("Result")


class LocalEngine(Opened):
    """An `EngineClient` whose engine is a thread here. Made and used inside a running event loop.

    The thread takes commands between steps and hands the loop one list of events a step, so neither waits for the
    other. Used as `async with LocalEngine("model.gguf") as engine:`, which waits until the model is loaded.
    """

    def __init__(self, model: str | Path | EngineConfig, *, runtime: Runtime | None = None, **settings: Any) -> None:
        """Starts loading a GGUF file; `settings` and `runtime` as in `BatchInferenceEngine`. Raises `ConfigError`."""
        self.config = engine_config(model, settings)
        self._runtime = runtime
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._loaded.add_done_callback(lambda future: future.exception())  # looked at, so asyncio does not complain
        self._engine: BatchInferenceEngine | None = None
        self._health = Health(status="loading")
        self._closing = False  # takes no more requests, and stops loading
        self._steps = StepLoop(lambda events: self._tell(self._deliver, events))
        # The engine knows requests by a number of ours: an id may be used again while its last events are on the way.
        self._numbers = map(str, itertools.count())
        self._streams: dict[str, _Stream] = {}
        self._mailboxes: dict[str, OutputCollector] = {}
        self._intake = IntakeThreads()
        # A daemon: an impatient second Ctrl-C must not wait for a model that is still loading.
        self._thread = threading.Thread(target=self._run, name="cppbatch-engine", daemon=True)
        self._thread.start()
        atexit.register(self._end_thread)  # a thread still in llama.cpp when its statics go would crash the exit

    # --- the asyncio side ---------------------------------------------------------------------------------------

    async def loaded(self) -> None:
        """Waits until the model is loaded. Raises what loading raised."""
        await asyncio.shield(self._loaded)

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises `EngineClosed` before it is loaded."""
        return self._ready().info

    def health(self) -> Health:
        """How the engine is now."""
        return self._health

    async def check(self, request: GenerationRequest) -> None:
        """Raises `InvalidRequest` for a request that `submit` would refuse."""
        await self._prepare(request)

    async def tokenize(
        self, text: str | list[int], *, add_special: bool = True, parse_special: bool = True
    ) -> list[TokenPiece]:
        """As in `EngineClient`."""
        tokens = partial(self._ready().tokens, text, add_special=add_special, parse_special=parse_special)
        return await self._aside(self._intake.for_text(text), tokens)

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Runs a request, yielding its events; see `EngineClient.submit`."""
        self._ready()
        if request.id in self._streams:
            raise InvalidRequest("id", f"{request.id!r} is the id of a request that is still running")
        stream = self._streams[request.id] = _Stream(next(self._numbers))
        self._mailboxes[stream.number] = stream.mailbox
        running = False
        try:
            sequence = await self._prepare(replaced(request, id=stream.number))
            if stream.cancelled:
                yield GenerationEvent(request_id=request.id, finish_reason=FinishReason.CANCELLED)
                return
            self._steps.do(lambda engine: self._add(engine, sequence))
            running = True
            while running:
                event = await stream.mailbox.get()
                running = event.finish_reason is None
                yield msgspec.structs.replace(event, request_id=request.id)
        finally:
            del self._streams[request.id], self._mailboxes[stream.number]
            if running:
                self._steps.do(lambda engine: engine.cancel(stream.number))

    async def _prepare(self, request: GenerationRequest) -> Seq:
        engine = self._ready()
        return await self._aside(self._intake.for_request(engine, request), partial(engine.prepare, request))

    async def _aside(self, threads: ThreadPoolExecutor, work: Callable[..., Result]) -> Result:
        """Does this on one of the threads; `work` is told by `cancelled` when nobody waits for it any more."""
        cancelled = threading.Event()
        try:
            return await self._loop.run_in_executor(threads, partial(work, cancelled=cancelled.is_set))
        finally:
            cancelled.set()

    async def cancel(self, request_id: str) -> None:
        """Ends a request within a step."""
        self._ready()
        if stream := self._streams.get(request_id):
            stream.cancelled = True
            self._steps.do(lambda engine: engine.cancel(stream.number))

    async def stats(self) -> EngineStats:
        """Counters and state."""
        self._ready()
        answer: asyncio.Future[EngineStats] = self._loop.create_future()
        self._steps.do(lambda engine: self._tell(_resolve, answer, engine.stats()))
        return await answer

    async def workers(self) -> list[WorkerState]:
        """This engine alone."""
        stats = await self.stats() if self._health.status == "ok" and not self._closing else None
        state = WorkerState(
            name="local", pid=os.getpid(), health=self._health, in_flight=len(self._streams), stats=stats
        )
        return [state]

    async def close(self) -> None:
        """Ends the engine after the step it is in; aborts a model that is still loading."""
        self._closing = True
        await asyncio.to_thread(self._intake.close)  # it reads the model that goes next
        await asyncio.to_thread(self._end_thread)
        atexit.unregister(self._end_thread)

    def _end_thread(self) -> None:
        self._closing = True
        self._steps.stop()
        self._thread.join()

    def _ready(self) -> BatchInferenceEngine:
        if self._engine is None or self._health.status != "ok" or self._closing:
            raise EngineClosed(f"the engine takes no requests: it is {self._health.status}")
        return self._engine

    def _deliver(self, events: list[GenerationEvent]) -> None:
        for event in events:
            if mailbox := self._mailboxes.get(event.request_id):  # none: its iterator was closed
                mailbox.put(event)

    def _refuse(self, number: str, error: QueueFull) -> None:
        if mailbox := self._mailboxes.get(number):
            mailbox.fail(error)

    def _deliver_to_all(self, reason: FinishReason, error: str | None) -> None:
        self._deliver(
            [GenerationEvent(request_id=number, finish_reason=reason, error=error) for number in self._mailboxes]
        )

    # --- the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = BatchInferenceEngine(self.config, progress=self._progress, runtime=self._runtime)
        except Exception as error:
            self._health = Health(status="failed", error=str(error))
            self._tell(_reject, self._loaded, error)
            return
        self._engine = engine
        self._health = Health(status="ok", progress=1.0)
        self._tell(_resolve, self._loaded, None)
        try:
            self._steps.run(engine)
            self._health = Health(status="closed")
        except Exception as error:  # a bug: say so, end what runs, and answer from then on
            log.exception("the engine failed")
            self._health = Health(status="failed", error=f"{type(error).__name__}: {error}")
            self._tell(self._deliver_to_all, FinishReason.ERROR, self._health.error)
            self._answer_after_failure(engine)
        finally:
            self._tell(self._deliver_to_all, FinishReason.CANCELLED, None)
            engine.close()

    def _answer_after_failure(self, engine: BatchInferenceEngine) -> None:
        while not self._steps.stopping:
            try:
                self._steps.wait(engine)
            except Exception:  # its books may be half-written
                log.exception("the failed engine cannot do this any more")

    def _progress(self, fraction: float) -> bool:
        self._health = Health(status="loading", progress=fraction)
        return not self._closing

    def _add(self, engine: BatchInferenceEngine, sequence: Seq) -> None:
        if self._health.status == "ok":
            try:
                engine.add(sequence)
            except QueueFull as error:
                self._tell(self._refuse, sequence.id, error)
        else:  # it failed after `submit` had looked
            failed = GenerationEvent(request_id=sequence.id, finish_reason=FinishReason.ERROR, error=self._health.error)
            self._tell(self._deliver, [failed])

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        """Calls a function on the event loop; nobody is there to be told once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)


class _Stream:
    """One submitted request: its number in the engine, and what its iterator has not read yet."""

    def __init__(self, number: str) -> None:
        self.number = number
        self.mailbox = OutputCollector()
        self.cancelled = False


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _reject(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
