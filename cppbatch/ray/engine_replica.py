"""A replica: Ray Serve runs it in a process of its own. Its engine is a worker process beside it."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from ray import serve

from cppbatch.cluster.engine_process import EngineProcess
from cppbatch.config import EngineConfig
from cppbatch.engine.params import INT32_MAX
from cppbatch.errors import CppBatchError
from cppbatch.ray.front_leases import LeaseWatch
from cppbatch.ray.load_reports import LoadReport, put_report, remove_errors, remove_report
from cppbatch.ray.node_model import model_on_this_node
from cppbatch.ray.replica_engine import ReplicaEngine

log = logging.getLogger("cppbatch.ray")

_REPORT_PERIOD_S = 0.5
_LEASE_PERIOD_S = 4.0


class EngineReplica(ReplicaEngine):
    """The class of the deployment."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it: the replica takes calls when the model is loaded
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
            await asyncio.sleep(_LEASE_PERIOD_S)
            try:
                expired = await asyncio.to_thread(watch.expired, self.fronts)
            except Exception as error:
                log.warning("failed to get the leases of fronts: %s: %s", type(error).__name__, error)
                continue
            for front in expired:
                log.warning("the front %s has not renewed its lease; cancelling its requests", front)
                self.drop_front(front)


async def _load(config: EngineConfig, name: str, application: str, *, step_timeout: float) -> EngineProcess:
    """Starts an engine and reports how far it is until it has loaded the model. Raises what loading raises."""
    unlimited = msgspec.structs.replace(
        config,
        model_path=await asyncio.to_thread(model_on_this_node, config.model_path),
        max_queue=INT32_MAX - config.n_parallel,  # the fronts limit it
    )
    engine = EngineProcess(unlimited, name=name, step_timeout=step_timeout)
    try:
        loading = asyncio.ensure_future(engine.loaded())
        while not (await asyncio.wait([loading], timeout=_REPORT_PERIOD_S))[0]:
            await asyncio.to_thread(put_report, application, name, LoadReport(progress=engine.health().progress))
        loading.result()
    except BaseException:
        await engine.close()
        raise
    return engine
