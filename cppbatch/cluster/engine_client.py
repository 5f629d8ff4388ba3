"""The interface that everything above the engine uses: in this process, in a worker, or on many machines."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal, Protocol

import msgspec

from cppbatch.config import EngineConfig
from cppbatch.engine.metrics import EngineStats
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.request import GenerationEvent, GenerationRequest, TokenPiece


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is."""

    status: Literal["loading", "ok", "restarting", "failed", "closed"]
    """restarting: its worker died; requests are taken, and go on as soon as there is another one."""
    progress: float = 0.0
    """0.0 to 1.0 while loading."""
    error: str | None = None
    """Why it failed, or why it restarts."""

    @property
    def takes_requests(self) -> bool:
        """Whether a request that comes now will be answered."""
        return self.status in ("ok", "restarting")


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of those behind a client."""

    name: str
    """`local`, or the number of its worker process."""
    health: Health
    in_flight: int
    """Requests that were given to it and have not ended."""
    pid: int | None = None
    """None: not running just now."""
    device: int | None = None
    """The GPU it runs on, if it was told which."""
    restarts: int = 0
    stats: EngineStats | None = None
    """None while it does not answer."""


class EngineClient(Protocol):
    """An engine as asyncio code sees it."""

    @property
    def config(self) -> EngineConfig:
        """What it was started with; of several workers, each."""
        ...

    async def loaded(self) -> None:
        """Waits until requests are taken. Raises what loading raised."""
        ...

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises `EngineClosed` before it is loaded."""
        ...

    async def check(self, request: GenerationRequest) -> None:
        """Raises `InvalidRequest`, `EngineClosed` or `GenerationFailed` for a request that `submit` would refuse."""
        ...

    async def tokenize(
        self, text: str | list[int], *, add_special: bool = True, parse_special: bool = True
    ) -> list[TokenPiece]:
        """A text's tokens, or what these ids stand for; as in `BatchInferenceEngine.tokens`. Raises as `check` does."""
        ...

    def submit(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Runs a request: `async for event in client.submit(request)`; the last event has a finish reason.

        The first step of the iteration raises `InvalidRequest`, `QueueFull` or `EngineClosed`. Closing the iterator
        (`contextlib.aclosing`) before its end cancels the request. A reader that is slower than the engine gets
        events merged: the same text and tokens in fewer pieces.
        """
        ...

    async def cancel(self, request_id: str) -> None:
        """Ends a request within a step; its iterator gets a last event. Unknown ids are ignored."""
        ...

    async def stats(self) -> EngineStats:
        """Counters and state, of all workers together. Raises `EngineClosed` while none of them answers."""
        ...

    async def workers(self) -> list[WorkerState]:
        """Each engine by itself."""
        ...

    def health(self) -> Health:
        """How the engine is now."""
        ...

    async def close(self) -> None:
        """Ends the engine; requests that still run get a last event (cancelled)."""
        ...
