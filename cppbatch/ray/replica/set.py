"""The interface between a `RayEngine` and a cluster, which tests implement without Ray, and live states."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from time import monotonic
from typing import Literal, Protocol

import msgspec

from cppbatch.cluster.engines.client import WorkerLive
from cppbatch.cluster.prefix_router import Prefix
from cppbatch.ray.messages import decode_live

LEASE_PERIOD_S = 4.0
"""Between two renewals of a front's lease, which is lost after five of them."""


class ReplicaLost(Exception):
    """The replica of a call has died or cannot be reached. The message gives the reason."""


class ReplicaSetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of all replicas."""

    status: Literal["starting", "running", "failed"]
    """starting: no replica is running yet, or all have stopped. failed: none can start."""
    n_running: int = 0
    n_wanted: int = 0
    progress: float = 0.0
    """0.0 to 1.0 while starting."""
    message: str | None = None
    """The reason why no replica is running, without Ray's terms."""
    error_kind: str | None = None
    """If loading failed, the name of the exception in `cppbatch.errors`."""


class ReplicaSet(Protocol):
    """All replicas of a deployment."""

    def run(self, prefixes: list[Prefix], message: bytes) -> AsyncGenerator[bytes, None]:
        """Calls `EngineReplica.run` in one replica; waits until there is one. Raises `ReplicaLost`.

        Closing the generator early ends the call in the replica.
        """

    async def ask(self, message: bytes) -> bytes:
        """Calls `EngineReplica.ask` in one replica; waits until there is one. Raises `ReplicaLost`."""

    async def cancel(self, request_ids: list[str]) -> set[str]:
        """Calls `EngineReplica.cancel` in all replicas that accept requests. Returns their names."""

    async def reports(self) -> list[bytes]:
        """`EngineReplica.report` of all responding replicas."""

    async def live(self) -> list[bytes]:
        """`EngineReplica.live` of all responding replicas."""

    async def status(self) -> ReplicaSetStatus:
        """The state of all replicas."""

    async def renew_lease(self, front: str) -> None:
        """Tells all replicas that a front is still running."""

    async def close(self, front: str) -> None:
        """Ends the connection of a front; the replicas keep running."""


log = logging.getLogger("cppbatch.ray")


class LiveReplicas:
    """The live states of all responding replicas. Polls once at a time."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas
        self._states: list[WorkerLive] = []
        self._received_at = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def get(self, *, idle: bool) -> list[WorkerLive]:
        """The states; waits briefly for an answer. `idle`: this front has no request."""
        is_idle = idle and not any(state.in_flight for state in self._states)
        # while no replica has a request, another front may send one: ask once per second
        is_due = monotonic() - self._received_at >= (1.0 if is_idle else 0.0)
        if self._asking is None and is_due:
            self._asking = asyncio.ensure_future(self._ask())
        if self._asking:
            await asyncio.wait([self._asking], timeout=0.15)
        since = monotonic() - self._received_at
        return [
            state if state.age is None else msgspec.structs.replace(state, age=round(state.age + since, 3))
            for state in self._states
        ]

    async def _ask(self) -> None:
        try:
            states = [state for data in await self._replicas.live() for state in decode_live(data)]
            self._states = sorted(states, key=lambda state: state.name)
        except Exception as error:  # `RayEngine` reports that the cluster does not respond
            log.debug("could not get the state of the replicas: %s", error)
            self._states = []
        finally:
            self._received_at = monotonic()
            self._asking = None

    async def close(self) -> None:
        """Stops polling."""
        if self._asking:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
