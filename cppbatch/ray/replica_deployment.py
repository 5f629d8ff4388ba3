"""The Serve application whose replicas a `RayEngine` uses."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from cppbatch.config import EngineConfig
from cppbatch.ray.engine_replica import EngineReplica
from cppbatch.ray.request_router import PrefixRequestRouter
from cppbatch.ray.serve_replicas import DEPLOYMENT

_UNLIMITED = 2**31 - 1


def engine_application(config: EngineConfig, *, step_timeout: float = 300.0, **options: Any) -> serve.Application:
    """The application for `serve.run(..., route_prefix=None)`.

    `options` of the deployment, as in `serve.deployment`: num_replicas, autoscaling_config, ray_actor_options ... Serve
    does not limit the requests of a replica (`max_ongoing_requests`): `RayEngine` limits the queue, the engine orders
    it by priority, and a call that cancels must not wait.
    """
    routing = RequestRouterConfig(
        request_router_class=PrefixRequestRouter, request_router_kwargs={"n_parallel": config.n_parallel}
    )
    deployment = serve.deployment(
        EngineReplica,
        name=DEPLOYMENT,
        max_ongoing_requests=_UNLIMITED,
        request_router_config=routing,
        logging_config=LoggingConfig(enable_access_log=False),  # the front has one
    )
    return deployment.options(**options).bind(config, step_timeout=step_timeout)
