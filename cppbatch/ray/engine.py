"""Many replicas of an engine behind one `EngineClient`. If a replica is lost, its requests continue in others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import uuid
from collections import OrderedDict
from collections.abc import Coroutine, Iterator
from typing import Any

import msgspec

from cppbatch import errors
from cppbatch.cluster.engines.client import Health, WorkerLive, WorkerState
from cppbatch.cluster.engines.in_flight import InFlightRequest, InFlightRequests
from cppbatch.cluster.engines.latest_state import LatestState
from cppbatch.cluster.engines.message_engine import MessageEngine, unpaired_surrogate
from cppbatch.cluster.link import Answer, Check, Question, Refused
from cppbatch.cluster.prefix_router import prompt_prefixes
from cppbatch.config import EngineConfig
from cppbatch.engine.disk.slots import SlotActionName, SlotReport
from cppbatch.engine.observe.metrics import EngineStats, add_up
from cppbatch.engine.request import FinishReason
from cppbatch.errors import CppBatchError, EngineClosed, GenerationFailed, InvalidRequest
from cppbatch.ray.messages import (
    GroupEvents,
    ReplicaReport,
    StreamOpened,
    Submission,
    decode_answer,
    decode_live,
    decode_report,
    decode_to_front,
    encode,
)
from cppbatch.ray.replica.set import LEASE_PERIOD_S, ReplicaLost, ReplicaSet, ReplicaSetStatus

log = logging.getLogger("cppbatch.ray")

_MAX_LOST = 5  # consecutive lost replicas, without a token in between, after which a request fails
_STATUS_PERIOD_S, _LOADING_PERIOD_S = 1.0, 0.25
_IDLE_PERIOD_S = 1.0  # between two questions about the live state while no replica has a request known here
_MAX_GROUPS = 4096  # more than the replicas of a cluster


class SentRequest(InFlightRequest):
    """An unfinished request of a front. It gets a new `id` each time it is sent."""

    group: SentGroup | None = None
    """The group that carries its events; None until a replica runs it."""


class RayEngine(MessageEngine[SentRequest]):
    """An `EngineClient` over the replicas of a Ray Serve deployment. Created and used inside a running event loop.

    Requests and their tokens so far are kept in this process, so another replica can continue them.
    """

    _other_process = "the replicas"

    def __init__(self, config: EngineConfig, replicas: ReplicaSet) -> None:
        """`config`: the settings of each replica; `max_queue` counts requests waiting for any replica."""
        self._front = uuid.uuid4().hex[:8]
        super().__init__(config, InFlightRequests(SentRequest, f"{self._front}-"))
        self._replicas = replicas
        self._epoch = 0  # a lost stream group has a gap: later requests use other groups
        self._groups: OrderedDict[str, SentGroup] = OrderedDict()  # by name; the most recently used is the last
        self._live = LatestState[list[WorkerLive]]()
        self._to_cancel: list[tuple[str, SentGroup]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._status = ReplicaSetStatus(status="starting")
        self._has_more = False  # whether there are more replicas than at the previous check
        self._background = [asyncio.ensure_future(work) for work in (self._watch(), self._renew_lease())]

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

    async def slot_action(self, action: SlotActionName, slot: int, path: str = "") -> SlotReport:
        """Asks the replica. Raises `InvalidRequest` with several replicas, because each has its own slots."""
        if self._status.n_wanted > 1:
            message = f"belongs to one of {self._status.n_wanted} replicas; saving slots requires a single replica"
            raise InvalidRequest("id_slot", message)
        return await super().slot_action(action, slot, path)

    async def ask(self, question: Question) -> Answer:
        self._check_usable(question.request if isinstance(question, Check) else None)
        try:
            message = encode(question)
        except UnicodeEncodeError as error:
            raise unpaired_surrogate(error) from error
        for n_lost in range(1, _MAX_LOST + 1):
            try:
                answer = decode_answer(await self._replicas.ask(message))
            except ReplicaLost as error:
                why = str(error)
                await asyncio.sleep(n_lost * 0.2)
                continue
            if isinstance(answer, Refused):
                raise answer.error
            return answer
        raise GenerationFailed(f"lost {_MAX_LOST} replicas in a row; the last one: {why}")

    @property
    def _capacity(self) -> int:
        return max(1, self._status.n_running) * self.config.n_parallel

    # --- to and from the replicas -------------------------------------------------------------------------------

    def _send(self, request: SentRequest) -> None:
        message = encode(Submission(self._front, self._epoch, request.request, request.resume_state()))
        self._start_task(self._read(SentStream(request), message))

    def _send_cancel(self, request: SentRequest) -> bool:
        if not request.group:
            return False
        self._cancel_in(request.group, request.id)
        return True

    async def _read(self, stream: SentStream, message: bytes) -> None:
        """Reads one stream to its end, even if its own request ends earlier: it may carry events of other requests."""
        try:
            await self._follow(stream, message)
        except (ReplicaLost, asyncio.CancelledError) as error:  # Ray raises CancelledError for some lost calls
            if self._closed:
                raise
            if stream.group:
                self._lose_group(stream.group, str(error))
            elif self._in_flight.get(stream.sent_as):
                self._send_again(stream.request, str(error))
        except Exception as error:  # a bug; the reader must not wait forever
            log.exception("failed to run a request on the cluster")
            if self._in_flight.get(stream.sent_as):
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
                    self._opened(stream, received)
                elif stream.group:
                    for in_order in stream.group.in_order(received):
                        self._handle(in_order, stream.group)
                if stream.group and stream.group.is_lost:
                    return  # closes the stream

    def _opened(self, stream: SentStream, opened: StreamOpened) -> None:
        group = self._groups.setdefault(opened.group, SentGroup(opened.replica))
        self._groups.move_to_end(opened.group)
        if len(self._groups) > _MAX_GROUPS:  # one without open streams is kept: its next message may be on the way
            self._groups.popitem(last=False)
        task = asyncio.current_task()
        assert task
        stream.group, group.streams[stream.sent_as] = group, task
        if request := self._request_in(group, stream.sent_as):
            if group.is_lost:  # the request was on the way to this group
                self._move(request)
        elif not group.is_lost:  # the request has ended since it was sent
            self._cancel_in(group, stream.sent_as)

    def _request_in(self, group: SentGroup, sent_as: str) -> SentRequest | None:
        """The request of a replica's message; None if it has ended here. The first events of a request may overtake the
        message that opens its stream."""
        request = self._in_flight.get(sent_as)
        if request:
            request.group = group
        return request

    def _handle(self, message: GroupEvents, group: SentGroup) -> None:
        for event in message.events:
            if request := self._request_in(group, event.request_id):
                if event.tokens:
                    request.n_crashes = 0
                self._put(request, event)
        for refused in message.not_valid:
            if request := self._request_in(group, refused.id):
                self._refuse(request, refused)
        for not_run in message.not_run:
            if request := self._request_in(group, not_run.request_id):
                self._send_again(request, not_run.why)

    def _move(self, request: SentRequest) -> None:
        """Sends the request under a new id; later events for the old one are dropped."""
        request.group = None
        self._in_flight.requeue(request)
        self._send_requests()

    def _requests_of(self, group: SentGroup) -> list[SentRequest]:
        return [request for request in self._in_flight if request.group is group]

    def _lose_group(self, group: SentGroup, why: str) -> None:
        """Handles a broken stream of the group: continues its requests elsewhere, in groups without a gap, and closes
        its other streams, which ends the requests in the replica if it still exists."""
        if group.is_lost:
            return
        group.is_lost = True
        self._epoch += 1
        lost = self._requests_of(group)
        if lost:
            log.warning("lost a replica (%s); requests that continue in other replicas: %d", why, len(lost))
        for request in lost:
            self._send_again(request, why)
        for task in group.streams.values():
            if task is not asyncio.current_task():
                task.cancel()

    def _send_again(self, request: SentRequest, why: str) -> None:
        request.n_crashes += 1
        if request.cancelled:
            self._end(request, FinishReason.CANCELLED)
        elif request.n_crashes >= _MAX_LOST:
            error = f"lost {_MAX_LOST} replicas in a row while processing this request; the last one: {why}"
            self._end(request, FinishReason.ERROR, error)
        else:
            self._move(request)

    def _cancel_in(self, group: SentGroup, sent_as: str) -> None:
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
            self._fail_all(self._status)
        elif self._info is None and self._status.status == "running" and (reports := await self._reports()):
            self._info = reports[0].info
            self._end_loading()

    def _spread(self) -> None:
        """Resends requests that wait in replicas' queues, so that new replicas get their share."""
        share = math.ceil(len(self._in_flight) / max(1, self._status.n_running))
        for group in {request.group for request in self._in_flight if request.group}:
            requests = self._requests_of(group)
            n_more = len(requests) - max(share, self.config.n_parallel)
            waiting = [each for each in requests if not each.has_tokens and not each.cancelled]
            for request in waiting[-n_more:] if n_more > 0 else ():
                self._send_cancel(request)
                self._move(request)

    def _fail_all(self, status: ReplicaSetStatus) -> None:
        error = status.message or "no replica is running"
        self._end_loading(getattr(errors, status.error_kind or "", CppBatchError)(error))
        self._end_all(FinishReason.ERROR, error)

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
        self._own_loop.check()
        if self._closed or self._info is None:
            return []
        return [worker for report in await self._reports() for worker in report.workers]

    async def live(self) -> list[WorkerLive]:
        """The live state of the worker of each responding replica."""
        self._own_loop.check()
        if self._closed or self._info is None:
            return []
        is_busy = self._in_flight or any(state.in_flight for state in self._live.last or ())
        states, since = await self._live.get(self._ask_live, 0.0 if is_busy else _IDLE_PERIOD_S)
        return [
            state if state.age is None else msgspec.structs.replace(state, age=round(state.age + (since or 0.0), 3))
            for state in states or ()
        ]

    def _ask_live(self) -> None:
        self._start_task(self._receive_live())

    async def _receive_live(self) -> None:
        try:
            states = [state for data in await self._replicas.live() for state in decode_live(data)]
        except Exception as error:  # `_watch` reports that the cluster does not respond
            log.debug("could not get the state of the replicas: %s", error)
            states = []
        self._live.received(sorted(states, key=lambda state: state.name))

    async def close(self) -> None:
        """Ends all requests here and in the replicas, with `cancelled` as the last event. The replicas keep running."""
        self._closed = True
        self._end_open_calls()
        tasks = [*self._background, *self._tasks]
        for task in tasks:
            task.cancel()  # closes the streams, which ends the requests in the replicas
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._replicas.close(self._front)


# --- stream groups ----------------------------------------------------------------------------------------------------
# The front's side of its open streams: puts the messages of each stream group in order.


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
