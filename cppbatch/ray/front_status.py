"""Queries the state of this machine's fronts from their clusters, and stops fronts."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import msgspec

from cppbatch.errors import ConfigError
from cppbatch.ray import cluster as ray_cluster
from cppbatch.ray.cluster import FrontRecord, forget, records
from cppbatch.ray.deployment import delete_left_behind
from cppbatch.ray.replica.watch import deployment_details

_END_SECONDS = 120.0  # longer than the drain timeout


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """A replica of a front."""

    name: str
    state: str
    """Ray Serve's state: STARTING, RUNNING, STOPPING ..."""
    num_cpus: float
    pid: int | None = None
    """The pid of the replica's process; None without a process."""
    machine: str | None = None
    in_flight: int | None = None
    """Unfinished requests; None if the replica does not respond."""


class FrontState(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of a front."""

    replicas: list[ReplicaState]
    message: str = ""
    """The problem, if any."""


def state_of(record: FrontRecord) -> FrontState:
    """Queries the cluster of a front. If the cluster does not respond, `message` says so."""
    try:
        with ray_cluster.connect(record.cluster.address, known=record.cluster):
            return _ask(record.application)
    except ConfigError as error:
        return FrontState(replicas=[], message=str(error))


def _ask(application: str) -> FrontState:
    from cppbatch.ray.replica.serve_replicas import DEPLOYMENT

    details = deployment_details(application, DEPLOYMENT)
    if details is None:
        return FrontState(replicas=[], message=f"its application {application} is not in the cluster")
    in_flight = asyncio.run(_requests(application))
    num_cpus = details.required_resources.get("CPU", 0)
    return FrontState(
        replicas=[
            ReplicaState(
                name=each.replica_id,
                state=each.state.value,
                num_cpus=num_cpus,
                pid=each.pid,
                machine=each.node_ip,
                in_flight=in_flight.get(each.replica_id),
            )
            for each in details.replicas
        ],
        message=details.message,
    )


async def _requests(application: str) -> dict[str, int]:
    """The unfinished requests of each responding replica, by name."""
    from cppbatch.ray.messages import decode_report
    from cppbatch.ray.replica.serve_replicas import ServeReplicas

    reports = map(decode_report, await ServeReplicas(application).reports())
    return {report.replica: sum(worker.in_flight for worker in report.workers) for report in reports}


def end(record: FrontRecord, *, say: Callable[[str], None]) -> bool:
    """Stops a front with its replicas, or the replicas of a killed front. Returns whether all have ended."""
    if record.is_alive:
        say(f"stopping cppbatch serve, pid {record.pid}, after its running requests ...")
        os.kill(record.pid, signal.SIGTERM)
        until = time.monotonic() + _END_SECONDS
        while record.is_alive and time.monotonic() < until:
            time.sleep(0.1)
        if record.is_alive:
            say(f"it did not stop within {_END_SECONDS:g} s; run `kill -9 {record.pid}` and `cppbatch ray down` again")
            return False
        record = next((left for left in records() if left.pid == record.pid), record)
    if not record.cluster.is_own and record in records():
        try:
            with ray_cluster.connect(record.cluster.address, known=record.cluster):
                delete_left_behind(record.cluster.address)
        except ConfigError as error:
            say(f"{error}. If the cluster has ended, so have its replicas; removed the server from the list")
            forget(record)
            return True
    cluster = "and its Ray cluster have" if record.cluster.is_own else "have"
    remaining = "" if record.cluster.is_own else f"; the Ray cluster at {record.cluster.address} keeps running"
    say(f"the replicas {cluster} ended{remaining}")
    return True
