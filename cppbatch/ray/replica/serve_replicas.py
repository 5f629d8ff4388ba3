"""A `ReplicaSet` of a Ray Serve deployment: the only module that calls Serve handles."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

import msgspec
import ray
from ray import serve
from ray.experimental import internal_kv
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, ReplicaState

from cppbatch.cluster.prefix_router import Prefix
from cppbatch.ray.replica.set import LEASE_PERIOD_S, ReplicaLost, ReplicaSetStatus

Result = TypeVar("Result")

DEPLOYMENT = "engine"
"""The name of the Serve deployment whose replicas are `EngineReplica`s."""


class ServeReplicas:
    """The replicas of an application, over a `DeploymentHandle`. Ray must be initialised."""

    def __init__(self, application: str, deployment: str = DEPLOYMENT) -> None:
        """`application` may still be starting."""
        self._application, self._deployment = application, deployment
        self._handle = DeploymentHandle(deployment, application)  # not cached, because it belongs to one event loop
        self._run = self._handle.options(method_name="run", stream=True)
        self._ask = self._handle.options(method_name="ask")

    async def run(self, prefixes: list[Prefix], message: bytes) -> AsyncGenerator[bytes, None]:
        response = self._run.remote(prefixes, message)
        has_ended = False
        try:
            while True:
                yield await _result_of(response.__anext__())
        except (StopAsyncIteration, ReplicaLost) as end:
            has_ended = True
            if isinstance(end, ReplicaLost):
                raise
        finally:
            if not has_ended:
                response.cancel()

    async def ask(self, message: bytes) -> bytes:
        answer: bytes = await _result_of(self._ask.remote(message))
        return answer

    async def cancel(self, request_ids: list[str]) -> set[str]:
        """Calls all replicas. Returns the names of those that respond."""
        return {name for name in await self._broadcast("cancel", request_ids) if isinstance(name, str)}

    async def reports(self) -> list[bytes]:
        """The reports of the replicas that respond in time."""
        return [report for report in await self._broadcast("report") if isinstance(report, bytes)]

    async def live(self) -> list[bytes]:
        """The live states of the replicas that respond in time."""
        return [state for state in await self._broadcast("live") if isinstance(state, bytes)]

    async def _broadcast(self, method: str, *args: Any) -> list[Any]:
        try:
            answers: list[Any] = await self._handle.broadcast(method, *args).results_async(
                timeout_s=2.0, return_exceptions=True
            )
        except (TimeoutError, DeploymentUnavailableError):
            return []
        return answers

    async def renew_lease(self, front: str) -> None:
        await asyncio.to_thread(renew_lease, front)

    async def close(self, front: str) -> None:
        """Ends the front's lease, and closes Serve's handle."""
        await asyncio.to_thread(end_lease, front)
        await self._handle.shutdown_async()

    async def status(self) -> ReplicaSetStatus:
        return await asyncio.to_thread(self._status)

    def _status(self) -> ReplicaSetStatus:
        found = serve.status().applications.get(self._application)
        if found is None or found.status == ApplicationStatus.DELETING:
            missing = f"the Serve application {self._application!r} does not exist"
            return ReplicaSetStatus(status="failed", message=missing)
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


async def _result_of(call: Awaitable[Result]) -> Result:
    """The result of a call. Raises `ReplicaLost` if the replica could not finish it."""
    try:
        return await call
    except ray.exceptions.RayTaskError as error:
        raise ReplicaLost(str(error).rstrip().rpartition("\n")[2]) from error  # the last line of the traceback
    except (ray.exceptions.RayError, RayServeException) as error:
        raise ReplicaLost(str(error).partition("\n")[0]) from error


# --- front leases ----------------------------------------------------------------------------------------------------
# Detects whether the front of a request is still running: Ray does not tell a replica that the caller of a stream has
# died.
#
# Each front increments a counter in the key-value store of the cluster, which replicas read.


_LEASES = "cppbatch-fronts"


def renew_lease(front: str) -> None:
    """Called by a front every few seconds. Blocks until the cluster responds, like all functions here."""
    internal_kv._internal_kv_put(front, repr(time.time()), namespace=_LEASES)


def end_lease(front: str) -> None:
    """Called when the front ends."""
    internal_kv._internal_kv_del(front, namespace=_LEASES)


class LeaseWatch:
    """A replica's view of the fronts. It only checks that a lease changes, so clocks need not be synchronised."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[bytes | None, float]] = {}

    def find_expired(self, fronts: set[str]) -> set[str]:
        """Returns the fronts that have not renewed their lease for 20 s, according to this replica's clock."""
        now = time.monotonic()
        self._seen = {front: seen for front, seen in self._seen.items() if front in fronts}
        for front in fronts:
            lease = internal_kv._internal_kv_get(front, namespace=_LEASES)
            if front not in self._seen or self._seen[front][0] != lease:
                self._seen[front] = lease, now
        return {front for front, (_, since) in self._seen.items() if now > since + 5 * LEASE_PERIOD_S}


# --- load reports ----------------------------------------------------------------------------------------------------
# The loading progress and errors of replicas, in the key-value store of the cluster.
#
# Serve does not report them: a replica does not accept calls until its constructor has returned, and its errors are
# tracebacks.


_NAMESPACE = "cppbatch-loading"


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a replica that is loading the model or has failed to load it."""

    progress: float = 0.0
    """0.0 to 1.0."""
    error: str | None = None
    error_kind: str | None = None
    """The name of the exception in `cppbatch.errors`."""


_decode = msgspec.msgpack.Decoder(LoadReport).decode


def put_report(application: str, replica: str, report: LoadReport) -> None:
    """Replaces the report of a replica. Blocks until the cluster responds, like all functions here."""
    internal_kv._internal_kv_put(_key(application, replica), msgspec.msgpack.encode(report), namespace=_NAMESPACE)


def remove_report(application: str, replica: str) -> None:
    """Removes the report of a replica that has loaded the model."""
    internal_kv._internal_kv_del(_key(application, replica), namespace=_NAMESPACE)


def remove_errors(application: str) -> None:
    """Removes the reports of failed replicas, when another one starts to load."""
    for key in _keys(application):
        if (report := _get(key)) and report.error:
            internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


def load_reports(application: str) -> list[LoadReport]:
    """The reports of all replicas that are loading the model or have failed to load it."""
    return [report for key in _keys(application) if (report := _get(key))]


def _key(application: str, replica: str) -> str:
    return f"{application}/{replica}"


def _keys(application: str) -> list[bytes]:
    keys: list[bytes] = internal_kv._internal_kv_list(_key(application, ""), namespace=_NAMESPACE)
    return keys


def _get(key: bytes) -> LoadReport | None:
    value = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    with contextlib.suppress(msgspec.DecodeError):
        return _decode(value) if value else None
    return None
