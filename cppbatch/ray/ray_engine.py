"""Many replicas of an engine behind one `EngineClient`. When a replica is lost, its requests continue in others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from time import perf_counter
from typing import Any

from cppbatch import errors
from cppbatch.cluster.engine_client import EngineClient, Health, WorkerState, id_in_use, running_loop
from cppbatch.cluster.prefix_router import prompt_prefixes
from cppbatch.cluster.worker_link import (
    Check,
    Question,
    Refused,
    SlotAction,
    SlotActionName,
    SlotDone,
    Tokenize,
    Tokenized,
)
from cppbatch.config import EngineConfig
from cppbatch.engine.metrics import EngineStats, add_up
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.params import replaced
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest, TokenPiece
from cppbatch.engine.slots import SlotReport
from cppbatch.errors import CppBatchError, EngineClosed, GenerationFailed, InvalidRequest, QueueFull
from cppbatch.ray.ray_messages import (
    Answer,
    GroupEvents,
    ReplicaReport,
    StreamOpened,
    Submission,
    decode_answer,
    decode_report,
    decode_to_front,
    encode,
)
from cppbatch.ray.replica_set import ReplicaLost, ReplicaSet, ReplicaSetStatus
from cppbatch.ray.sent_requests import SentGroup, SentGroups, SentRequest

log = logging.getLogger("cppbatch.ray")

_MAX_LOST = 5  # replicas in a row, without a token of the request in between, after which it fails
_PAUSE_S = 0.2  # before a request is sent again, times the number of lost replicas
_STATUS_PERIOD_S, _LOADING_PERIOD_S = 1.0, 0.25
_MAX_FINISH_TIMES = 64


class RayEngine(EngineClient):
    """An `EngineClient` over the replicas of a Ray Serve deployment. Created and used inside a running event loop.

    Requests and their tokens so far are kept in this process, so another replica can continue them.
    """

    def __init__(self, config: EngineConfig, replicas: ReplicaSet) -> None:
        """`config`: the settings of each replica; `max_queue` counts the requests that wait for any replica."""
        loop = running_loop("RayEngine")
        self.config = config
        self._replicas = replicas
        self._front = uuid.uuid4().hex[:8]
        self._n_epochs = 0  # a lost stream group has a hole: requests after that go into other groups
        self._n_sent = 0
        self._requests: dict[str, SentRequest] = {}  # unfinished, by `sent_as`
        self._by_id: dict[str, SentRequest] = {}  # by the client's id; while the iterator of `submit` is open
        self._groups = SentGroups()
        self._to_cancel: list[str] = []
        self._finish_times: deque[float] = deque(maxlen=_MAX_FINISH_TIMES)
        self._tasks: set[asyncio.Task[None]] = set()
        self._status = ReplicaSetStatus(status="starting")
        self._info: ModelInfo | None = None
        self._closed = False
        self._loaded: asyncio.Future[None] = loop.create_future()
        self._loaded.add_done_callback(lambda future: future.exception())  # else asyncio warns if no caller awaits it
        self._watching = asyncio.ensure_future(self._watch())

    async def loaded(self) -> None:
        """Waits until a replica has loaded the model. Raises what loading raised."""
        await asyncio.shield(self._loaded)

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises `EngineClosed` before it is loaded."""
        if self._info is None:
            raise EngineClosed("the model is not loaded")
        return self._info

    def health(self) -> Health:
        """ok while any replica runs; restarting while none does, after one did."""
        status = self._status
        if self._closed:
            return Health(status="closed")
        if status.status == "failed":
            return Health(status="failed", error=status.message)
        if self._info is None:
            return Health(status="loading", progress=status.progress, error=status.message)
        if status.status == "starting":
            return Health(status="restarting", progress=status.progress, error=status.message)
        return Health(status="ok", progress=1.0)

    # --- requests -----------------------------------------------------------------------------------------------

    async def check(self, request: GenerationRequest) -> None:
        """As in `EngineClient`."""
        self._refuse_functions(request)
        await self._ask(Check(0, request))

    async def tokenize(
        self, text: str | list[int], *, add_special: bool = True, parse_special: bool = True
    ) -> list[TokenPiece]:
        """As in `EngineClient`."""
        answer = await self._ask(Tokenize(0, text, add_special, parse_special))
        assert isinstance(answer, Tokenized)
        pieces = {token.id: token for token in answer.pieces}
        return [pieces[token] for token in answer.ids]

    async def slot_action(self, action: SlotActionName, slot: int, path: str = "") -> SlotReport:
        """As in `EngineClient`. Raises `InvalidRequest` if there are several replicas: each has slots of its own."""
        if self._status.n_wanted > 1:
            message = f"is of one of {self._status.n_wanted} replicas; slots can be saved with one replica only"
            raise InvalidRequest("id_slot", message)
        answer = await self._ask(SlotAction(0, action, slot, path))
        assert isinstance(answer, SlotDone)
        return answer.report

    async def _ask(self, question: Question) -> Answer:
        """Asks one replica, and another one if it is lost."""
        self._require_ready()
        try:
            message = encode(question)
        except UnicodeEncodeError as error:
            raise InvalidRequest("prompt", f"has half of a surrogate pair: {error}") from error
        for n_lost in range(1, _MAX_LOST + 1):
            try:
                answer = decode_answer(await self._replicas.ask(message))
            except ReplicaLost as error:
                why = str(error)
                await asyncio.sleep(n_lost * _PAUSE_S)
                continue
            if isinstance(answer, Refused):
                raise InvalidRequest(answer.field, answer.message, answer.overflow)
            return answer
        raise GenerationFailed(f"{_MAX_LOST} replicas in a row were lost, the last one: {why}")

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Runs a request, yielding its events; see `EngineClient.submit`."""
        if request.id in self._by_id:
            raise id_in_use(request.id)
        self._require_ready()
        self._refuse_functions(request)
        if len(self._requests) >= max(1, self._status.n_running) * self.config.n_parallel + self.config.max_queue:
            raise QueueFull(self.config.max_queue, self._seconds_per_request())
        submitted = self._by_id[request.id] = SentRequest(request)
        try:
            self._send(submitted)
            while not submitted.outputs.finished:
                yield await submitted.outputs.get()
        finally:
            del self._by_id[request.id]
            if submitted.sent_as in self._requests:
                self._remove(submitted)
                self._send_cancel(submitted)

    async def cancel(self, request_id: str) -> None:
        """Ends a request within a step."""
        if request := self._by_id.get(request_id):
            request.cancelled = True
            if request.group:
                self._send_cancel(request)  # the replica sends the last event
            elif request.sent_as in self._requests:
                self._end(request, FinishReason.CANCELLED)

    def _require_ready(self) -> None:
        if not self.health().takes_requests:
            raise EngineClosed(f"the engine takes no requests: it is {self.health().status}")

    @staticmethod
    def _refuse_functions(request: GenerationRequest) -> None:
        if request.params.logits_processor is not None:
            message = "is a function of this process, and the engine is another one; use LocalEngine"
            raise InvalidRequest("logits_processor", message)

    def _seconds_per_request(self) -> float:
        """The mean time between the ends of recent requests, from 1 to 60 s: an estimate for the next free slot."""
        times = self._finish_times
        return min(60.0, max(1.0, (times[-1] - times[0]) / (len(times) - 1))) if len(times) > 1 else 1.0

    # --- to and from the replicas -------------------------------------------------------------------------------

    def _send(self, request: SentRequest) -> None:
        """Sends the request to a replica, to be continued behind its tokens so far."""
        self._n_sent += 1
        request.sent_as = f"{self._front}-{self._n_sent}"
        front = f"{self._front}.{self._n_epochs}"
        try:
            message = encode(Submission(front, replaced(request.request, id=request.sent_as), request.resume_state()))
        except UnicodeEncodeError as error:
            request.outputs.fail(InvalidRequest("prompt", f"has half of a surrogate pair: {error}"))
            return
        self._requests[request.sent_as] = request
        self._start_task(self._read(request, request.sent_as, message))

    async def _read(self, request: SentRequest, sent_as: str, message: bytes) -> None:
        """Reads one stream to its end, even if its own request ends before: it may carry events of others."""
        prefixes = prompt_prefixes(request.request)
        group: SentGroup | None = None
        try:
            async with contextlib.aclosing(self._replicas.run(prefixes, message)) as messages:
                async for data in messages:
                    received = decode_to_front(data)
                    if isinstance(received, StreamOpened):
                        group = self._groups.get(received.group)
                        self._opened(request, sent_as, group)
                    elif group:
                        for in_order in group.in_order(received):
                            self._handle(in_order, group)
        except (ReplicaLost, asyncio.CancelledError) as error:  # Ray raises the second one for some lost calls
            if self._closed:
                raise
            if group:
                self._lose_group(group, str(error))
            elif sent_as in self._requests:
                self._send_again(request, str(error))
        except Exception as error:  # a bug: no reader waits forever
            log.exception("a request could not be run on the cluster")
            if sent_as in self._requests:
                self._end(request, FinishReason.ERROR, f"{type(error).__name__}: {error}")

    def _opened(self, request: SentRequest, sent_as: str, group: SentGroup) -> None:
        if sent_as not in self._requests:  # the request has ended meanwhile
            self._send_cancel_as(sent_as)
        elif group.is_lost:  # the request was on the way into the group
            self._remove(request)
            self._send_cancel_as(sent_as)
            self._send(request)
        else:
            request.group = group
            group.requests[sent_as] = request

    def _handle(self, message: GroupEvents, group: SentGroup) -> None:
        for event in message.events:
            if request := group.requests.get(event.request_id):
                if event.tokens:
                    request.n_crashes = 0
                if event.finish_reason:
                    self._remove(request)
                    self._finish_times.append(perf_counter())
                request.put(event)
        for invalid in message.not_valid:
            if request := group.requests.get(invalid.request_id):
                refused = invalid.refused
                self._remove(request)
                request.outputs.fail(InvalidRequest(refused.field, refused.message, refused.overflow))
        for not_run in message.not_run:
            if request := group.requests.get(not_run.request_id):
                self._send_again(request, not_run.why)

    def _remove(self, request: SentRequest) -> None:
        """Removes a request that has ended, or is sent again: events for it that still come are dropped."""
        del self._requests[request.sent_as]
        if request.group:
            del request.group.requests[request.sent_as]
            request.group = None

    def _lose_group(self, group: SentGroup, why: str) -> None:
        """A stream of the group broke. Continues its requests elsewhere, in groups without a hole."""
        if group.is_lost:
            return
        group.is_lost = True
        self._n_epochs += 1
        lost = list(group.requests.values())
        log.warning("a replica was lost (%s); its %d requests continue in other replicas", why, len(lost))
        for request in lost:
            self._send_cancel(request)  # in case that only the connection was lost
            self._send_again(request, why)

    def _send_again(self, request: SentRequest, why: str) -> None:
        self._remove(request)
        request.n_crashes += 1
        if request.cancelled:
            self._put_last_event(request, FinishReason.CANCELLED)
        elif request.n_crashes >= _MAX_LOST:
            error = f"{_MAX_LOST} replicas in a row were lost while they worked on this request, the last one: {why}"
            self._put_last_event(request, FinishReason.ERROR, error)
        else:
            self._send(request)

    def _end(self, request: SentRequest, reason: FinishReason, error: str | None = None) -> None:
        """Ends a request in place of a replica."""
        self._remove(request)
        self._put_last_event(request, reason, error)

    @staticmethod
    def _put_last_event(request: SentRequest, reason: FinishReason, error: str | None = None) -> None:
        request.outputs.put(GenerationEvent(request_id=request.sent_as, finish_reason=reason, error=error))

    def _send_cancel(self, request: SentRequest) -> None:
        self._send_cancel_as(request.sent_as)

    def _send_cancel_as(self, sent_as: str) -> None:
        self._to_cancel.append(sent_as)
        if len(self._to_cancel) == 1:
            self._start_task(self._cancel_all())

    async def _cancel_all(self) -> None:
        """Cancels, in one call, all requests that this turn of the event loop cancels."""
        await asyncio.sleep(0)
        request_ids, self._to_cancel = self._to_cancel, []
        await self._replicas.cancel(request_ids)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- state, closing -----------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Keeps the status, and `info` from the first replica that runs."""
        while True:
            try:
                self._status = await self._replicas.status()
                if self._status.status == "failed":
                    self._fail(self._status)
                elif self._info is None and self._status.status == "running":
                    self._info = next(iter(await self._reports())).info
                    self._loaded.set_result(None)
            except Exception as error:  # the cluster may be away for a while
                log.warning("the state of the replicas is not known: %s: %s", type(error).__name__, error)
            await asyncio.sleep(_STATUS_PERIOD_S if self._loaded.done() else _LOADING_PERIOD_S)

    def _fail(self, status: ReplicaSetStatus) -> None:
        error = status.message or "no replica runs"
        if not self._loaded.done():
            kind = getattr(errors, status.error_kind or "", CppBatchError)
            self._loaded.set_exception(kind(error))
        for request in list(self._requests.values()):
            self._end(request, FinishReason.ERROR, error)

    async def _reports(self) -> list[ReplicaReport]:
        reports = [decode_report(report) for report in await self._replicas.reports()]
        return sorted(reports, key=lambda report: report.replica)

    async def stats(self) -> EngineStats:
        """The sum over all replicas that answer. Raises `EngineClosed` if none does."""
        each = [worker.stats for worker in await self.workers() if worker.stats]
        if not each:
            raise EngineClosed(f"no replica answers: the engine is {self.health().status}")
        return add_up(each)

    async def workers(self) -> list[WorkerState]:
        """The state of the worker of each replica that answers."""
        if self._closed or self._info is None:
            return []
        return [worker for report in await self._reports() for worker in report.workers]

    async def close(self) -> None:
        """Ends all requests here and in the replicas, which go on running; the last events are `cancelled`."""
        self._closed = True
        self._watching.cancel()
        cancelled = list(self._requests.values())
        for request in cancelled:
            self._end(request, FinishReason.CANCELLED)
        if not self._loaded.done():
            self._loaded.set_exception(EngineClosed("the engine was closed while it loaded the model"))
        if cancelled:
            with contextlib.suppress(Exception):
                await self._replicas.cancel([request.sent_as for request in cancelled])
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(self._watching, *self._tasks, return_exceptions=True)
