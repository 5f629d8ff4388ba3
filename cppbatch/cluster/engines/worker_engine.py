"""Engines with one worker: on a thread of this process, or in a worker process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from cppbatch.cluster.engines.client import WorkerLive, WorkerState
from cppbatch.cluster.engines.in_flight import InFlightRequest, InFlightRequests
from cppbatch.cluster.engines.latest_state import LatestState
from cppbatch.cluster.engines.message_engine import MessageEngine
from cppbatch.cluster.link import (
    Answer,
    Cancel,
    Check,
    Checked,
    Events,
    FromWorker,
    GetLive,
    GetStats,
    Live,
    Question,
    Refused,
    SlotDone,
    Stats,
    Tokenize,
    Tokenized,
    ToWorker,
    Update,
    Updated,
)
from cppbatch.config import EngineConfig
from cppbatch.engine.observe.live_state import LiveEngine
from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.engine.params import token_ids
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest
from cppbatch.errors import EngineClosed, GenerationFailed

_STATS_TIMEOUT_S = 1.0


class RunningWorker(Protocol):
    """A worker that takes messages."""

    def send(self, message: ToWorker) -> None:
        """Sends a message; never waits."""


class WorkerEngine(MessageEngine[InFlightRequest]):
    """An `EngineClient` with one worker at a time, whose messages a subclass passes to `on_worker_message`."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises `ConfigError` outside an event loop."""
        super().__init__(config, InFlightRequests(InFlightRequest))
        self._stats = LatestState[EngineStats](_STATS_TIMEOUT_S)
        self._live = LatestState[LiveEngine]()

    @property
    @abstractmethod
    def _worker(self) -> RunningWorker | None:
        """The worker; None while there is none that takes messages."""

    @abstractmethod
    def _state(self, stats: EngineStats | None = None) -> WorkerState:
        """The state of the worker."""

    # --- requests -----------------------------------------------------------------------------------------------

    async def ask(self, question: Question | Update) -> Answer:
        """Sends the question as a request, with crash recovery: preparing a text can crash a worker."""
        if isinstance(question, Check):
            request = question.request
        else:
            request = GenerationRequest(id="", prompt=question.text if isinstance(question, Tokenize) else "")
        asked = self._start(request, question)
        try:
            end = await asked.outputs.get()
            if end.finish_reason is FinishReason.CANCELLED:
                raise EngineClosed("the engine was closed")
            if end.error:
                raise GenerationFailed(end.error)
            assert asked.answer
            return asked.answer
        finally:
            self._release(asked)

    async def update_request(self, request_id: str, tokens: Sequence[int]) -> bool:
        """Appends tokens to the text of a request, between two steps; see `BatchInferenceEngine.update_request`.

        If a worker process dies at this moment, the text may continue without the tokens.
        """
        request = self._by_id.get(request_id)
        if request is None or not self._in_flight.is_sent(request):
            return False
        answer = await self.ask(Update("", request.id, list(token_ids("tokens", tokens))))
        assert isinstance(answer, Updated)
        return answer.found

    def _send_cancel(self, request: InFlightRequest) -> bool:
        worker = self._worker
        if worker is None or not self._in_flight.is_sent(request):
            return False
        worker.send(Cancel(request.id))
        return True

    def _send_requests(self) -> None:
        if self._worker:
            super()._send_requests()

    def _send(self, request: InFlightRequest) -> None:
        assert self._worker
        self._worker.send(request.message())

    # --- what arrives -------------------------------------------------------------------------------------------

    def on_worker_message(self, message: FromWorker) -> None:
        """Passes a message to its request."""
        if isinstance(message, Events):
            for event in message.events:
                if request := self._in_flight.get(event.request_id):  # None: it has ended, or has another id now
                    self._handle_event(request, event)
            self._send_requests()
        elif isinstance(message, Stats):
            self._stats.received(message.stats)
        elif isinstance(message, Live):
            self._live.received(message.engine)
        elif isinstance(message, Refused):
            if request := self._in_flight.get(message.id):
                self._refuse(request, message)
        elif isinstance(message, (Checked, Tokenized, SlotDone, Updated)) and (
            request := self._in_flight.get(message.id)
        ):
            request.answer = message
            self._end(request, FinishReason.STOP)

    def _handle_event(self, request: InFlightRequest, event: GenerationEvent) -> None:
        self._put(request, event)

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def idle_seconds(self) -> float:
        """Seconds without requests; 0.0 while there are any."""
        return self._in_flight.idle_seconds

    async def stats(self) -> EngineStats:
        """The worker's counters and state, as last reported. Raises `EngineClosed` before the first report."""
        stats = None if self._closed else await self._fetch_stats()
        if stats is None:
            raise EngineClosed(f"the engine does not respond: it is {self.health().status}")
        return stats

    async def workers(self) -> list[WorkerState]:
        """The state of this one worker."""
        return [self._state(await self._fetch_stats())]

    async def _fetch_stats(self) -> EngineStats | None:
        """Asks the worker. Returns its previous report if it is in a long step or is not running."""
        self._own_loop.check()
        if worker := self._worker:
            await self._stats.get(partial(worker.send, GetStats()))
        return self._stats.last

    async def live(self) -> list[WorkerLive]:
        """The live state of this worker."""
        self._own_loop.check()
        engine = age = None
        if worker := self._worker:
            engine, age = await self._live.get(partial(worker.send, GetLive()), self.idle_seconds)
        state = self._state()  # the worker may have ended meanwhile
        return [state.live(None, None) if state.pid is None else state.live(engine, age)]
