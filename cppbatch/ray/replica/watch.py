"""Logs when replicas start, run, stop, die, or wait for CPUs."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

log = logging.getLogger("cppbatch.ray")


class SeenReplica(msgspec.Struct, frozen=True):
    """A replica in the view of Ray Serve's controller."""

    state: Literal["starting", "running", "stopping"]
    pid: int | None = None
    """None until Ray has placed it on a machine."""
    machine: str | None = None


class ReplicaChanges:
    """Compares the current state with the previous state."""

    def __init__(self) -> None:
        self._seen: Mapping[str, SeenReplica] = {}
        self._target = 0
        self._unplaced_since: dict[str, float] = {}

    def lines(self, now: float, target: int, seen: Mapping[str, SeenReplica], resources: str) -> Iterator[str]:
        """The changes, as log lines. `now`: in seconds. `target`: the number of replicas required by the load.
        `resources`: a text about the required and free resources of a replica."""
        before, self._seen = self._seen, seen
        if self._target and target != self._target:
            yield f"scaling to {target} replica{'s' * (target != 1)} from {self._target}"
        self._target = target
        for name, replica in seen.items():
            old = before.get(name)
            if replica.state == "running" and (old is None or old.state != "running"):
                yield f"replica {name} runs on {replica.machine} (pid {replica.pid})"
            if replica.state == "stopping" and (old is None or old.state != "stopping"):
                yield f"replica {name} is draining: it finishes its requests and ends"
        for name, old in before.items():
            if name not in seen:
                yield f"replica {name} has {'died' if old.state == 'running' else 'ended'}"
        yield from self._report_unplaced(now, resources)

    def _report_unplaced(self, now: float, resources: str) -> Iterator[str]:
        waiting = [name for name, each in self._seen.items() if each.state == "starting" and each.pid is None]
        self._unplaced_since = {name: self._unplaced_since.get(name, now) for name in waiting}
        for name, since in self._unplaced_since.items():
            if now - since >= 10.0:  # if its CPUs are free, Ray places a replica within a second
                self._unplaced_since[name] = float("inf")  # reported once
                yield f"replica {name} is waiting for resources: {resources}"


@contextlib.contextmanager
def watch_replicas(application: str, deployment: str) -> Iterator[None]:
    """Logs changes of the replicas during the context, from a thread, because Ray's calls block."""
    stopped = threading.Event()
    thread = threading.Thread(target=_watch, args=(application, deployment, stopped), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _watch(application: str, deployment: str, stopped: threading.Event) -> None:
    changes = ReplicaChanges()
    while not stopped.wait(1.0):
        try:
            details = deployment_details(application, deployment)
            if details is None:
                continue
            seen = {
                each.replica_id: SeenReplica(_STATES.get(each.state.value, "starting"), each.pid, each.node_ip)
                for each in details.replicas
            }
            for line in changes.lines(time.monotonic(), details.target_num_replicas, seen, _resources(details)):
                log.info(line)
        except Exception as error:  # the cluster may be ending; `RayEngine` handles the requests
            log.debug("could not monitor the replicas: %s", error)


_STATES: dict[str, Literal["running", "stopping"]] = {"RUNNING": "running", "STOPPING": "stopping"}


def _resources(details: object) -> str:
    import ray

    needed: Mapping[str, float] = details.required_resources  # type: ignore[attr-defined]
    free, total = ray.available_resources(), ray.cluster_resources()
    parts = [
        f"{needed[name]:g} {word}s ({free.get(name, 0):g} of {total.get(name, 0):g} in the cluster are free)"
        for name, word in (("CPU", "CPU"), ("GPU", "GPU"))
        if needed.get(name)
    ]
    return f"it needs {' and '.join(parts)} on one machine"


def deployment_details(application: str, deployment: str) -> Any:
    """The `ray.serve.schema.DeploymentDetails` of a deployment, with its replicas; None if it does not exist.

    `serve.status` only counts replicas; Ray's dashboard, which is not started here, shows the same details.
    """
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeInstanceDetails

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    found = ServeInstanceDetails(**client.get_serve_details()).applications.get(application)
    return found.deployments.get(deployment) if found else None
