"""An engine in a worker process. When the worker dies, its requests continue in the next one; clients see a pause."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from cppbatch.cluster.engines.client import EngineClient, Health, OwnLoop, WorkerLive, WorkerState, id_in_use
from cppbatch.cluster.engines.in_flight import MAX_CRASHES, InFlightRequest, InFlightRequests, LatestLive
from cppbatch.cluster.engines.output_collector import OutputCollector
from cppbatch.cluster.engines.supervisor import Refit, Supervisor
from cppbatch.cluster.link import (
    Answer,
    Cancel,
    Check,
    Checked,
    Events,
    FromWorker,
    GetLive,
    GetStats,
    LimitThreads,
    Live,
    Question,
    Refused,
    SlotAction,
    SlotDone,
    Stats,
    Tokenize,
    Tokenized,
    Update,
    Updated,
)
from cppbatch.cluster.rules import check_times
from cppbatch.config import EngineConfig
from cppbatch.engine.disk.slots import SlotActionName, SlotReport
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.engine.params import token_ids
from cppbatch.engine.request import (
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    MediaPrompt,
    ResumeState,
    TokenPiece,
)
from cppbatch.engine.turns import OwnProcess
from cppbatch.engine_settings import EngineSettings, engine_config
from cppbatch.errors import CppBatchError, EngineClosed, GenerationFailed, InvalidRequest, QueueFull
from cppbatch.setting import INT32_MAX
from cppbatch.unclosed import warn_unclosed

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("cppbatch.cluster")


class Withdrawn(Exception):
    """The request was taken back (`EngineProcess.withdraw`): it continues elsewhere with `resume`."""

    def __init__(self, resume: ResumeState) -> None:
        super().__init__("withdrawn")
        self.resume = resume


class EngineProcess(EngineClient):
    """An `EngineClient` whose engine is a worker process. Created and used inside a running event loop.

    Requests and their tokens so far are kept in this process, so a new worker can continue them. Example:
    `async with EngineProcess("model.gguf") as engine:`, which waits until the model is loaded. The worker of an engine
    that is dropped without `close` is killed, with a `ResourceWarning`.
    """

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
        self._own_loop = OwnLoop("EngineProcess")
        check_times(step_timeout, sleep_idle_seconds)
        self.config = engine_config(model, settings)
        self.name = name
        worker_config = msgspec.structs.replace(self.config, max_queue=INT32_MAX)  # this process limits the queue
        self._supervisor = Supervisor(
            worker_config,
            weakref.proxy(self),  # or the engine would never be dropped
            step_timeout=step_timeout,
            sleep_idle_seconds=sleep_idle_seconds,
            refit=refit,
            runtime=runtime,
        )
        self._in_flight = InFlightRequests()
        self._by_id: dict[str, InFlightRequest] = {}  # by the client's id; while the iterator of `submit` is open
        self._finish_times: deque[float] = deque(maxlen=64)
        self._stats_waiters: list[asyncio.Future[None]] = []
        self._last_stats: EngineStats | None = None
        self._live = LatestLive()
        self._max_threads = 0
        self._closed = False
        self._process = OwnProcess()
        self._task = asyncio.ensure_future(_supervise(self._supervisor, weakref.ref(self)))
        self._loaded: asyncio.Future[None] = self._own_loop.loop.create_future()
        self._loaded.add_done_callback(lambda future: future.exception())  # else asyncio warns if no caller awaits it

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

    async def loaded(self) -> None:
        """Waits until the model is loaded. Raises the errors of loading."""
        self._own_loop.check()
        await asyncio.shield(self._loaded)

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises `EngineClosed` before it is loaded."""
        if self._supervisor.info is None:
            raise EngineClosed("the model is not loaded yet; use `async with`, or await `loaded()` first")
        return self._supervisor.info

    def health(self) -> Health:
        """The current state of the engine."""
        return Health(status="closed") if self._closed else self._supervisor.health

    @property
    def in_flight(self) -> int:
        """The number of unfinished requests."""
        return len(self._in_flight)

    # --- requests -----------------------------------------------------------------------------------------------

    async def check(self, request: GenerationRequest) -> None:
        await self._ask_worker(request, Check(request))

    async def tokenize(
        self, text: str | list[int] | MediaPrompt, *, add_special: bool = True, parse_special: bool = True
    ) -> list[TokenPiece]:
        question = Tokenize("", text, add_special, parse_special)
        answer = await self._ask_worker(GenerationRequest(id="", prompt=text), question)
        if not isinstance(answer, Tokenized):
            return []
        pieces = {token.id: token for token in answer.pieces}
        return [pieces[token] for token in answer.ids]

    async def slot_action(self, action: SlotActionName, slot: int, path: str = "") -> SlotReport:
        answer = await self._ask_worker(GenerationRequest(id="", prompt=""), SlotAction("", action, slot, path))
        assert isinstance(answer, SlotDone)
        return answer.report

    async def update_request(self, request_id: str, tokens: Sequence[int]) -> bool:
        """Asks the worker. If it dies at this moment, the text may continue without the tokens."""
        request = self._by_id.get(request_id)
        if request is None or not self._in_flight.is_sent(request):
            return False
        question = Update("", request.id, list(token_ids("tokens", tokens)))
        answer = await self._ask_worker(GenerationRequest(id="", prompt=""), question)
        assert isinstance(answer, Updated)
        return answer.found

    async def _ask_worker(self, request: GenerationRequest, question: Question | Update) -> Answer | None:
        """Sends the question as a request, with crash recovery: preparing a text can crash a worker."""
        asked = self._start(request, question)
        try:
            end = await asked.outputs.get()
            if end.finish_reason is FinishReason.CANCELLED:
                raise EngineClosed("the engine was closed")
            if end.error:
                raise GenerationFailed(end.error)
            return asked.answer
        finally:
            self._release(asked)

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Runs a request, yielding its events; see `EngineClient.submit`."""
        with self.open(request) as outputs:
            while not outputs.finished:
                yield await outputs.get()

    @contextlib.contextmanager
    def open(self, request: GenerationRequest, resume: ResumeState | None = None) -> Iterator[OutputCollector]:
        """Runs a request and reads its events in the context, at the end of which an unfinished request is cancelled.

        `resume`: its progress in another engine, which has died; the events continue after these tokens. Raises as the
        first step of `submit`; `OutputCollector.get` raises as later ones, and `Withdrawn`.
        """
        if request.id in self._by_id:
            raise id_in_use(request.id)
        if resume is None and self.in_flight >= self.config.n_parallel + self.config.max_queue:
            raise QueueFull(self.config.max_queue, self._seconds_per_request())
        submitted = self._by_id[request.id] = self._start(request, resume=resume)
        try:
            yield submitted.outputs
        finally:
            del self._by_id[request.id]
            self._release(submitted)

    def _start(
        self, request: GenerationRequest, question: Question | Update | None = None, resume: ResumeState | None = None
    ) -> InFlightRequest:
        if not (health := self.health()).takes_requests:
            raise EngineClosed(health.refusal)
        self._own_loop.check()
        if request.params.logits_processor is not None:
            message = "is a Python function, which cannot be sent to the engine process; use LocalEngine"
            raise InvalidRequest("logits_processor", message)
        started = self._in_flight.add(request, question, resume)
        self._supervisor.wake()
        self._send_requests()
        return started

    def _release(self, request: InFlightRequest) -> None:
        """Called when the reader is done. Cancels the request if it is unfinished."""
        if request in self._in_flight:
            self._send_cancel(request)
            self._in_flight.remove(request)
            self._send_requests()  # the request may have been the suspect that ran alone

    async def cancel(self, request_id: str) -> None:
        """Ends a request within a step."""
        self._own_loop.check()
        if request := self._by_id.get(request_id):
            request.cancelled = True
            if not self._send_cancel(request):  # otherwise the worker sends the last event
                self._end(request, FinishReason.CANCELLED)

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

    def _send_cancel(self, request: InFlightRequest) -> bool:
        """Tells the worker to cancel the request. Returns False if no worker has it."""
        worker = self._supervisor.worker
        if worker is None or not self._in_flight.is_sent(request):
            return False
        worker.send(Cancel(request.id))
        return True

    def _send_requests(self) -> None:
        if worker := self._supervisor.worker:
            for request in self._in_flight.take_sendable():
                try:
                    worker.send(request.message())
                except UnicodeEncodeError as error:
                    self._fail(request, InvalidRequest("prompt", f"contains an unpaired surrogate: {error}"))
                except Exception as error:  # fails this request; the others are still sent
                    log.exception("failed to send a request to the worker")
                    message = f"the request cannot be sent to the engine ({type(error).__name__}: {error})"
                    self._fail(request, GenerationFailed(message))

    def _fail(self, request: InFlightRequest, error: Exception) -> None:
        self._in_flight.remove(request)
        request.outputs.fail(error)

    def _seconds_per_request(self) -> float:
        """The mean time between the ends of recent requests, 1 to 60 s: an estimate for the next free slot."""
        if len(self._finish_times) < 2:
            return 1.0
        return min(60.0, max(1.0, (self._finish_times[-1] - self._finish_times[0]) / (len(self._finish_times) - 1)))

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

    @property
    def idle_seconds(self) -> float:
        """Seconds without requests; 0.0 while there are any."""
        return self._in_flight.idle_seconds

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
        if not self._loaded.done():
            self._loaded.set_exception(error)

    def on_worker_ready(self, stats: EngineStats) -> None:
        """Sends the requests waiting for this worker."""
        self.config = msgspec.structs.replace(self._supervisor.config, max_queue=self.config.max_queue)
        self._last_stats = stats
        self._live.reset()
        if not self._loaded.done():
            self._loaded.set_result(None)
        self._send_thread_limit()
        self._send_requests()

    def on_worker_message(self, message: FromWorker) -> None:
        """Passes a message to its request."""
        if isinstance(message, Events):
            for event in message.events:
                self._handle_event(event)
            self._send_requests()
        elif isinstance(message, Stats):
            self._last_stats = message.stats
            self._wake_stats_waiters()
        elif isinstance(message, Live):
            self._live.received(message.engine)
        elif isinstance(message, Refused):
            if request := self._in_flight.get(message.id):
                refused: CppBatchError = InvalidRequest(message.field, message.message, message.overflow)
                if request.has_tokens:  # an earlier worker has accepted it, with more KV cells
                    refused = GenerationFailed(f"memory has run out, and the text cannot continue: {refused}")
                self._fail(request, refused)
        elif isinstance(message, (Checked, Tokenized, SlotDone, Updated)) and (
            request := self._in_flight.get(message.id)
        ):
            request.answer = message
            self._end(request, FinishReason.STOP)

    def _handle_event(self, event: GenerationEvent) -> None:
        request = self._in_flight.get(event.request_id)
        if request is None:  # the reader has left, or the request was sent again under another id
            return
        if event.is_report:  # no token: a crash would repeat it
            request.put(event)
            return
        self._supervisor.made_progress()
        must_requeue = self._in_flight.token_received(request)
        if event.finish_reason:
            self._in_flight.remove(request)
            self._finish_times.append(perf_counter())
        elif must_requeue and not request.cancelled:
            self._send_cancel(request)
            self._in_flight.requeue(request)
        request.put(event)

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
        self._wake_stats_waiters()
        self._live.reset()

    def _end(self, request: InFlightRequest, reason: FinishReason, error: str | None = None) -> None:
        """Creates the last event on behalf of the worker."""
        self._in_flight.remove(request)
        request.outputs.put(GenerationEvent(request_id=request.id, finish_reason=reason, error=error))

    def _end_all(self, reason: FinishReason, error: str | None = None) -> None:
        for request in self._in_flight:
            self._end(request, reason, error)

    # --- state, closing -----------------------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        """The worker's counters and state, as last reported. Raises `EngineClosed` before the first report."""
        stats = None if self._closed else await self._fetch_stats()
        if stats is None:
            raise EngineClosed(f"the engine does not respond: it is {self.health().status}")
        return stats

    async def workers(self) -> list[WorkerState]:
        """The state of this one worker."""
        return [self._state(await self._fetch_stats())]

    def _state(self, stats: EngineStats | None = None) -> WorkerState:
        worker = self._supervisor.worker
        return WorkerState(
            name=self.name,
            pid=worker.pid if worker else None,
            device=self.config.device,
            health=self.health(),
            in_flight=self.in_flight,
            restarts=self._supervisor.restarts,
            stats=stats,
        )

    async def _fetch_stats(self) -> EngineStats | None:
        """Asks the worker. Returns its previous report if it is in a long step or is not running."""
        self._own_loop.check()
        if worker := self._supervisor.worker:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._stats_waiters.append(waiter)
            worker.send(GetStats())
            await asyncio.wait((waiter,), timeout=1.0)  # wait_for may swallow a cancellation
        return self._last_stats

    async def live(self) -> list[WorkerLive]:
        """The live state of this worker."""
        self._own_loop.check()
        engine = age = None
        if worker := self._supervisor.worker:
            engine, age = await self._live.get(partial(worker.send, GetLive()), self.idle_seconds)
        state = self._state()  # the worker may have ended meanwhile
        return [state.live(None, None) if state.pid is None else state.live(engine, age)]

    def _wake_stats_waiters(self) -> None:
        for waiter in self._stats_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._stats_waiters = []

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
        self._end_all(FinishReason.CANCELLED)
        if not self._loaded.done():
            self._loaded.set_exception(EngineClosed("the engine was closed while loading the model"))


async def _supervise(supervisor: Supervisor, of: weakref.ref[EngineProcess]) -> None:
    """Runs the workers until cancelled. Does not keep the engine alive."""
    try:
        await supervisor.run()
    except Exception as error:
        if engine := of():  # else it was dropped
            engine.on_supervision_failed(error)
