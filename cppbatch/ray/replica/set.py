"""The interface between a `RayEngine` and a cluster, which tests implement without Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal, Protocol

import msgspec

from cppbatch.cluster.prefix_router import Prefix

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
