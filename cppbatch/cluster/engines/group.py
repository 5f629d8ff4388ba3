"""Several workers behind one `EngineClient`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence

from cppbatch.cluster.engines.client import EngineClient, Health, WorkerLive, WorkerState, id_in_use
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.cluster.prefix_router import PrefixRouter, prompt_prefixes
from cppbatch.engine.disk.slots import SlotActionName, SlotReport
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.observe.metrics import EngineStats, add_up
from cppbatch.engine.request import GenerationEvent, GenerationRequest, MediaPrompt, TokenPiece


class EngineGroup(EngineClient):
    """Sends a request to the worker with the fewest requests, or to one that has its prefix (`PrefixRouter`)."""

    def __init__(self, engines: Sequence[EngineProcess]) -> None:
        self.config = engines[0].config
        self._engines = list(engines)
        """The workers that get requests."""
        self._router: PrefixRouter[EngineProcess] = PrefixRouter(self.config.n_parallel)
        self._ids: set[str] = set()

    def _all_engines(self) -> list[EngineProcess]:
        return self._engines

    @property
    def max_parallel(self) -> int:
        """Maximum requests computed at the same time by all workers."""
        return self.config.n_parallel * len(self._engines)

    @property
    def info(self) -> ModelInfo:
        """The loaded model, of the worker with the smallest context. Raises `EngineClosed` before it is loaded."""
        return min((engine.info for engine in self._engines), key=lambda info: info.max_sequence)

    async def loaded(self) -> None:
        """Waits until every worker has loaded the model. Raises the errors of loading."""
        await asyncio.gather(*(engine.loaded() for engine in self._engines))

    def health(self) -> Health:
        """`loading` until all workers have loaded; `sleeping` if all sleep; otherwise the best status, with the error
        of a worker that is neither ok nor sleeping."""
        each = [engine.health() for engine in self._engines]
        if any(health.status == "loading" for health in each):
            return Health(status="loading", progress=sum(health.progress for health in each) / len(each))
        in_order = ("ok", "sleeping")
        if all(health.status in in_order for health in each):
            return min(each, key=lambda health: in_order.index(health.status))
        troubled = next(health for health in each if health.status not in in_order)
        if any(health.takes_requests for health in each):
            return Health(status="restarting", progress=troubled.progress, error=troubled.error)
        return troubled

    async def check(self, request: GenerationRequest) -> None:
        """Asks the least loaded worker."""
        await self._least_loaded().check(request)

    async def tokenize(
        self, text: str | list[int] | MediaPrompt, *, add_special: bool = True, parse_special: bool = True
    ) -> list[TokenPiece]:
        """Asks the least loaded worker."""
        return await self._least_loaded().tokenize(text, add_special=add_special, parse_special=parse_special)

    async def slot_action(self, action: SlotActionName, slot: int, path: str = "") -> SlotReport:
        """Asks the worker of the slot: each has `n_parallel` slots."""
        return await self._of_slot(slot).slot_action(action, slot, path)

    def _of_slot(self, slot: int) -> EngineProcess:
        return self._engines[slot // self.config.n_parallel % len(self._engines)]

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Runs a request, yielding its events; see `EngineClient.submit`."""
        with self._hold_id(request), self._choose(request).open(request) as outputs:
            while not outputs.finished:
                yield await outputs.get()

    @contextlib.contextmanager
    def _hold_id(self, request: GenerationRequest) -> Iterator[None]:
        """A context in which a request runs. Raises `InvalidRequest` if its id is in use."""
        if request.id in self._ids:
            raise id_in_use(request.id)
        self._ids.add(request.id)
        try:
            yield
        finally:
            self._ids.discard(request.id)

    def _choose(self, request: GenerationRequest) -> EngineProcess:
        if request.id_slot >= 0:
            return self._of_slot(request.id_slot)
        prefixes = prompt_prefixes(request)
        chosen = self._router.choose(prefixes, self._loads())
        self._router.note(prefixes, chosen)
        return chosen

    def _least_loaded(self) -> EngineProcess:
        return self._router.choose((), self._loads())

    def _loads(self) -> dict[EngineProcess, int]:
        """The unfinished requests of each worker that accepts requests, or of all workers if none does.

        A sleeping worker counts as one with `n_parallel` requests, so that it is only woken if all others have as many.
        """
        loads = {}
        for engine in self._engines:
            health = engine.health()
            if health.takes_requests:
                must_wake = health.status == "sleeping" and engine.in_flight == 0
                loads[engine] = self.config.n_parallel if must_wake else engine.in_flight
        return loads or {engine: engine.in_flight for engine in self._engines}

    async def cancel(self, request_id: str) -> None:
        """Ends a request within a step."""
        for engine in self._all_engines():  # workers without this request ignore its id
            await engine.cancel(request_id)

    async def update_request(self, request_id: str, tokens: Sequence[int]) -> bool:
        """Tells the worker that has the request."""
        for engine in self._all_engines():
            if await engine.update_request(request_id, tokens):
                return True
        return False

    async def stats(self) -> EngineStats:
        """The sum over all workers. Raises `EngineClosed` before their first reports."""
        return add_up(await asyncio.gather(*(engine.stats() for engine in self._all_engines())))

    async def workers(self) -> list[WorkerState]:
        """The state of each worker."""
        each = await asyncio.gather(*(engine.workers() for engine in self._all_engines()))
        return [state for states in each for state in states]

    async def live(self) -> list[WorkerLive]:
        """The live state of each worker."""
        each = await asyncio.gather(*(engine.live() for engine in self._all_engines()))
        return [state for states in each for state in states]

    def sleep_after(self, seconds: float | None) -> bool:
        return all(engine.sleep_after(seconds) for engine in self._all_engines())

    @property
    def seconds_left(self) -> float | None:
        """The longest time of a worker; None if one never stops, or all have stopped."""
        each = [engine.seconds_left for engine in self._all_engines() if engine.health().status != "sleeping"]
        known = [seconds for seconds in each if seconds is not None]
        return max(known) if known and len(known) == len(each) else None

    async def close(self) -> None:
        """Kills all workers; unfinished requests get a last event (cancelled)."""
        await asyncio.gather(*(engine.close() for engine in self._all_engines()))
