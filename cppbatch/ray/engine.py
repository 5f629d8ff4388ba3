"""Many replicas of an engine behind one `EngineClient`. If a replica is lost, its requests continue in others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Coroutine, Iterator
from time import perf_counter
from typing import Any

import msgspec

from cppbatch import errors
from cppbatch.cluster.engines.client import EngineClient, Health, OwnLoop, WorkerLive, WorkerState, id_in_use
from cppbatch.cluster.engines.in_flight import InFlightRequest
from cppbatch.cluster.link import (
    Check,
    Question,
    Refused,
    SlotAction,
    SlotDone,
    Tokenize,
    Tokenized,
)
from cppbatch.cluster.prefix_router import prompt_prefixes
from cppbatch.config import EngineConfig
from cppbatch.engine.disk.slots import SlotActionName, SlotReport
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.observe.metrics import EngineStats, add_up
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest, MediaPrompt, TokenPiece
from cppbatch.errors import CppBatchError, EngineClosed, GenerationFailed, InvalidRequest, QueueFull
from cppbatch.ray.messages import (
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
from cppbatch.ray.replica.set import LEASE_PERIOD_S, LiveReplicas, ReplicaLost, ReplicaSet, ReplicaSetStatus

log = logging.getLogger("cppbatch.ray")

_MAX_LOST = 5  # consecutive lost replicas, without a token in between, after which a request fails
_STATUS_PERIOD_S, _LOADING_PERIOD_S = 1.0, 0.25


class RayEngine(EngineClient):
    """An `EngineClient` over the replicas of a Ray Serve deployment. Created and used inside a running event loop.

    Requests and their tokens so far are kept in this process, so another replica can continue them.
    """

    def __init__(self, config: EngineConfig, replicas: ReplicaSet) -> None:
        """`config`: the settings of each replica; `max_queue` counts requests waiting for any replica."""
        self._own_loop = OwnLoop("RayEngine")
        self.config = config
        self._replicas = replicas
        self._front = uuid.uuid4().hex[:8]
        self._epoch = 0  # a lost stream group has a gap: later requests use other groups
        self._n_sent = 0
        self._requests: dict[str, SentRequest] = {}  # unfinished, by their ids in the replicas
        self._by_id: dict[str, SentRequest] = {}  # by the client's id, while the iterator of `submit` is open
        self._groups = SentGroups()
        self._live = LiveReplicas(replicas)
        self._to_cancel: list[tuple[str, SentGroup]] = []
        self._finish_times: deque[float] = deque(maxlen=64)
        self._tasks: set[asyncio.Task[None]] = set()
        self._status = ReplicaSetStatus(status="starting")
        self._has_more = False  # whether there are more replicas than at the previous check
        self._info: ModelInfo | None = None
        self._closed = False
        self._loaded: asyncio.Future[None] = self._own_loop.loop.create_future()
        self._loaded.add_done_callback(lambda future: future.exception())  # else asyncio warns if no caller awaits it
        self._background = [asyncio.ensure_future(work) for work in (self._watch(), self._renew_lease())]

    async def loaded(self) -> None:
        """Waits until a replica has loaded the model. Raises the errors of loading."""
        await asyncio.shield(self._loaded)

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises `EngineClosed` before it is loaded."""
        if self._info is None:
            raise EngineClosed("the model is not loaded yet; use `async with`, or await `loaded()` first")
        return self._info

    def health(self) -> Health:
        """`ok` while any replica is running; `restarting` if none is running but one was before."""
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
        """Asks a replica. Refuses functions, which cannot be sent there."""
        self._refuse_functions(request)
        await self._ask(Check(request))

    async def tokenize(
        self, text: str | list[int] | MediaPrompt, *, add_special: bool = True, parse_special: bool = True
    ) -> list[TokenPiece]:
        answer = await self._ask(Tokenize("", text, add_special, parse_special))
        assert isinstance(answer, Tokenized)
        pieces = {token.id: token for token in answer.pieces}
        return [pieces[token] for token in answer.ids]

    async def slot_action(self, action: SlotActionName, slot: int, path: str = "") -> SlotReport:
        """Asks the replica. Raises `InvalidRequest` with several replicas, because each has its own slots."""
        if self._status.n_wanted > 1:
            message = f"belongs to one of {self._status.n_wanted} replicas; saving slots requires a single replica"
            raise InvalidRequest("id_slot", message)
        answer = await self._ask(SlotAction("", action, slot, path))
        assert isinstance(answer, SlotDone)
        return answer.report

    async def _ask(self, question: Question) -> Answer:
        """Asks a replica, and another one if it is lost."""
        self._require_ready()
        try:
            message = encode(question)
        except UnicodeEncodeError as error:
            raise InvalidRequest("prompt", f"contains an unpaired surrogate: {error}") from error
        for n_lost in range(1, _MAX_LOST + 1):
            try:
                answer = decode_answer(await self._replicas.ask(message))
            except ReplicaLost as error:
                why = str(error)
                await asyncio.sleep(n_lost * 0.2)
                continue
            if isinstance(answer, Refused):
                raise InvalidRequest(answer.field, answer.message, answer.overflow)
            return answer
        raise GenerationFailed(f"lost {_MAX_LOST} replicas in a row; the last one: {why}")

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
            if submitted.id in self._requests:
                self._abandon(submitted)

    async def cancel(self, request_id: str) -> None:
        """Ends a request within a step."""
        if request := self._by_id.get(request_id):
            request.cancelled = True
            if request.group:
                self._send_cancel(request.id, request.group)  # the replica sends the last event
            elif request.id in self._requests:
                self._end(request, FinishReason.CANCELLED)

    def _require_ready(self) -> None:
        if not (health := self.health()).takes_requests:
            raise EngineClosed(health.refusal)
        self._own_loop.check()

    @staticmethod
    def _refuse_functions(request: GenerationRequest) -> None:
        if request.params.logits_processor is not None:
            message = "is a Python function, which cannot be sent to the replicas; use LocalEngine"
            raise InvalidRequest("logits_processor", message)

    def _seconds_per_request(self) -> float:
        """The mean time between the ends of recent requests, 1 to 60 s: estimates the time until a slot is free."""
        times = self._finish_times
        return min(60.0, max(1.0, (times[-1] - times[0]) / (len(times) - 1))) if len(times) > 1 else 1.0

    # --- to and from the replicas -------------------------------------------------------------------------------

    def _send(self, request: SentRequest) -> None:
        """Sends the request to a replica, which continues after its tokens so far."""
        self._n_sent += 1
        request.send_as(f"{self._front}-{self._n_sent}")
        try:
            message = encode(Submission(self._front, self._epoch, request.request, request.resume_state()))
        except UnicodeEncodeError as error:
            request.outputs.fail(InvalidRequest("prompt", f"contains an unpaired surrogate: {error}"))
            return
        self._requests[request.id] = request
        self._start_task(self._read(SentStream(request), message))

    async def _read(self, stream: SentStream, message: bytes) -> None:
        """Reads one stream to its end, even if its own request ends earlier: it may carry events of other requests."""
        try:
            await self._follow(stream, message)
        except (ReplicaLost, asyncio.CancelledError) as error:  # Ray raises CancelledError for some lost calls
            if self._closed:
                raise
            if stream.group:
                self._lose_group(stream.group, str(error))
            elif stream.sent_as in self._requests:
                self._send_again(stream.request, str(error))
        except Exception as error:  # a bug; the reader must not wait forever
            log.exception("failed to run a request on the cluster")
            if stream.sent_as in self._requests:
                self._end(stream.request, FinishReason.ERROR, f"{type(error).__name__}: {error}")
        finally:
            if stream.group:
                stream.group.streams.pop(stream.sent_as, None)

    async def _follow(self, stream: SentStream, message: bytes) -> None:
        prefixes = prompt_prefixes(stream.request.request)
        async with contextlib.aclosing(self._replicas.run(prefixes, message)) as messages:
            async for data in messages:
                received = decode_to_front(data)
                if isinstance(received, StreamOpened):
                    self._opened(stream, self._groups.get(received.group, received.replica))
                elif stream.group:
                    for in_order in stream.group.in_order(received):
                        self._handle(in_order, stream.group)
                if stream.group and stream.group.is_lost:
                    return  # closes the stream

    def _opened(self, stream: SentStream, group: SentGroup) -> None:
        task = asyncio.current_task()
        assert task
        stream.group, group.streams[stream.sent_as] = group, task
        if request := self._request_in(group, stream.sent_as):
            if group.is_lost:  # the request was on the way to this group
                self._remove(request)
                self._send(request)
        elif not group.is_lost:  # the request has ended since it was sent
            self._send_cancel(stream.sent_as, group)

    def _request_in(self, group: SentGroup, sent_as: str) -> SentRequest | None:
        """The request of a replica's message; None if it has ended here. The first events of a request may overtake the
        message that opens its stream."""
        request = self._requests.get(sent_as)
        if request and not request.group:
            request.group = group
            group.requests[sent_as] = request
        return request

    def _handle(self, message: GroupEvents, group: SentGroup) -> None:
        for event in message.events:
            if request := self._request_in(group, event.request_id):
                if event.tokens:
                    request.n_crashes = 0
                if event.finish_reason:
                    self._remove(request)
                    self._finish_times.append(perf_counter())
                request.put(event)
        for refused in message.not_valid:
            if request := self._request_in(group, refused.id):
                self._remove(request)
                request.outputs.fail(InvalidRequest(refused.field, refused.message, refused.overflow))
        for not_run in message.not_run:
            if request := self._request_in(group, not_run.request_id):
                self._send_again(request, not_run.why)

    def _remove(self, request: SentRequest) -> None:
        """Removes a request that has ended or is resent; later events for it are dropped."""
        del self._requests[request.id]
        if request.group:
            del request.group.requests[request.id]
            request.group = None

    def _abandon(self, request: SentRequest) -> None:
        """Removes a request, and cancels it in its replica."""
        group = request.group
        self._remove(request)
        if group:
            self._send_cancel(request.id, group)

    def _lose_group(self, group: SentGroup, why: str) -> None:
        """Handles a broken stream of the group: continues its requests elsewhere, in groups without a gap, and closes
        its other streams, which ends the requests in the replica if it still exists."""
        if group.is_lost:
            return
        group.is_lost = True
        self._epoch += 1
        lost = list(group.requests.values())
        if lost:
            log.warning("lost a replica (%s); requests that continue in other replicas: %d", why, len(lost))
        for request in lost:
            self._send_again(request, why)
        for task in group.streams.values():
            if task is not asyncio.current_task():
                task.cancel()

    def _send_again(self, request: SentRequest, why: str) -> None:
        self._remove(request)
        request.n_crashes += 1
        if request.cancelled:
            self._put_last_event(request, FinishReason.CANCELLED)
        elif request.n_crashes >= _MAX_LOST:
            error = f"lost {_MAX_LOST} replicas in a row while processing this request; the last one: {why}"
            self._put_last_event(request, FinishReason.ERROR, error)
        else:
            self._send(request)

    def _end(self, request: SentRequest, reason: FinishReason, error: str | None = None) -> None:
        """Ends a request on behalf of a replica."""
        self._remove(request)
        self._put_last_event(request, reason, error)

    @staticmethod
    def _put_last_event(request: SentRequest, reason: FinishReason, error: str | None = None) -> None:
        request.outputs.put(GenerationEvent(request_id=request.id, finish_reason=reason, error=error))

    def _send_cancel(self, sent_as: str, group: SentGroup) -> None:
        self._to_cancel.append((sent_as, group))
        if len(self._to_cancel) == 1:
            self._start_task(self._cancel_all())

    async def _cancel_all(self) -> None:
        """Sends one call for all requests cancelled in this iteration of the event loop.

        Serve does not pass the call to draining replicas. Their groups are abandoned: closing the streams ends all
        requests there, and requests that were not cancelled continue elsewhere.
        """
        await asyncio.sleep(0)
        cancelled, self._to_cancel = self._to_cancel, []
        try:
            reached = await self._replicas.cancel([sent_as for sent_as, _ in cancelled])
        except Exception:
            log.exception("failed to cancel requests; closing their streams")
            reached = set()
        for sent_as, group in cancelled:
            if group.replica not in reached and sent_as in group.streams:
                self._lose_group(group, "it is draining")

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- state, closing -----------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Polls the status, and gets `info` from the first running replica."""
        while True:
            n_before, has_more = self._status.n_running, self._has_more
            try:
                await self._update_status()
            except Exception as error:
                why = f"the Ray cluster does not respond ({type(error).__name__}: {error})"
                if self._status.message != why:
                    log.warning("%s", why)
                self._status = msgspec.structs.replace(self._status, status="starting", message=why)
            self._has_more = self._status.n_running > n_before > 0
            if has_more:  # at the previous check, so Serve's router now knows the new replicas
                self._spread()
            await asyncio.sleep(_STATUS_PERIOD_S if self._loaded.done() else _LOADING_PERIOD_S)

    async def _renew_lease(self) -> None:
        """Tells the replicas that this front is still running; otherwise they end its requests."""
        while True:
            try:
                await self._replicas.renew_lease(self._front)
            except Exception as error:  # `_watch` reports that the cluster does not respond
                log.debug("failed to renew the lease: %s", error)
            await asyncio.sleep(LEASE_PERIOD_S)

    async def _update_status(self) -> None:
        self._status = await self._replicas.status()
        if self._status.status == "failed":
            self._fail(self._status)
        elif self._info is None and self._status.status == "running" and (reports := await self._reports()):
            self._info = reports[0].info
            self._loaded.set_result(None)

    def _spread(self) -> None:
        """Resends requests that wait in replicas' queues, so that new replicas get their share."""
        share = math.ceil(len(self._requests) / max(1, self._status.n_running))
        for group in self._groups:
            n_more = len(group.requests) - max(share, self.config.n_parallel)
            waiting = [each for each in group.requests.values() if not each.has_tokens and not each.cancelled]
            for request in waiting[-n_more:] if n_more > 0 else ():
                self._abandon(request)
                self._send(request)

    def _fail(self, status: ReplicaSetStatus) -> None:
        error = status.message or "no replica is running"
        if not self._loaded.done():
            kind = getattr(errors, status.error_kind or "", CppBatchError)
            self._loaded.set_exception(kind(error))
        for request in list(self._requests.values()):
            self._end(request, FinishReason.ERROR, error)

    async def _reports(self) -> list[ReplicaReport]:
        reports = [decode_report(report) for report in await self._replicas.reports()]
        return sorted(reports, key=lambda report: report.replica)

    async def stats(self) -> EngineStats:
        """The sum over all responding replicas. Raises `EngineClosed` if none responds."""
        each = [worker.stats for worker in await self.workers() if worker.stats]
        if not each:
            raise EngineClosed(f"no replica responds: the engine is {self.health().status}")
        return add_up(each)

    async def workers(self) -> list[WorkerState]:
        """The state of the worker of each responding replica."""
        if self._closed or self._info is None:
            return []
        return [worker for report in await self._reports() for worker in report.workers]

    async def live(self) -> list[WorkerLive]:
        """The live state of the worker of each responding replica."""
        return [] if self._closed or self._info is None else await self._live.get(idle=not self._requests)

    async def close(self) -> None:
        """Ends all requests here and in the replicas, with `cancelled` as the last event. The replicas keep running."""
        self._closed = True
        for request in list(self._requests.values()):
            self._end(request, FinishReason.CANCELLED)
        if not self._loaded.done():
            self._loaded.set_exception(EngineClosed("the engine was closed while loading the model"))
        tasks = [*self._background, *self._tasks]
        for task in tasks:
            task.cancel()  # closes the streams, which ends the requests in the replicas
        await asyncio.gather(*tasks, self._live.close(), return_exceptions=True)
        await self._replicas.close(self._front)


# --- sent requests ----------------------------------------------------------------------------------------------------
# The requests of this front that run in replicas: puts the messages of each stream group in order, and tracks which
# requests are lost with a replica.


class SentRequest(InFlightRequest):
    """An unfinished request of a front. It gets a new `id` each time it is sent."""

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__("", request)
        self.group: SentGroup | None = None
        """The group that carries its events; None until a replica runs it."""


class SentStream:
    """The stream of a sent request. The request may be resent before the stream has ended."""

    def __init__(self, request: SentRequest) -> None:
        self.request = request
        self.sent_as = request.id
        self.group: SentGroup | None = None
        """None until the replica has opened the stream."""


class SentGroup:
    """The front's side of a stream group. A broken stream may lose messages: then the group has a gap, and its later
    messages must not be used."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.is_lost = False
        self.streams: dict[str, asyncio.Task[None]] = {}
        """The tasks that read the open streams, by the id of the stream's request."""
        self.requests: dict[str, SentRequest] = {}
        """The unfinished requests of the group, by their id in the replica."""
        self._n_received = 0
        self._early: dict[int, GroupEvents] = {}  # messages that overtook one on the stream of an earlier carrier

    def in_order(self, message: GroupEvents) -> Iterator[GroupEvents]:
        """Yields this message and those that waited for it; nothing if it must wait for another one. Raises
        `ReplicaLost` for a repeated number: the replica has recreated the group."""
        if message.number < self._n_received:
            raise ReplicaLost("it has lost the requests")
        self._early[message.number] = message
        while not self.is_lost and (following := self._early.pop(self._n_received, None)):
            self._n_received += 1
            yield following


class SentGroups:
    """The stream groups by name. A group without open streams is kept: its next message may already be on the way."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, SentGroup] = OrderedDict()

    def __iter__(self) -> Iterator[SentGroup]:
        """Iterates over a copy."""
        return iter(list(self._groups.values()))

    def get(self, name: str, replica: str) -> SentGroup:
        """The group of this name."""
        group = self._groups.setdefault(name, SentGroup(replica))
        self._groups.move_to_end(name)
        while len(self._groups) > 4096:  # more than a cluster has replicas
            self._groups.popitem(last=False)
        return group
