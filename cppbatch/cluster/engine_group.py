"""Several workers behind one `EngineClient`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from cppbatch.cluster.engine_client import Health, WorkerState
from cppbatch.cluster.engine_process import EngineProcess
from cppbatch.cluster.opened import Opened
from cppbatch.cluster.prefix_affinity import PrefixAffinity
from cppbatch.config import EngineConfig
from cppbatch.engine.metrics import EngineStats, add_up
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.request import GenerationEvent, GenerationRequest, TokenPiece
from cppbatch.errors import InvalidRequest

_TOKENS_PER_PLACE = 64  # of a prefix, for which it is worth queueing behind one more request


class EngineGroup(Opened):
    """Sends each request to the worker with the fewest, or, if its queue is not much longer, where its prefix is."""

    def __init__(self, engines: Sequence[EngineProcess]) -> None:
        self._engines = engines
        self._affinity = PrefixAffinity()
        self._margin = max(1, engines[0].config.n_parallel // 4)
        self._ids: set[str] = set()

    @property
    def config(self) -> EngineConfig:
        """Of one worker; they differ in their device only."""
        return self._engines[0].config

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises `EngineClosed` before it is loaded."""
        return self._engines[0].info

    async def loaded(self) -> None:
        """Waits until every worker has loaded the model. Raises what loading raised."""
        await asyncio.gather(*(engine.loaded() for engine in self._engines))

    def health(self) -> Health:
        """Loading until all are loaded; after that as well as the best of them, with the trouble of another one."""
        each = [engine.health() for engine in self._engines]
        if any(health.status == "loading" for health in each):
            return Health(status="loading", progress=sum(health.progress for health in each) / len(each))
        if all(health.status == "ok" for health in each):
            return each[0]
        worst = next(health for health in each if health.status != "ok")
        if any(health.takes_requests for health in each):
            return Health(status="restarting", progress=worst.progress, error=worst.error)
        return worst

    async def check(self, request: GenerationRequest) -> None:
        """Raises `InvalidRequest` for a request that `submit` would refuse."""
        await self._least_loaded().check(request)

    async def tokenize(
        self, text: str | list[int], *, add_special: bool = True, parse_special: bool = True
    ) -> list[TokenPiece]:
        """As in `EngineClient`."""
        return await self._least_loaded().tokenize(text, add_special=add_special, parse_special=parse_special)

    async def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Runs a request, yielding its events; see `EngineClient.submit`."""
        if request.id in self._ids:
            raise InvalidRequest("id", f"{request.id!r} is the id of a request that is still running")
        self._ids.add(request.id)
        try:
            async with contextlib.aclosing(self._choose(request).submit(request)) as events:
                async for event in events:
                    yield event
        finally:
            self._ids.discard(request.id)

    def _choose(self, request: GenerationRequest) -> EngineProcess:
        best = self._least_loaded()
        if known := self._affinity.find(request):
            engine, n_tokens = self._engines[known[0]], known[1]
            places = min(self._margin, n_tokens // _TOKENS_PER_PLACE)
            if engine.health().takes_requests and engine.in_flight <= best.in_flight + places:
                best = engine
        self._affinity.note(request, self._engines.index(best))
        return best

    def _least_loaded(self) -> EngineProcess:
        """Of those that take requests, if there are any."""
        return min(self._engines, key=lambda engine: (not engine.health().takes_requests, engine.in_flight))

    async def cancel(self, request_id: str) -> None:
        """Ends a request within a step."""
        for engine in self._engines:  # the others do not know it
            await engine.cancel(request_id)

    async def stats(self) -> EngineStats:
        """The sum over all workers. Raises `EngineClosed` before they ever told."""
        return add_up(await asyncio.gather(*(engine.stats() for engine in self._engines)))

    async def workers(self) -> list[WorkerState]:
        """Each by itself."""
        each = await asyncio.gather(*(engine.workers() for engine in self._engines))
        return [state for states in each for state in states]

    async def close(self) -> None:
        """Ends all workers at once; requests that still run get a last event (cancelled)."""
        await asyncio.gather(*(engine.close() for engine in self._engines))
