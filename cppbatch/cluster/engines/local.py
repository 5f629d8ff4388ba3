"""An engine on a thread of this process, for asyncio."""

from __future__ import annotations

import asyncio
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

from cppbatch.cluster.engines.client import EngineClient, Health, OwnLoop, WorkerLive, WorkerState, id_in_use
from cppbatch.cluster.engines.in_flight import LatestState
from cppbatch.cluster.engines.output_collector import OutputCollector
from cppbatch.cluster.worker.threads import InputThreads, StepLoop
from cppbatch.config import EngineConfig
from cppbatch.engine.access import OwnProcess
from cppbatch.engine.core import EngineCore
from cppbatch.engine.disk.slots import SlotActionName, SlotReport
from cppbatch.engine.grammar.grammar_check import SlowGrammar
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.observe.live_state import LiveEngine
from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.engine.params import replace_fields
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest, MediaPrompt, TokenPiece
from cppbatch.engine.runtime import Runtime
from cppbatch.engine.sequence import Seq
from cppbatch.engine_settings import EngineSettings, engine_config
from cppbatch.errors import EngineClosed, InvalidRequest, QueueFull
from cppbatch.unclosed import close_at_exit, warn_unclosed

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("cppbatch.engine")

Result = TypeVar("Result")


class LocalEngine(EngineClient):
    """An `EngineClient` whose engine is a thread of this process. Created and used inside a running event loop.

    The engine's thread runs commands between steps and passes the event loop one list of events per step, so neither
    waits for the other. Example: `async with LocalEngine("model.gguf") as engine:`, which waits until the model is
    loaded. An engine that is dropped without `close` ends after its current step, with a `ResourceWarning`.
    """

    def __init__(
        self, model: str | Path | EngineConfig, *, runtime: Runtime | None = None, **settings: Unpack[EngineSettings]
    ) -> None:
        """Starts loading a GGUF file; `settings` and `runtime` as in `BatchInferenceEngine`.

        Raises `ConfigError`, also outside an event loop.
        """
        self.config = engine_config(model, settings)
        self._own_loop = OwnLoop("LocalEngine")
        # Requests have numbers in the engine: an id may be reused while its last events are in transit.
        self._numbers = map(str, itertools.count())
        self._by_id: dict[str, _LocalRequest] = {}
        self._empty_since = monotonic()
        self._info: ModelInfo | None = None
        self._thread = _EngineThread(self.config, runtime, self._own_loop.loop)

    def __del__(self) -> None:
        thread: _EngineThread | None = self.__dict__.get("_thread")  # missing if `__init__` raised
        if thread and thread.must_stop:
            try:
                warn_unclosed(self)
            finally:
                thread.stop()

    @property
    def _engine(self) -> EngineCore | None:
        return self._thread.engine

    # --- on the event loop --------------------------------------------------------------------------------------

    async def loaded(self) -> None:
        """Waits until the model is loaded. Raises the errors of loading."""
        self._own_loop.check()
        await asyncio.shield(self._thread.loaded)

    @property
    def info(self) -> ModelInfo:
        """The loaded model, also while it closes. Raises `EngineClosed` before it is loaded."""
        if self._info is None:
            self._info = self._loaded_engine.runtime.info
        return self._info

    def health(self) -> Health:
        """The current state of the engine."""
        thread = self._thread
        return Health(status="closed") if thread.closing and thread.health.status != "failed" else thread.health

    async def check(self, request: GenerationRequest) -> None:
        """Raises `InvalidRequest` for a request that `submit` would refuse."""
        await self._make_sequence(request)

    async def tokenize(
        self, text: str | list[int] | MediaPrompt, *, add_special: bool = True, parse_special: bool = True
    ) -> list[TokenPiece]:
        """Tokenises, or looks up token ids, on an input thread."""
        tokens = partial(self._ready().inputs.tokens, text, add_special=add_special, parse_special=parse_special)
        return await self._run_cancellable(self._thread.input_threads.for_text(text), tokens)

    async def update_request(self, request_id: str, tokens: Sequence[int]) -> bool:
        """Appends tokens to the text of a request, between two steps; see `BatchInferenceEngine.update_request`."""
        engine, request = self._ready(), self._by_id.get(request_id)
        if request is None:
            return False
        return await self._between_steps(lambda: engine.update(request.number, tokens))

    async def slot_action(self, action: SlotActionName, slot: int, path: str = "") -> SlotReport:
        """Saves, restores or erases the slot between two steps."""
        try:
            return await self._slot_action(action, slot, path)
        finally:
            self._empty_since = monotonic()  # the result of `live` has changed

    async def _slot_action(self, action: SlotActionName, slot: int, path: str) -> SlotReport:
        slots, files = self._ready().slots, self._thread.input_threads.for_files()
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
        thread = self._thread
        answer: asyncio.Future[Result] = self._own_loop.loop.create_future()
        thread.waiters.add(answer)
        answer.add_done_callback(thread.waiters.discard)

        def run(engine: EngineCore) -> None:
            try:
                result = change()
            except InvalidRequest as error:
                thread.call_on_loop(_reject, answer, error)
            else:
                thread.call_on_loop(_resolve, answer, result)

        thread.step_loop.post(run)
        return await answer

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Runs a request, yielding its events; see `EngineClient.submit`."""
        self._ready()
        if request.id in self._by_id:
            raise id_in_use(request.id)
        thread = self._thread
        submitted = _LocalRequest(next(self._numbers), request.id)
        self._by_id[request.id] = thread.requests[submitted.number] = submitted
        in_engine = False
        try:
            try:
                sequence = await self._make_sequence(replace_fields(request, id=submitted.number))
            except EngineClosed:  # closed meanwhile
                submitted.cancelled = True
            if submitted.cancelled:
                yield GenerationEvent(request_id=request.id, finish_reason=FinishReason.CANCELLED)
                return
            thread.step_loop.post(lambda engine: thread.add(engine, sequence))
            in_engine = True
            if request.report_acceptance:
                yield GenerationEvent(request_id=request.id)
            while not submitted.outputs.finished:
                yield await submitted.outputs.get()
        finally:
            del self._by_id[request.id], thread.requests[submitted.number]
            self._empty_since = monotonic()
            if in_engine and not submitted.outputs.finished:
                thread.step_loop.post(lambda engine: engine.cancel(submitted.number))

    async def _make_sequence(self, request: GenerationRequest) -> Seq:
        engine, threads = self._ready(), self._thread.input_threads
        make = partial(engine.make_sequence, request, arrived_at=perf_counter())
        try:
            return await self._run_cancellable(threads.for_request(engine, request), partial(make, patient=False))
        except SlowGrammar:
            return await self._run_cancellable(threads.for_slow_grammars(), make)

    async def _run_cancellable(self, threads: ThreadPoolExecutor, work: Callable[..., Result]) -> Result:
        """Runs `work` on one of these threads. Its argument `cancelled` returns True when the caller has left."""
        cancelled = threading.Event()
        try:
            return await self._run_on(threads, partial(work, cancelled=cancelled.is_set))
        finally:
            cancelled.set()

    async def _run_on(self, threads: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
        """Runs `work` on one of these threads. Raises `EngineClosed` if the engine is closed before it starts."""
        self._ready()
        running = self._own_loop.loop.run_in_executor(threads, work)
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
            self._thread.step_loop.post(lambda engine: engine.cancel(request.number))

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
        return self._thread.health.status == "ok" and not self._thread.closing

    async def live(self) -> list[WorkerLive]:
        """The live state of this engine."""
        engine = age = None
        if self._answers:
            self._own_loop.check()
            idle_seconds = 0.0 if self._by_id else monotonic() - self._empty_since
            engine, age = await self._thread.live.get(self._thread.ask_live, idle_seconds)
        return [self._state().live(engine, age)]

    async def close(self) -> None:
        """Closes the engine after the current step; aborts loading."""
        thread = self._thread
        thread.closing = True
        if thread.engine:
            await asyncio.to_thread(thread.engine.inputs.close)  # a grammar may take 10 s to compile
        await asyncio.to_thread(thread.input_threads.close)  # first: these threads read the model
        await asyncio.to_thread(thread.close)

    def _ready(self) -> EngineCore:
        engine = self._loaded_engine
        self._own_loop.check()
        return engine

    @property
    def _loaded_engine(self) -> EngineCore:
        if self._engine is None or not self._answers:
            raise EngineClosed(self.health().refusal)
        self._engine.process.check()
        return self._engine


class _EngineThread:
    """The thread of a `LocalEngine`, and what both use. Nothing here refers to the `LocalEngine`, which would never be
    dropped otherwise."""

    def __init__(self, config: EngineConfig, runtime: Runtime | None, loop: asyncio.AbstractEventLoop) -> None:
        self._config, self._runtime, self._loop = config, runtime, loop
        self._process = OwnProcess()
        self.loaded: asyncio.Future[None] = loop.create_future()
        self.loaded.add_done_callback(lambda future: future.exception())  # else asyncio warns if no caller awaits it
        self.engine: EngineCore | None = None
        self.health = Health(status="loading")
        self.closing = False
        """Whether it accepts no more requests, and stops loading."""
        self.step_loop = StepLoop(lambda events: self.call_on_loop(self._deliver, events))
        self.requests: dict[str, _LocalRequest] = {}
        """By number."""
        self.waiters: set[asyncio.Future[Any]] = set()
        """The futures that `_between_steps` awaits."""
        self.live = LatestState[LiveEngine]()
        self.input_threads = InputThreads()
        # A daemon, so that a second Ctrl-C does not wait for a model that is still loading.
        self._thread = threading.Thread(target=self._run, name="cppbatch-engine", daemon=True)
        self._thread.start()
        close_at_exit(self)

    # --- on any thread ------------------------------------------------------------------------------------------

    @property
    def must_stop(self) -> bool:
        """Whether it runs, and neither `stop` nor `close` was called."""
        return self._thread.is_alive() and not self.closing and not self._process.is_fork

    def stop(self) -> None:
        """Ends the thread and closes the engine after the current step; aborts loading. Does not wait."""
        self.closing = True
        self.step_loop.stop()

    def close(self) -> None:
        """Stops the thread, and waits for its end."""
        if not self._process.is_fork:
            self.stop()
            self._thread.join()

    def call_on_loop(self, function: Callable[..., None], *args: Any) -> None:
        """Calls a function on the event loop; does nothing once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def ask_live(self) -> None:
        """Has `live` updated between two steps."""
        self.step_loop.post(lambda engine: self.call_on_loop(self.live.received, engine.live()))

    # --- on the event loop --------------------------------------------------------------------------------------

    def _deliver(self, events: list[GenerationEvent]) -> None:
        for event in events:
            if request := self.requests.get(event.request_id):  # None: its iterator was closed
                request.outputs.put(event)

    def _refuse(self, number: str, error: QueueFull) -> None:
        if request := self.requests.get(number):
            request.outputs.fail(error)

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        """Ends all requests, and the callers waiting for `_between_steps`, which the engine may never answer."""
        self._deliver(
            [GenerationEvent(request_id=number, finish_reason=reason, error=error) for number in self.requests]
        )
        for answer in list(self.waiters):
            _reject(answer, EngineClosed(f"the engine does not respond: it is {self.health.status}"))

    # --- on the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = EngineCore(
                self._config,
                progress=self._on_progress,
                runtime=self._runtime,
                on_admitted=self.step_loop.output_thread.put,
                prepares_beside_steps=True,
            )
        except Exception as error:
            self.health = Health(status="failed", error=str(error))
            self.call_on_loop(_reject, self.loaded, error)
            return
        self.engine = engine
        self.health = Health(status="ok", progress=1.0)
        self.call_on_loop(_resolve, self.loaded, None)
        try:
            self.step_loop.run(engine)
            self.health = Health(status="closed")
        except Exception as error:  # a bug: end all requests with this error, and keep answering commands
            log.exception("the engine failed")
            self.health = Health(status="failed", error=f"{type(error).__name__}: {error}")
            self.call_on_loop(self._end_all, FinishReason.ERROR, self.health.error)
            self._run_commands_until_stopped(engine)
        finally:
            self.call_on_loop(self._end_all, FinishReason.CANCELLED, None)
            engine.inputs.close()
            self.input_threads.close()
            engine.close()

    def _run_commands_until_stopped(self, engine: EngineCore) -> None:
        while not self.step_loop.stopping:
            try:
                self.step_loop.wait_for_command(engine)
            except Exception:  # the failure may have left its state inconsistent
                log.exception("the failed engine could not execute a command")

    def _on_progress(self, fraction: float) -> bool:
        self.health = Health(status="loading", progress=fraction)
        return not self.closing

    def add(self, engine: EngineCore, sequence: Seq) -> None:
        """Queues a prepared request."""
        if self.health.status == "ok":
            try:
                engine.add(sequence)
            except QueueFull as error:
                self.call_on_loop(self._refuse, sequence.id, error)
        else:  # the engine failed after `submit` checked its health
            failed = GenerationEvent(request_id=sequence.id, finish_reason=FinishReason.ERROR, error=self.health.error)
            self.call_on_loop(self._deliver, [failed])


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
