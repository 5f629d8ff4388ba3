"""A `ReplicaSet` of a Ray Serve deployment: the only module that calls Serve handles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, ReplicaState

from cppbatch.cluster.prefix_router import Prefix
from cppbatch.ray.front_leases import end_lease, renew_lease
from cppbatch.ray.load_reports import load_reports
from cppbatch.ray.replica_set import ReplicaLost, ReplicaSetStatus

Result = TypeVar("Result")

DEPLOYMENT = "engine"
"""The name of the Serve deployment whose replicas are `EngineReplica`s."""

_REPORT_TIMEOUT_S = 2.0


class ServeReplicas:
    """The replicas of an application, over a `DeploymentHandle`. Ray must be initialised."""

    def __init__(self, application: str, deployment: str = DEPLOYMENT) -> None:
        """`application` may still be starting."""
        self._application, self._deployment = application, deployment
        self._handle = DeploymentHandle(deployment, application)  # not a cached one: it belongs to one event loop
        self._run = self._handle.options(method_name="run", stream=True)
        self._ask = self._handle.options(method_name="ask")

    async def run(self, prefixes: list[Prefix], message: bytes) -> AsyncGenerator[bytes, None]:
        """As in `ReplicaSet`."""
        response = self._run.remote(prefixes, message)
        has_ended = False
        try:
            while True:
                yield await _reached(response.__anext__())
        except (StopAsyncIteration, ReplicaLost) as end:
            has_ended = True
            if isinstance(end, ReplicaLost):
                raise
        finally:
            if not has_ended:
                response.cancel()

    async def ask(self, message: bytes) -> bytes:
        """As in `ReplicaSet`."""
        answer: bytes = await _reached(self._ask.remote(message))
        return answer

    async def cancel(self, request_ids: list[str]) -> set[str]:
        """As in `ReplicaSet`."""
        return {name for name in await self._broadcast("cancel", request_ids) if isinstance(name, str)}

    async def reports(self) -> list[bytes]:
        """As in `ReplicaSet`."""
        return [report for report in await self._broadcast("report") if isinstance(report, bytes)]

    async def live(self) -> list[bytes]:
        """As in `ReplicaSet`."""
        return [state for state in await self._broadcast("live") if isinstance(state, bytes)]

    async def _broadcast(self, method: str, *args: Any) -> list[Any]:
        try:
            answers: list[Any] = await self._handle.broadcast(method, *args).results_async(
                timeout_s=_REPORT_TIMEOUT_S, return_exceptions=True
            )
        except (TimeoutError, DeploymentUnavailableError):
            return []
        return answers

    async def renew_lease(self, front: str) -> None:
        """As in `ReplicaSet`."""
        await asyncio.to_thread(renew_lease, front)

    async def close(self, front: str) -> None:
        """As in `ReplicaSet`."""
        await asyncio.to_thread(end_lease, front)
        await self._handle.shutdown_async()

    async def status(self) -> ReplicaSetStatus:
        """As in `ReplicaSet`."""
        return await asyncio.to_thread(self._status)

    def _status(self) -> ReplicaSetStatus:
        found = serve.status().applications.get(self._application)
        if found is None or found.status == ApplicationStatus.DELETING:
            return ReplicaSetStatus(status="failed", message=f"the Serve application {self._application!r} is gone")
        deployment = found.deployments.get(self._deployment)
        states = deployment.replica_states if deployment else {}
        n_running = states.get(ReplicaState.RUNNING, 0)
        n_wanted = sum(states.values()) - states.get(ReplicaState.STOPPING, 0)
        if n_running:
            return ReplicaSetStatus(status="running", n_running=n_running, n_wanted=n_wanted, progress=1.0)
        reports = load_reports(self._application)
        failed = next((report for report in reports if report.error), None)
        message = failed.error if failed else (deployment.message if deployment else "") or found.message
        return ReplicaSetStatus(
            status="failed" if found.status == ApplicationStatus.DEPLOY_FAILED else "starting",
            n_wanted=n_wanted,
            progress=max((report.progress for report in reports), default=0.0),
            message=message or None,
            error_kind=failed.error_kind if failed else None,
        )


async def _reached(call: Awaitable[Result]) -> Result:
    """The result of a call. Raises `ReplicaLost` if the replica could not finish it."""
    try:
        return await call
    except ray.exceptions.RayTaskError as error:
        raise ReplicaLost(str(error).rstrip().rpartition("\n")[2]) from error  # the line below the traceback
    except (ray.exceptions.RayError, RayServeException) as error:
        raise ReplicaLost(str(error).partition("\n")[0]) from error
