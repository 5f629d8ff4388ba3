"""Engines that get messages: unfinished requests, with their tokens so far, are kept by the client of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from time import perf_counter
from typing import ClassVar, Generic

from cppbatch.cluster.engines.client import EngineClient, OwnLoop, id_in_use
from cppbatch.cluster.engines.in_flight import InFlightRequests, Request
from cppbatch.cluster.engines.output_collector import OutputCollector
from cppbatch.cluster.link import Answer, Check, Question, Refused, SlotAction, SlotDone, Tokenize, Tokenized, Update
from cppbatch.config import EngineConfig
from cppbatch.engine.disk.slots import SlotActionName, SlotReport
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.request import (
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    MediaPrompt,
    ResumeState,
    TokenPiece,
)
from cppbatch.errors import EngineClosed, GenerationFailed, InvalidRequest, QueueFull

log = logging.getLogger("cppbatch.cluster")

_MAX_FINISH_TIMES = 64


class MessageEngine(EngineClient, Generic[Request]):
    """An `EngineClient` that sends its engine messages: to another thread or to other processes. Created and used
    inside a running event loop.

    A subclass sends requests (`_send`), cancels (`_send_cancel`) and questions (`ask`). It passes on what arrives with
    `_put`, `_refuse`, `_fail` or `_end`.
    """

    _other_process: ClassVar[str | None] = None
    """The process to which requests are sent, for error messages; None: they stay in this one."""

    def __init__(self, config: EngineConfig, in_flight: InFlightRequests[Request]) -> None:
        """Raises `ConfigError` outside an event loop."""
        self._own_loop = OwnLoop(type(self).__name__)
        self.config = config
        self._in_flight = in_flight
        self._by_id: dict[str, Request] = {}  # by the client's id; while the iterator of `submit` is open
        self._finish_times: deque[float] = deque(maxlen=_MAX_FINISH_TIMES)
        self._info: ModelInfo | None = None
        self._closed = False
        self._loaded: asyncio.Future[None] = self._own_loop.loop.create_future()
        self._loaded.add_done_callback(lambda future: future.exception())  # else asyncio warns if no caller awaits it

    async def loaded(self) -> None:
        self._own_loop.check()
        await asyncio.shield(self._loaded)

    @property
    def info(self) -> ModelInfo:
        if self._info is None:
            raise EngineClosed("the model is not loaded yet; use `async with`, or await `loaded()` first")
        return self._info

    @property
    def in_flight(self) -> int:
        """The number of unfinished requests."""
        return len(self._in_flight)

    # --- what is sent -------------------------------------------------------------------------------------------

    @abstractmethod
    def _send(self, request: Request) -> None:
        """Sends the request, or its question, to an engine, which continues after the tokens so far. Raises
        `UnicodeEncodeError` for text with an unpaired surrogate."""

    @abstractmethod
    def _send_cancel(self, request: Request) -> bool:
        """Tells the engine to cancel the request. Returns False if no engine has it."""

    @abstractmethod
    async def ask(self, question: Question) -> Answer:
        """Asks an engine, and another one if it ends before it has answered. Raises `InvalidRequest` for a refusal."""

    @property
    def _capacity(self) -> int:
        """The number of requests that are computed at the same time now."""
        return self.config.n_parallel

    def _send_requests(self) -> None:
        """Sends the requests that wait for it."""
        for request in self._in_flight.take_sendable():
            try:
                self._send(request)
            except UnicodeEncodeError as error:
                self._fail(request, unpaired_surrogate(error))
            except Exception as error:  # fails this request; the others are still sent
                log.exception("failed to send a request to the engine")
                message = f"the request cannot be sent to the engine ({type(error).__name__}: {error})"
                self._fail(request, GenerationFailed(message))

    # --- requests -----------------------------------------------------------------------------------------------

    async def check(self, request: GenerationRequest) -> None:
        await self.ask(Check(request))

    async def tokenize(
        self, text: str | list[int] | MediaPrompt, *, add_special: bool = True, parse_special: bool = True
    ) -> list[TokenPiece]:
        answer = await self.ask(Tokenize("", text, add_special, parse_special))
        assert isinstance(answer, Tokenized)
        pieces = {token.id: token for token in answer.pieces}
        return [pieces[token] for token in answer.ids]

    async def slot_action(self, action: SlotActionName, slot: int, path: str = "") -> SlotReport:
        answer = await self.ask(SlotAction("", action, slot, path))
        assert isinstance(answer, SlotDone)
        return answer.report

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        with self.open(request) as outputs:
            while not outputs.finished:
                yield await outputs.get()

    @contextlib.contextmanager
    def open(self, request: GenerationRequest, resume: ResumeState | None = None) -> Iterator[OutputCollector]:
        """Runs a request and reads its events in the context, at the end of which an unfinished request is cancelled.

        `resume`: its progress in another engine, which has died; the events continue after these tokens. Raises as the
        first step of `submit`; `OutputCollector.get` raises as later ones.
        """
        if request.id in self._by_id:
            raise id_in_use(request.id)
        if resume is None and self.in_flight >= self._capacity + self.config.max_queue:
            raise QueueFull(self.config.max_queue, self._seconds_per_request())
        submitted = self._by_id[request.id] = self._start(request, resume=resume)
        try:
            yield submitted.outputs
        finally:
            del self._by_id[request.id]
            self._release(submitted)

    def _check_usable(self, request: GenerationRequest | None) -> None:
        """Raises `EngineClosed` if no requests are accepted, and `InvalidRequest` for a function that another process
        would have to call."""
        if not (health := self.health()).takes_requests:
            raise EngineClosed(health.refusal)
        self._own_loop.check()
        if self._other_process and request and request.params.logits_processor is not None:
            message = f"is a Python function, which cannot be sent to {self._other_process}; use LocalEngine"
            raise InvalidRequest("logits_processor", message)

    def _start(
        self, request: GenerationRequest, question: Question | Update | None = None, resume: ResumeState | None = None
    ) -> Request:
        self._check_usable(request)
        started = self._in_flight.add(request, question, resume)
        self._send_requests()
        return started

    def _release(self, request: Request) -> None:
        """Called when the reader is done. Cancels the request if it is unfinished."""
        if request in self._in_flight:
            self._send_cancel(request)
            self._in_flight.remove(request)
            self._send_requests()  # the request may have been the suspect that ran alone

    async def cancel(self, request_id: str) -> None:
        self._own_loop.check()
        request = self._by_id.get(request_id)
        if request and request in self._in_flight:
            request.cancelled = True
            if not self._send_cancel(request):  # otherwise the engine sends the last event
                self._end(request, FinishReason.CANCELLED)

    def _seconds_per_request(self) -> float:
        """The mean time between the ends of recent requests, 1 to 60 s: an estimate for the next free slot."""
        if len(self._finish_times) < 2:
            return 1.0
        return min(60.0, max(1.0, (self._finish_times[-1] - self._finish_times[0]) / (len(self._finish_times) - 1)))

    # --- what arrives -------------------------------------------------------------------------------------------

    def _put(self, request: Request, event: GenerationEvent) -> None:
        """Passes on an event of a request, which ends with a finish reason."""
        if event.finish_reason:
            self._in_flight.remove(request)
            self._finish_times.append(perf_counter())
        request.put(event)

    def _refuse(self, request: Request, refused: Refused) -> None:
        """Passes on the refusal of a request."""
        if request.has_tokens:  # an earlier engine has accepted it, with more KV cells
            message = f"memory has run out, and the text cannot continue: {refused.error}"
            self._fail(request, GenerationFailed(message))
        else:
            self._fail(request, refused.error)

    def _fail(self, request: Request, error: Exception) -> None:
        """Ends a request with an error that its reader gets."""
        self._in_flight.remove(request)
        request.outputs.fail(error)

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Creates the last event on behalf of the engine."""
        self._in_flight.remove(request)
        request.outputs.put(GenerationEvent(request_id=request.id, finish_reason=reason, error=error))

    def _end_all(self, reason: FinishReason, error: str | None = None) -> None:
        for request in self._in_flight:
            self._end(request, reason, error)

    def _end_loading(self, error: BaseException | None = None) -> None:
        """Lets `loaded` return or raise, if the model was still being loaded."""
        if not self._loaded.done():
            if error:
                self._loaded.set_exception(error)
            else:
                self._loaded.set_result(None)

    def _end_open_calls(self) -> None:
        """Ends all requests, and `loaded`, for `close`."""
        self._end_all(FinishReason.CANCELLED)
        self._end_loading(EngineClosed("the engine was closed while loading the model"))


def unpaired_surrogate(error: UnicodeEncodeError) -> InvalidRequest:
    """The error for a text that cannot be sent."""
    return InvalidRequest("prompt", f"contains an unpaired surrogate: {error}")
