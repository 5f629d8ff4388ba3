"""Autoscaled workers: started while requests wait, drained and stopped when fewer suffice."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from time import monotonic

from cppbatch.cluster.engines.client import ScalingState
from cppbatch.cluster.engines.group import EngineGroup
from cppbatch.cluster.engines.process import EngineProcess, Withdrawn
from cppbatch.cluster.rules import Load, ScalingRule
from cppbatch.config import available_threads
from cppbatch.engine.observe.metrics import EngineStats, add_up
from cppbatch.engine.request import FinishReason, GenerationEvent, GenerationRequest, ResumeState
from cppbatch.errors import CppBatchError, EngineClosed

log = logging.getLogger("cppbatch.scaling")


StartWorker = Callable[[int], EngineProcess]
"""Starts the worker with this number, which starts loading the model."""
MemoryShortage = Callable[[int], Awaitable[str | None]]
"""Why the worker with this number does not fit into free memory; None: it fits."""


class AutoscaledGroup(EngineGroup):
    """An `EngineGroup` whose workers are started and drained by a `ScalingRule`.

    Workers are numbered from 0; the one with the highest number is drained first. Once a worker has loaded the model,
    it gets requests, and requests waiting elsewhere move to it, to balance their numbers. A draining worker gets no new
    requests; it stops after its last request, or gets requests again if the load returns before that.
    """

    def __init__(
        self, start_worker: StartWorker, rule: ScalingRule, *, shortage: MemoryShortage, interval: float = 0.5
    ) -> None:
        """`interval`: seconds between two checks of the load."""
        super().__init__([start_worker(i) for i in range(rule.min_workers)])
        self._start_worker = start_worker
        self._rule = rule
        self._shortage = shortage
        self._starting: EngineProcess | None = None
        self._draining: list[EngineProcess] = []
        self._closing: set[asyncio.Future[None]] = set()
        self._without_output: dict[str, GenerationRequest] = {}  # oldest first
        self._arrived_at: dict[str, float] = {}  # of these requests
        self._moving: dict[str, bool] = {}  # taken from a worker, not assigned yet; whether it was cancelled meanwhile
        self._scale_ups = self._scale_downs = 0
        self._held_back: str | None = None
        self._task = asyncio.ensure_future(_follow_load(weakref.ref(self), list(self._engines), interval))

    # --- the interface ----------------------------------------------------------------------------------------------

    def _all_engines(self) -> list[EngineProcess]:
        starting = [self._starting] if self._starting else []
        return [*self._engines, *starting, *self._draining]

    @property
    def max_parallel(self) -> int:
        """Maximum requests computed at the same time with the maximum number of workers."""
        return self.config.n_parallel * self._rule.max_workers

    def scaling(self) -> ScalingState:
        """The current number of workers."""
        return ScalingState(
            min_workers=self._rule.min_workers,
            max_workers=self._rule.max_workers,
            running=len(self._engines),
            starting=int(self._starting is not None),
            draining=len(self._draining),
            scale_ups=self._scale_ups,
            scale_downs=self._scale_downs,
            held_back=self._held_back,
        )

    async def stats(self) -> EngineStats:
        """The sum over the workers that have loaded the model."""
        return add_up(await asyncio.gather(*(engine.stats() for engine in [*self._engines, *self._draining])))

    async def cancel(self, request_id: str) -> None:
        """Ends a request within a step."""
        if request_id in self._moving:
            self._moving[request_id] = True
        await super().cancel(request_id)

    async def close(self) -> None:
        """Kills all workers; unfinished requests get a last event (cancelled)."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await asyncio.gather(super().close(), *self._closing)

    # --- requests ---------------------------------------------------------------------------------------------------

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Runs a request, yielding its events; see `EngineClient.submit`. Before its first event it may move to another
        worker."""
        resume: ResumeState | None = None
        with self._hold_id(request):
            while True:
                try:
                    with self._choose(request).open(request, resume) as outputs:
                        while not outputs.finished:
                            event = await outputs.get()
                            self._without_output.pop(request.id, None)
                            yield event
                    return
                except Withdrawn as withdrawn:
                    resume = withdrawn.resume
                    if self._moving.pop(request.id):
                        yield GenerationEvent(request_id=request.id, finish_reason=FinishReason.CANCELLED)
                        return

    @contextlib.contextmanager
    def _hold_id(self, request: GenerationRequest) -> Iterator[None]:
        with super()._hold_id(request):
            self._without_output[request.id] = request
            self._arrived_at[request.id] = monotonic()
            try:
                yield
            finally:
                self._without_output.pop(request.id, None)
                self._moving.pop(request.id, None)
                del self._arrived_at[request.id]

    def _share_waiting_requests(self) -> int:
        """Takes the last waiting requests from workers with more than their share, and reassigns them.

        Returns their number. A worker computes requests in order of rank, so the first ones stay. A request with
        `id_slot` stays with its slot.
        """
        in_flight = sum(engine.in_flight for engine in self._engines)
        share = max(self.config.n_parallel, math.ceil(in_flight / len(self._engines)))
        by_rank = sorted(self._without_output.values(), key=lambda request: request.priority)
        n = 0
        for engine in self._engines:
            for request in reversed(by_rank):
                if engine.in_flight <= share:
                    break
                if request.id_slot < 0 and engine.withdraw(request.id):
                    self._moving[request.id] = False
                    n += 1
        return n

    # --- the number of workers --------------------------------------------------------------------------------------

    def started(self) -> None:
        """Called when the first workers have loaded the model."""
        self._limit_to_cores()
        self._divide_cores()
        log.info("workers: %d, at most %d under load", len(self._engines), self._rule.max_workers)

    async def adapt(self) -> None:
        """Starts or drains a worker if the load requires it."""
        try:
            await self._adapt()
        except Exception:  # a bug: the current workers continue
            log.exception("autoscaling of workers failed")

    async def _adapt(self) -> None:
        await self._end_drained()
        load = await self._load()
        if not load.waiting:
            self._held_back = None
        decision = self._rule.decide(monotonic(), load, len(self._engines))
        if decision == "start" and self._draining:
            self._take_back()
        elif decision == "start":
            await self._start_one(load)
        elif decision == "drain":
            self._drain_one()

    async def _load(self) -> Load:
        """Requests wait if a worker has more than `n_parallel`, or if there are no free cells for their prompts."""
        waiting = sum(await asyncio.gather(*map(self._n_waiting, self._engines)))
        oldest = next(iter(self._without_output), None)
        return Load(
            in_flight=sum(engine.in_flight for engine in self._engines),
            waiting=waiting,
            longest_wait=monotonic() - self._arrived_at[oldest] if oldest else 0.0,
        )

    async def _n_waiting(self, engine: EngineProcess) -> int:
        excess = engine.in_flight - self.config.n_parallel
        if excess > 0 or engine.in_flight == 0:
            return max(0, excess)
        with contextlib.suppress(EngineClosed):
            return min(engine.in_flight, (await engine.stats()).waiting)
        return 0

    async def _start_one(self, load: Load) -> None:
        names = {engine.name for engine in self._all_engines()}
        number = next(i for i in range(len(names) + 1) if str(i) not in names)
        if why := await self._shortage(number):
            self._hold_back(number, why)
            return
        log.info(
            "waiting requests: %d, the oldest for %.1f s; starting worker %d (%d of at most %d)",
            *(load.waiting, load.longest_wait, number, len(self._engines) + 1, self._rule.max_workers),
        )
        began = monotonic()
        engine = self._starting = self._start_worker(number)
        try:
            await engine.loaded()
        except Exception as error:  # in any case, the other workers continue
            self._starting = None
            await self._close(engine)
            self._hold_back(number, str(error))
        else:
            self._starting = None
            self._add(engine)
            self._scale_ups += 1
            n_moved = self._share_waiting_requests()
            seconds = monotonic() - began
            log.info("worker %d is ready after %.1f s and takes %d of the waiting requests", number, seconds, n_moved)

    def _add(self, engine: EngineProcess) -> None:
        self._engines.append(engine)
        self._engines.sort(key=lambda each: int(each.name))
        self._rule.started()
        self._held_back = None
        self._divide_cores()

    def _hold_back(self, number: int, why: str) -> None:
        pause = self._rule.not_started(monotonic())
        level = logging.DEBUG if self._held_back else logging.WARNING  # one line for a queue
        message = "cannot start worker %d for waiting requests: %s. Next attempt in %.0f s"
        log.log(level, message, number, why, pause)
        self._held_back = why

    def _drain_one(self) -> None:
        engine = self._engines.pop()
        engine.draining = True
        self._draining.append(engine)
        self._scale_downs += 1
        log.info(
            "low load for %g s: draining worker %s, which ends after its last request (%d unfinished)",
            *(self._rule.downscale_delay, engine.name, engine.in_flight),
        )

    def _take_back(self) -> None:
        engine = self._draining.pop()
        engine.draining = False
        self._add(engine)
        self._scale_ups += 1
        n_moved = self._share_waiting_requests()
        log.info("requests are waiting: worker %s stops draining and takes %d of them", engine.name, n_moved)

    async def _end_drained(self) -> None:
        for engine in [each for each in self._draining if each.in_flight == 0]:
            self._draining.remove(engine)
            self._router.forget(engine)
            await self._close(engine)
            log.info("worker %s ended; running: %d", engine.name, len(self._engines))
            self._divide_cores()

    async def _close(self, engine: EngineProcess) -> None:
        """Runs to completion even if this is cancelled; `close` then waits for it."""
        closing = asyncio.ensure_future(engine.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    # --- cores ------------------------------------------------------------------------------------------------------

    @property
    def _shares_cores(self) -> bool:
        return not self.config.n_threads and not self.info.on_gpu

    def _limit_to_cores(self) -> None:
        """On a CPU, a worker without its own core would only take turns with the others."""
        n_cores = available_threads()
        if self._shares_cores and n_cores < self._rule.max_workers:
            most = max(n_cores, self._rule.min_workers)
            log.warning(
                "limiting workers to %d instead of %d: each needs its own core. Set the number of threads (-t, "
                "n_threads) to lift this limit",
                *(most, self._rule.max_workers),
            )
            self._rule.max_workers = most

    def _divide_cores(self) -> None:
        """Divides all cores among the computing workers: more compute threads than cores only spin."""
        if self._shares_cores:
            n = len(self._engines) + len(self._draining)
            for engine in [*self._engines, *self._draining]:
                engine.limit_threads(max(1, available_threads() // n))


async def _follow_load(of: weakref.ref[AutoscaledGroup], first: list[EngineProcess], interval: float) -> None:
    """Adapts a group until it is dropped, which this does not prevent."""
    try:
        await asyncio.gather(*(engine.loaded() for engine in first))
    except (CppBatchError, OSError):
        return  # `loaded` raises the error
    first.clear()
    if group := of():
        group.started()
    while group:
        del group
        await asyncio.sleep(interval)
        if group := of():
            await group.adapt()
