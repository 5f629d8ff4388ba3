"""What the replicas do now, as they last said."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

import msgspec

from cppbatch.cluster.engine_client import WorkerLive
from cppbatch.ray.ray_messages import decode_live
from cppbatch.ray.replica_set import ReplicaSet

log = logging.getLogger("cppbatch.ray")

_WAIT_S = 0.15
_IDLE_PERIOD_S = 1.0
"""Between two questions while no replica has a request: another front may send one."""


class LiveReplicas:
    """The live states of all replicas that answer. One question is on the way at a time."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas
        self._states: list[WorkerLive] = []
        self._received_at = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def get(self, *, idle: bool) -> list[WorkerLive]:
        """The states, after an answer if it comes soon. `idle`: this front has no request."""
        is_idle = idle and not any(state.in_flight for state in self._states)
        is_due = monotonic() - self._received_at >= (_IDLE_PERIOD_S if is_idle else 0.0)
        if self._asking is None and is_due:
            self._asking = asyncio.ensure_future(self._ask())
        if self._asking:
            await asyncio.wait([self._asking], timeout=_WAIT_S)
        since = monotonic() - self._received_at
        return [
            state if state.age is None else msgspec.structs.replace(state, age=round(state.age + since, 3))
            for state in self._states
        ]

    async def _ask(self) -> None:
        try:
            states = [state for data in await self._replicas.live() for state in decode_live(data)]
            self._states = sorted(states, key=lambda state: state.name)
        except Exception as error:  # `RayEngine` reports that the cluster does not answer
            log.debug("could not get the state of the replicas: %s", error)
            self._states = []
        finally:
            self._received_at = monotonic()
            self._asking = None

    async def close(self) -> None:
        """Asks no more."""
        if self._asking:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
