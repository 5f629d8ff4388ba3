"""An engine on a thread of this process, for asyncio."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from cppbatch.cluster.engines.client import EngineClient, Health, WorkerLive, WorkerState, id_in_use, running_loop
from cppbatch.cluster.engines.in_flight import LatestLive
from cppbatch.cluster.engines.output_collector import OutputCollector
from cppbatch.cluster.worker.threads import InputThreads, StepLoop
from cppbatch.config import EngineConfig, EngineSettings, engine_config
from cppbatch.engine.core import EngineCore
from cppbatch.engine.disk.slots import SlotActionName, SlotReport
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.engine.params import replace_fields
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest, MediaPrompt, TokenPiece
from cppbatch.engine.runtime import Runtime
from cppbatch.engine.sampling.structured_output import SlowGrammar
from cppbatch.engine.sequence import Seq
from cppbatch.errors import EngineClosed, InvalidRequest, QueueFull

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("cppbatch.engine")

Result = TypeVar("Result")


class LocalEngine(EngineClient):
    """An `EngineClient` whose engine is a thread of this process. Created and used inside a running event loop.

    The engine's thread runs commands between steps and passes the event loop one list of events per step, so neither
    waits for the other. Example: `async with LocalEngine("model.gguf") as engine:`, which waits until the model is
    loaded.
    """

    def __init__(
        self, model: str | Path | EngineConfig, *, runtime: Runtime | None = None, **settings: Unpack[EngineSettings]
    ) -> None:
        """Starts loading a GGUF file; `settings` and `runtime` as in `BatchInferenceEngine`.

        Raises `ConfigError`, also outside an event loop.
        """
        self.config = engine_config(model, settings)
        self._runtime = runtime
        self._loop = running_loop("LocalEngine")
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._loaded.add_done_callback(lambda future: future.exception())  # else asyncio warns if no caller awaits it
        self._engine: EngineCore | None = None
        self._health = Health(status="loading")
        self._closing = False  # accepts no more requests, and stops loading
        self._step_loop = StepLoop(lambda events: self._call_on_loop(self._deliver, events))
        # Requests have numbers in the engine: an id may be reused while its last events are in transit.
        self._numbers = map(str, itertools.count())
        self._by_id: dict[str, _LocalRequest] = {}
        self._by_number: dict[str, _LocalRequest] = {}
        self._waiters: set[asyncio.Future[Any]] = set()
        self._live = LatestLive()
        self._empty_since = monotonic()
        self._input_threads = InputThreads()
        # A daemon, so that a second Ctrl-C does not wait for a model that is still loading.
        self._thread = threading.Thread(target=self._run, name="cppbatch-engine", daemon=True)
        self._thread.start()
        atexit.register(self._end_thread)  # a thread inside llama.cpp while its statics are destroyed would crash

    # --- on the event loop --------------------------------------------------------------------------------------

    async def loaded(self) -> None:
        """Waits until the model is loaded. Raises the errors of loading."""
        await asyncio.shield(self._loaded)

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises `EngineClosed` before it is loaded."""
        return self._ready().runtime.info

    def health(self) -> Health:
        """The current state of the engine."""
        if self._closing and self._health.status != "failed":
            return Health(status="closed")
        return self._health

    async def check(self, request: GenerationRequest) -> None:
        """Raises `InvalidRequest` for a request that `submit` would refuse."""
        await self._prepare(request)

    async def tokenize(
        self, text: str | list[int] | MediaPrompt, *, add_special: bool = True, parse_special: bool = True
    ) -> list[TokenPiece]:
        """As in `EngineClient`."""
        tokens = partial(self._ready().inputs.tokens, text, add_special=add_special, parse_special=parse_special)
        return await self._run_cancellable(self._input_threads.for_text(text), tokens)

    async def update_request(self, request_id: str, tokens: Sequence[int]) -> bool:
        """Appends tokens to the text of a request, between two steps; see `BatchInferenceEngine.update_request`."""
        engine, request = self._ready(), self._by_id.get(request_id)
        if request is None:
            return False
        return await self._between_steps(lambda: engine.update(request.number, tokens))

    async def slot_action(self, action: SlotActionName, slot: int, path: str = "") -> SlotReport:
        """As in `EngineClient`."""
        try:
            return await self._slot_action(action, slot, path)
        finally:
            self._empty_since = monotonic()  # the result of `live` has changed

    async def _slot_action(self, action: SlotActionName, slot: int, path: str) -> SlotReport:
        slots, files = self._ready().slots, self._input_threads.for_files()
        if action == "erase":
            return await self._between_steps(lambda: slots.erase(slot))
        if action == "save":
            prefix = await self._between_steps(lambda: slots.take(slot))
            return await self._run_on(files, partial(slots.write, Path(path), prefix))
        prefix = await self._run_on(files, partial(slots.read, Path(path)))
        return await self._between_steps(lambda: slots.put(slot, prefix))

    async def _between_steps(self, change: Callable[[], Result]) -> Result:
        """Runs `change` on the engine's thread. Raises its `InvalidRequest`, and `EngineClosed` if the engine ends."""
        self._ready()
        answer: asyncio.Future[Result] = self._loop.create_future()
        self._waiters.add(answer)
        answer.add_done_callback(self._waiters.discard)

        def run(engine: EngineCore) -> None:
            try:
                result = change()
            except InvalidRequest as error:
                self._call_on_loop(_reject, answer, error)
            else:
                self._call_on_loop(_resolve, answer, result)

        self._step_loop.post(run)
        return await answer

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Runs a request, yielding its events; see `EngineClient.submit`."""
        self._ready()
        if request.id in self._by_id:
            raise id_in_use(request.id)
        submitted = _LocalRequest(next(self._numbers), request.id)
        self._by_id[request.id] = self._by_number[submitted.number] = submitted
        in_engine = False
        try:
            try:
                sequence = await self._prepare(replace_fields(request, id=submitted.number))
            except EngineClosed:  # closed meanwhile
                submitted.cancelled = True
            if submitted.cancelled:
                yield GenerationEvent(request_id=request.id, finish_reason=FinishReason.CANCELLED)
                return
            self._step_loop.post(lambda engine: self._add(engine, sequence))
            in_engine = True
            while not submitted.outputs.finished:
                yield await submitted.outputs.get()
        finally:
            del self._by_id[request.id], self._by_number[submitted.number]
            self._empty_since = monotonic()
            if in_engine and not submitted.outputs.finished:
                self._step_loop.post(lambda engine: engine.cancel(submitted.number))

    async def _prepare(self, request: GenerationRequest) -> Seq:
        engine, threads = self._ready(), self._input_threads
        prepare = partial(engine.prepare, request, arrived_at=perf_counter())
        try:
            return await self._run_cancellable(threads.for_request(engine, request), partial(prepare, patient=False))
        except SlowGrammar:
            return await self._run_cancellable(threads.for_slow_grammars(), prepare)

    async def _run_cancellable(self, threads: ThreadPoolExecutor, work: Callable[..., Result]) -> Result:
        """As `_run_on`; `work` gets the argument `cancelled`, which returns True when the caller has left."""
        cancelled = threading.Event()
        try:
            return await self._run_on(threads, partial(work, cancelled=cancelled.is_set))
        finally:
            cancelled.set()

    async def _run_on(self, threads: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
        """Runs `work` on one of these threads. Raises `EngineClosed` if the engine is closed before it starts."""
        self._ready()
        running = self._loop.run_in_executor(threads, work)
        try:
            await asyncio.wait([running])  # awaiting it would raise `CancelledError` when the threads are closed
        finally:
            running.cancel()
        if running.cancelled():
            raise EngineClosed(self.health().refusal)
        return running.result()

    async def cancel(self, request_id: str) -> None:
        """Ends a request within a step."""
        self._ready()
        if request := self._by_id.get(request_id):
            request.cancelled = True
            self._step_loop.post(lambda engine: engine.cancel(request.number))

    async def stats(self) -> EngineStats:
        """Counters and state."""
        return await self._between_steps(self._ready().stats)

    async def workers(self) -> list[WorkerState]:
        """The state of this one engine."""
        return [self._state(await self.stats() if self._answers else None)]

    def _state(self, stats: EngineStats | None = None) -> WorkerState:
        return WorkerState(
            name="local",
            pid=os.getpid(),
            device=self.config.device,
            health=self.health(),
            in_flight=len(self._by_id),
            stats=stats,
        )

    @property
    def _answers(self) -> bool:
        return self._health.status == "ok" and not self._closing

    async def live(self) -> list[WorkerLive]:
        """The live state of this engine."""
        engine = age = None
        if self._answers:
            idle_seconds = 0.0 if self._by_id else monotonic() - self._empty_since
            engine, age = await self._live.get(self._ask_live, idle_seconds)
        return [self._state().live(engine, age)]

    def _ask_live(self) -> None:
        self._step_loop.post(lambda engine: self._call_on_loop(self._live.received, engine.live()))

    async def close(self) -> None:
        """Closes the engine after the current step; aborts loading."""
        self._closing = True
        if self._engine:
            await asyncio.to_thread(self._engine.inputs.close)  # a grammar may take 10 s to compile
        await asyncio.to_thread(self._input_threads.close)  # first: these threads read the model
        await asyncio.to_thread(self._end_thread)
        atexit.unregister(self._end_thread)

    def _end_thread(self) -> None:
        self._closing = True
        self._step_loop.stop()
        self._thread.join()

    def _ready(self) -> EngineCore:
        if self._engine is None or self._health.status != "ok" or self._closing:
            raise EngineClosed(self.health().refusal)
        self._engine.process.check()
        return self._engine

    def _deliver(self, events: list[GenerationEvent]) -> None:
        for event in events:
            if request := self._by_number.get(event.request_id):  # None: its iterator was closed
                request.outputs.put(event)

    def _refuse(self, number: str, error: QueueFull) -> None:
        if request := self._by_number.get(number):
            request.outputs.fail(error)

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        """Ends all requests, and the callers waiting for `_between_steps`, which the engine may never answer."""
        self._deliver(
            [GenerationEvent(request_id=number, finish_reason=reason, error=error) for number in self._by_number]
        )
        for answer in list(self._waiters):
            _reject(answer, EngineClosed(f"the engine does not respond: it is {self._health.status}"))

    # --- on the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = EngineCore(
                self.config,
                progress=self._on_progress,
                runtime=self._runtime,
                on_admitted=self._step_loop.output_thread.put,
                prepares_beside_steps=True,
            )
        except Exception as error:
            self._health = Health(status="failed", error=str(error))
            self._call_on_loop(_reject, self._loaded, error)
            return
        self._engine = engine
        self._health = Health(status="ok", progress=1.0)
        self._call_on_loop(_resolve, self._loaded, None)
        try:
            self._step_loop.run(engine)
            self._health = Health(status="closed")
        except Exception as error:  # a bug: end all requests with this error, and keep answering commands
            log.exception("the engine failed")
            self._health = Health(status="failed", error=f"{type(error).__name__}: {error}")
            self._call_on_loop(self._end_all, FinishReason.ERROR, self._health.error)
            self._run_commands_until_stopped(engine)
        finally:
            self._call_on_loop(self._end_all, FinishReason.CANCELLED, None)
            engine.close()

    def _run_commands_until_stopped(self, engine: EngineCore) -> None:
        while not self._step_loop.stopping:
            try:
                self._step_loop.wait_for_command(engine)
            except Exception:  # the failure may have left its state inconsistent
                log.exception("the failed engine could not execute a command")

    def _on_progress(self, fraction: float) -> bool:
        self._health = Health(status="loading", progress=fraction)
        return not self._closing

    def _add(self, engine: EngineCore, sequence: Seq) -> None:
        if self._health.status == "ok":
            try:
                engine.add(sequence)
            except QueueFull as error:
                self._call_on_loop(self._refuse, sequence.id, error)
        else:  # the engine failed after `submit` checked its health
            failed = GenerationEvent(request_id=sequence.id, finish_reason=FinishReason.ERROR, error=self._health.error)
            self._call_on_loop(self._deliver, [failed])

    def _call_on_loop(self, function: Callable[..., None], *args: Any) -> None:
        """Calls a function on the event loop; does nothing once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)


class _LocalRequest:
    """A submitted request: its number in the engine, and the events that its iterator has not read."""

    def __init__(self, number: str, request_id: str) -> None:
        self.number = number
        self.outputs = OutputCollector(request_id)
        self.cancelled = False


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _reject(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
