"""The interface that everything above the engine uses: in this process, in a worker, or on many machines."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal, Protocol

import msgspec

from cppbatch.engine.metrics import EngineStats
from cppbatch.engine.request import GenerationEvent, GenerationRequest
from cppbatch.engine.runtime import ModelInfo


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is."""

    status: Literal["loading", "ok", "failed", "closed"]
    progress: float = 0.0
    """0.0 to 1.0 while loading."""
    error: str | None = None
    """Why it failed."""


class EngineClient(Protocol):
    """An engine as asyncio code sees it."""

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises `EngineClosed` before it is loaded."""
        ...

    async def check(self, request: GenerationRequest) -> None:
        """Raises `InvalidRequest` or `EngineClosed` for a request that `submit` would refuse."""
        ...

    def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Runs a request: `async for event in client.submit(request)`; the last event has a finish reason.

        The first step of the iteration raises `InvalidRequest`, `QueueFull` or `EngineClosed`. Closing the iterator
        (`contextlib.aclosing`) before its end cancels the request.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """Ends a request within a step; its iterator gets a last event. Unknown ids are ignored."""
        ...

    async def stats(self) -> EngineStats:
        """Counters and state."""
        ...

    def health(self) -> Health:
        """How the engine is now."""
        ...

    async def close(self) -> None:
        """Ends the engine; requests that still run get a last event (cancelled)."""
        ...
