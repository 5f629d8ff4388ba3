"""The Serve application of a `RayEngine`: the replica and the request router."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.serve.schema import LoggingConfig

from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.cluster.prefix_router import Prefix, PrefixRouter
from cppbatch.config import EngineConfig
from cppbatch.errors import CppBatchError
from cppbatch.ray.replica.engine import ReplicaEngine
from cppbatch.ray.replica.options import model_on_this_node
from cppbatch.ray.replica.serve_replicas import (
    DEPLOYMENT,
    LeaseWatch,
    LoadReport,
    put_report,
    remove_errors,
    remove_report,
)
from cppbatch.ray.replica.set import LEASE_PERIOD_S
from cppbatch.setting import INT32_MAX
from cppbatch.sizing.fit_again import refit


def engine_application(config: EngineConfig, *, step_timeout: float = 300.0, **options: Any) -> serve.Application:
    """The application for `serve.run(..., route_prefix=None)`.

    `options`: those of `serve.deployment`: num_replicas, autoscaling_config, ray_actor_options ...
    Serve does not limit the requests of a replica (`max_ongoing_requests`): `RayEngine` limits the queue, the engine
    orders it by priority, and `cancel` calls must not wait.
    """
    routing = RequestRouterConfig(
        request_router_class=PrefixRequestRouter, request_router_kwargs={"n_parallel": config.n_parallel}
    )
    deployment = serve.deployment(
        EngineReplica,
        name=DEPLOYMENT,
        max_ongoing_requests=INT32_MAX,
        request_router_config=routing,
        logging_config=LoggingConfig(enable_access_log=False),  # the front has an access log
    )
    return deployment.options(**options).bind(config, step_timeout=step_timeout)


# --- engine replica --------------------------------------------------------------------------------------------------
# A replica: Ray Serve runs it in its own process. Its engine is a separate worker process.


log = logging.getLogger("cppbatch.ray")


class EngineReplica(ReplicaEngine):
    """The class of the deployment."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it: the replica accepts calls once the model is loaded
        self, config: EngineConfig, *, step_timeout: float = 300.0
    ) -> None:
        """Starts a worker process and waits until it has loaded the model. Raises what loading raises."""
        name = str(serve.get_replica_context().replica_id.unique_id)
        logging.getLogger("cppbatch").setLevel(logging.INFO)
        application = str(serve.get_replica_context().app_name)
        await asyncio.to_thread(remove_errors, application)
        try:
            engine = await _load(config, name, application, step_timeout=step_timeout)
        except Exception as error:
            kind = type(error).__name__ if isinstance(error, CppBatchError) else None
            await asyncio.to_thread(put_report, application, name, LoadReport(error=str(error), error_kind=kind))
            raise
        await asyncio.to_thread(remove_report, application, name)
        super().__init__(engine, name)
        self._watching = asyncio.ensure_future(self._watch_fronts())

    async def _watch_fronts(self) -> None:
        """Ends the requests of fronts that were killed."""
        watch = LeaseWatch()
        while True:
            await asyncio.sleep(LEASE_PERIOD_S)
            try:
                expired = await asyncio.to_thread(watch.find_expired, self.fronts)
            except Exception as error:
                log.warning("failed to get the leases of fronts: %s: %s", type(error).__name__, error)
                continue
            for front in expired:
                log.warning("the front %s has not renewed its lease; cancelling its requests", front)
                self.drop_front(front)


async def _load(config: EngineConfig, name: str, application: str, *, step_timeout: float) -> EngineProcess:
    """Starts an engine and reports its progress until it has loaded the model. Raises what loading raises."""
    unlimited = msgspec.structs.replace(
        config,
        model_path=await asyncio.to_thread(model_on_this_node, config.model_path),
        max_queue=INT32_MAX - config.n_parallel,  # the fronts limit the queue
    )
    engine = EngineProcess(unlimited, name=name, step_timeout=step_timeout, refit=refit(unlimited))
    try:
        loading = asyncio.ensure_future(engine.loaded())
        while not (await asyncio.wait([loading], timeout=0.5))[0]:
            await asyncio.to_thread(put_report, application, name, LoadReport(progress=engine.health().progress))
        loading.result()
    except BaseException:
        await engine.close()
        raise
    return engine


# --- request router --------------------------------------------------------------------------------------------------
# Ray Serve's request router, with the rule of `cluster/prefix_router.py`.


class _Choice(NamedTuple):
    replica: ReplicaID
    at: float
    is_sent: bool


class PrefixRequestRouter(RequestRouter):
    """Chooses the replica of a request, in the process that has the deployment's handle.

    For routing by prefix, the first argument of a call must be a `list[Prefix]` (`prompt_prefixes(request)`), created
    in the same process. Any other call goes to the replica with the fewest requests.

    Set it in the deployment's `RequestRouterConfig`: `request_router_class=PrefixRequestRouter`,
    `request_router_kwargs={"n_parallel": 16}`, the number of sequences that a replica computes at once.

    Serve's own queue lengths lag: they do not count a request between routing and sending, and the answer to the first
    request of a burst resets them to 1. So requests are also counted here, from routing to the end. The larger number
    is used, because Serve's includes the requests of other handles.
    """

    def initialize_state(self, n_parallel: int) -> None:
        """Called by Serve with `request_router_kwargs`."""
        self._router: PrefixRouter[ReplicaID] = PrefixRouter(n_parallel)
        self._choices: dict[str, _Choice] = {}  # by internal request id
        self._counts: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen replica, then all others. If the first is full (`max_ongoing_requests`), Serve uses the other one
        with the fewest requests."""
        self._drop_unsent()
        if pending_request is not None:
            self._forget_request(pending_request.metadata.internal_request_id)  # an earlier choice
        loads = {replica.replica_id: self._load(replica.replica_id) for replica in candidate_replicas}
        chosen = self._router.choose(_prefixes(pending_request), loads)
        if pending_request is not None:
            self._count(pending_request, chosen, is_sent=False)
        first = [replica for replica in candidate_replicas if replica.replica_id == chosen]
        return [first, [replica for replica in candidate_replicas if replica.replica_id != chosen]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Serve when a replica has accepted a request."""
        self._count(pending_request, replica_id, is_sent=True)
        self._router.note(_prefixes(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Serve when a request has ended or was rejected by the replica."""
        self._forget_request(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when replicas were added or removed."""
        gone = set(self.curr_replicas) - {replica.replica_id for replica in replicas}
        super().update_replicas(replicas)
        for replica_id in gone:
            self._router.forget(replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Serve when a call shows that a replica is dead."""
        super().on_replica_actor_died(replica_id)
        self._router.forget(replica_id)

    def _load(self, replica_id: ReplicaID) -> int:
        return max(self._counts[replica_id], self.replica_queue_len_cache.get(replica_id) or 0)

    def _count(self, request: PendingRequest, replica_id: ReplicaID, *, is_sent: bool) -> None:
        request_id = request.metadata.internal_request_id
        self._forget_request(request_id)
        self._choices[request_id] = _Choice(replica_id, time.monotonic(), is_sent)
        self._counts[replica_id] += 1

    def _forget_request(self, request_id: str) -> None:
        if choice := self._choices.pop(request_id, None):
            self._counts[choice.replica] -= 1

    def _drop_unsent(self) -> None:
        """Drops requests that were cancelled before they were sent: Serve does not report them."""
        now = time.monotonic()
        # a request that was not sent within 10 s was cancelled
        late = [name for name, choice in self._choices.items() if not choice.is_sent and now > choice.at + 10.0]
        for request_id in late:
            self._forget_request(request_id)


def _prefixes(request: PendingRequest | None) -> Sequence[Prefix]:
    first = request.args[0] if request is not None and request.args else None
    return first if isinstance(first, list) and first and isinstance(first[0], Prefix) else ()
