"""An engine in a worker process of its own: when it dies, another one goes on where it was, and no client notices."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from cppbatch.cluster.engine_client import Health, WorkerState
from cppbatch.cluster.flight import Flight
from cppbatch.cluster.in_flight import MOST_CRASHES, Replay
from cppbatch.cluster.opened import Opened
from cppbatch.cluster.supervisor import Supervisor
from cppbatch.cluster.worker_messages import (
    AskStats,
    Cancel,
    Check,
    Checked,
    Events,
    FromWorker,
    Refused,
    Stats,
    Tokenize,
    Tokenized,
)
from cppbatch.config import EngineConfig, engine_config
from cppbatch.engine.metrics import EngineStats
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest, TokenPiece
from cppbatch.errors import EngineClosed, GenerationFailed, InvalidRequest, QueueFull

log = logging.getLogger("cppbatch.cluster")

_NO_LIMIT = 2**31 - 1
_RECENT = 64
_STATS_PATIENCE_S = 1.0


class EngineProcess(Opened):
    """An `EngineClient` whose engine is another process. Made and used inside a running event loop.

    Requests and the tokens they have had are kept here, so a new worker can go on with them. Used as
    `async with EngineProcess("model.gguf") as engine:`, which waits until the model is loaded.
    """

    def __init__(
        self,
        model: str | Path | EngineConfig,
        *,
        name: str = "0",
        step_timeout: float = 300.0,
        runtime: str | None = None,
        **settings: Any,
    ) -> None:
        """Starts a worker that loads a GGUF file; `settings` as in `BatchInferenceEngine`. Raises `ConfigError`.

        `name`: tells it from others. `step_timeout`: seconds after which a step counts as hung. `runtime`: tests,
        `module:function` that makes another computation in the model's place.
        """
        self.config = engine_config(model, settings)
        self.name = name
        self._most_flights = self.config.n_parallel + self.config.max_queue
        unlimited = msgspec.structs.replace(self.config, max_queue=_NO_LIMIT)  # the limit is kept here
        self._supervisor = Supervisor(unlimited, self, step_timeout=step_timeout, runtime=runtime)
        self._replay = Replay()
        self._by_id: dict[str, Flight] = {}
        self._numbers = itertools.count()
        self._ends: deque[float] = deque(maxlen=_RECENT)  # when requests ended
        self._asked: list[asyncio.Future[None]] = []
        self._last_stats: EngineStats | None = None
        self._closed = False
        self._task = asyncio.ensure_future(self._supervise())
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loaded.add_done_callback(lambda future: future.exception())  # looked at, so asyncio does not complain

    async def loaded(self) -> None:
        """Waits until the model is loaded. Raises what loading raised."""
        await asyncio.shield(self._loaded)

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises `EngineClosed` before it is loaded."""
        if self._supervisor.info is None:
            raise EngineClosed("the model is not loaded")
        return self._supervisor.info

    def health(self) -> Health:
        """How the engine is now."""
        return Health(status="closed") if self._closed else self._supervisor.health

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._replay.flights)

    # --- requests -----------------------------------------------------------------------------------------------

    async def check(self, request: GenerationRequest) -> None:
        """Raises `InvalidRequest` for a request that `submit` would refuse."""
        await self._ask_worker(request, Check(0, request))

    async def tokenize(
        self, text: str | list[int], *, add_special: bool = True, parse_special: bool = True
    ) -> list[TokenPiece]:
        """As in `EngineClient`."""
        question = Tokenize(0, text, add_special, parse_special)
        answer = await self._ask_worker(GenerationRequest(id="", prompt=text), question)
        if not isinstance(answer, Tokenized):
            return []
        pieces = {token.id: token for token in answer.pieces}
        return [pieces[token] for token in answer.ids]

    async def _ask_worker(self, request: GenerationRequest, question: Check | Tokenize) -> Checked | Tokenized | None:
        flight = self._take_off(request, question)
        try:
            end = await flight.mailbox.get()
            if end.finish_reason is FinishReason.CANCELLED:
                raise EngineClosed("the engine was closed")
            if end.error:
                raise GenerationFailed(end.error)
            return flight.answer
        finally:
            self._land(flight)

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Runs a request, yielding its events; see `EngineClient.submit`."""
        if request.id in self._by_id:
            raise InvalidRequest("id", f"{request.id!r} is the id of a request that is still running")
        if self.in_flight >= self._most_flights:
            raise QueueFull(self.config.max_queue, self._seconds_per_request())
        flight = self._by_id[request.id] = self._take_off(request)
        try:
            ended = False
            while not ended:
                event = await flight.mailbox.get()
                ended = event.finish_reason is not None
                yield msgspec.structs.replace(event, request_id=request.id)
        finally:
            del self._by_id[request.id]
            self._land(flight)

    def _take_off(self, request: GenerationRequest, question: Check | Tokenize | None = None) -> Flight:
        if not self.health().takes_requests:
            raise EngineClosed(f"the engine takes no requests: it is {self.health().status}")
        if request.params.logits_processor is not None:
            message = "is a function of this process, and the engine is another one; use LocalEngine"
            raise InvalidRequest("logits_processor", message)
        flight = Flight(next(self._numbers), request, question)
        self._replay.add(flight)
        self._send_what_may_run()
        return flight

    def _land(self, flight: Flight) -> None:
        """Whoever wanted it has all, or has gone."""
        if flight.number in self._replay.flights:
            self._cancel(flight)
            self._replay.ended(flight)
            self._send_what_may_run()  # it may have been on trial

    async def cancel(self, request_id: str) -> None:
        """Ends a request within a step."""
        if flight := self._by_id.get(request_id):
            flight.cancelled = True
            if not self._cancel(flight):  # else the worker writes its last event
                self._end(flight, FinishReason.CANCELLED)

    def _cancel(self, flight: Flight) -> bool:
        """False when no worker knows of it."""
        worker = self._supervisor.worker
        if worker is None or not self._replay.is_sent(flight):
            return False
        worker.send(Cancel(flight.number))
        return True

    def _send_what_may_run(self) -> None:
        if worker := self._supervisor.worker:
            for flight in self._replay.to_send():
                try:
                    worker.send(flight.message())
                except UnicodeEncodeError as error:
                    self._fail(flight, InvalidRequest("prompt", f"has half of a surrogate pair: {error}"))
                except Exception as error:  # whatever is wrong with it, the others are to be sent
                    log.exception("a request cannot be sent to the worker")
                    message = f"the request cannot be sent to the engine ({type(error).__name__}: {error})"
                    self._fail(flight, GenerationFailed(message))

    def _fail(self, flight: Flight, error: Exception) -> None:
        self._replay.ended(flight)
        flight.mailbox.fail(error)

    def _seconds_per_request(self) -> float:
        """How soon one of those that wait has likely gone, from 1 to 60 s."""
        if len(self._ends) < 2:
            return 1.0
        return min(60.0, max(1.0, (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)))

    # --- what the supervisor tells ------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        try:
            await self._supervisor.run()
        except Exception as error:
            if self._loaded.done():  # only a bug gets here: nobody may wait for ever because of it
                log.exception("the supervision of the worker failed")
            self._supervisor.health = Health(status="failed", error=str(error))
            self._end_all(FinishReason.ERROR, f"{type(error).__name__}: {error}")
            if not self._loaded.done():
                self._loaded.set_exception(error)

    def worker_ready(self, stats: EngineStats) -> None:
        """Sends what waits for it."""
        self._last_stats = stats
        if not self._loaded.done():
            self._loaded.set_result(None)
        self._send_what_may_run()

    def worker_says(self, message: FromWorker) -> None:
        """Passes it on to whom it concerns."""
        if isinstance(message, Events):
            for event in message.events:
                self._take(event)
            self._send_what_may_run()
        elif isinstance(message, Stats):
            self._last_stats = message.stats
            self._answer()
        elif isinstance(message, Refused):
            if flight := self._replay.flights.get(message.number):
                self._fail(flight, InvalidRequest(message.field, message.message))
        elif isinstance(message, (Checked, Tokenized)) and (flight := self._replay.flights.get(message.number)):
            flight.answer = message
            self._end(flight, FinishReason.STOP)

    def _take(self, event: GenerationEvent) -> None:
        flight = self._replay.flights.get(int(event.request_id))
        if flight is None:  # its reader has gone
            return
        self._supervisor.made_progress()
        makes_way = self._replay.got_token(flight)
        if event.finish_reason:
            self._replay.ended(flight)
            self._ends.append(perf_counter())
        elif makes_way and not flight.cancelled:
            self._cancel(flight)
            self._replay.take_back(flight, next(self._numbers))
        flight.take(event)

    def worker_died(self, at_work: set[int], hopeless: str | None) -> None:
        """Fails whom it must; the others go on in the next worker."""
        for flight in self._replay.crashed(at_work):
            self._supervisor.made_progress()  # the next one should do better
            reason = f"the engine died {MOST_CRASHES} times in a row while it worked on this request"
            self._end(flight, FinishReason.ERROR, reason)
        for flight in [flight for flight in self._replay.flights.values() if flight.cancelled]:
            self._end(flight, FinishReason.CANCELLED)
        if hopeless:
            self._end_all(FinishReason.ERROR, hopeless)
        self._answer()

    def _end(self, flight: Flight, reason: FinishReason, error: str | None = None) -> None:
        """Writes its last event, in place of the worker."""
        self._replay.ended(flight)
        flight.mailbox.put(GenerationEvent(request_id=flight.request.id, finish_reason=reason, error=error))

    def _end_all(self, reason: FinishReason, error: str | None = None) -> None:
        for flight in list(self._replay.flights.values()):
            self._end(flight, reason, error)

    # --- looking at it, ending it -------------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        """Counters and state of the worker, as it last told. Raises `EngineClosed` before it ever did."""
        stats = None if self._closed else await self._ask()
        if stats is None:
            raise EngineClosed(f"the engine does not answer: it is {self.health().status}")
        return stats

    async def workers(self) -> list[WorkerState]:
        """This one alone."""
        stats = await self._ask()
        worker = self._supervisor.worker
        state = WorkerState(
            name=self.name,
            pid=worker.pid if worker else None,
            device=self.config.device,
            health=self.health(),
            in_flight=self.in_flight,
            restarts=self._supervisor.restarts,
            stats=stats,
        )
        return [state]

    async def _ask(self) -> EngineStats | None:
        """The worker's figures; the last ones while it is amid a long step or does not live."""
        if worker := self._supervisor.worker:
            answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._asked.append(answer)
            worker.send(AskStats())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(answer, _STATS_PATIENCE_S)
        return self._last_stats

    def _answer(self) -> None:
        for answer in self._asked:
            if not answer.done():
                answer.set_result(None)
        self._asked = []

    async def close(self) -> None:
        """Ends the worker at once; requests that still run get a last event (cancelled)."""
        self._closed = True
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._end_all(FinishReason.CANCELLED)
        if not self._loaded.done():
            self._loaded.set_exception(EngineClosed("the engine was closed while it loaded the model"))
