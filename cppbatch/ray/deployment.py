"""A front's deployment: an application in Ray Serve whose replicas hold the engines."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator

from cppbatch.config import EngineConfig, available_threads
from cppbatch.errors import ConfigError
from cppbatch.ray import cluster as ray_cluster
from cppbatch.ray.cluster import FrontRecord, RayCluster
from cppbatch.ray.engine import RayEngine
from cppbatch.ray.replica.options import (
    ReplicaOptions,
    computes_on_gpu,
    for_nodes,
    for_own_machine,
    why_unplaceable,
    with_gpus,
)
from cppbatch.ray.replica.watch import watch_replicas

log = logging.getLogger("cppbatch.ray")

_APPLICATION = "cppbatch-serve"  # prefix of the names of applications deployed by fronts
_SERVE_CONTROLLER, _SERVE_NAMESPACE = "SERVE_CONTROLLER_ACTOR", "serve"


class RayDeployment:
    """The deployed application. `start` creates the engine of this process's front."""

    def __init__(self, application: str, config: EngineConfig, options: ReplicaOptions) -> None:
        self.application = application
        self.config = config
        """The settings of each replica."""
        self.options = options

    def start(self, config: EngineConfig) -> RayEngine:
        """The engine over the replicas. Must run inside an event loop."""
        from cppbatch.ray.replica.serve_replicas import ServeReplicas

        return RayEngine(config, ServeReplicas(self.application))


@contextlib.contextmanager
def deploy(
    address: str, config: EngineConfig, options: ReplicaOptions, *, step_timeout: float, say: Callable[[str], None]
) -> Iterator[RayDeployment]:
    """Starts or joins a cluster (`ray_cluster.connect`) and deploys the replicas; on exit, deletes them and stops a
    cluster that it started. `say` prints a line. Raises `ConfigError`."""
    own_options, own_config = for_own_machine(options, config, available_threads())
    num_cpus = max(os.cpu_count() or 1, int(own_options.num_cpus * options.max_replicas))
    if ray_cluster.starts_own(address):
        say("starting a Ray cluster on this machine ...")
    else:
        say("joining the Ray cluster ...")
    with ray_cluster.connect(address, num_cpus=num_cpus) as cluster:
        nodes = ray_cluster.alive_nodes()
        if cluster.is_own:
            options, config = own_options, own_config
        else:
            options, config = for_nodes(options, config, nodes)
        if computes_on_gpu(config):
            options = with_gpus(options, nodes, grows=not cluster.is_own)
        for line in _about(cluster, nodes):
            say(line)
        if problem := why_unplaceable(options, nodes):
            if cluster.is_own:
                raise ConfigError(problem)
            log.warning(problem)
        for left in delete_left_behind(cluster.address):
            say(f"stopped the replicas left in the cluster by a killed `cppbatch serve` (pid {left.pid})")
        with _application(cluster, config, options, step_timeout) as application:
            from cppbatch.ray.replica.serve_replicas import DEPLOYMENT

            say(f"deploying {_count(options)}, with {_resources(options)} each ...")
            with watch_replicas(application, DEPLOYMENT):
                yield RayDeployment(application, config, options)
            say("stopping the replicas ..." if not cluster.is_own else "stopping the replicas and the Ray cluster ...")


def _about(cluster: RayCluster, nodes: list[ray_cluster.Node]) -> Iterator[str]:
    machines = f"{len(nodes)} machine{'s' * (len(nodes) != 1)}"
    if cluster.is_own:
        yield f"Ray cluster: started on this machine, {cluster.address}; it ends with this command (Ctrl-C)"
    else:
        yield (
            f"Ray cluster: joined {cluster.address}, {machines}; it keeps running after this command (Ctrl-C), which "
            "stops only its own replicas"
        )
    yield f"Ray's logs: {cluster.session_logs} (replicas), {cluster.log_file} (this process)"


def _count(options: ReplicaOptions) -> str:
    if options.is_autoscaled:
        return f"{options.min_replicas} to {options.max_replicas} replicas of the model, depending on load"
    return "1 replica of the model" if options.max_replicas == 1 else f"{options.max_replicas} replicas of the model"


def _resources(options: ReplicaOptions) -> str:
    cpus = f"{options.num_cpus:g} CPU{'s' * (options.num_cpus != 1)}"
    return f"{cpus} and {options.num_gpus:g} GPU" if options.num_gpus else cpus


@contextlib.contextmanager
def _application(
    cluster: RayCluster, config: EngineConfig, options: ReplicaOptions, step_timeout: float
) -> Iterator[str]:
    """Deploys the replicas under a unique name, without waiting for them; stops them on exit."""
    from ray import serve

    from cppbatch.ray.replica.deployment import engine_application

    name = f"{_APPLICATION}-{socket.gethostname()}-{os.getpid()}"
    starts_serve = not _serve_runs()
    pid, created = ray_cluster.this_process()
    record = FrontRecord(
        pid=pid,
        created=created,
        cluster=cluster,
        started_serve=starts_serve,
        application=name,
        model=config.model_path,
        replicas=str(options),
    )
    with ray_cluster.keep_record(record):
        if starts_serve:
            serve.start(proxy_location="Disabled")  # the front serves HTTP
        serve_options = options.serve_options(config)
        target = serve.RunTarget(
            engine_application(config, step_timeout=step_timeout, **serve_options), name=name, route_prefix=None
        )
        try:
            serve.run_many([target], wait_for_applications_running=False)
            yield name
        finally:
            if not cluster.is_own:
                _delete(record)


def _serve_runs() -> bool:
    import ray

    try:
        ray.get_actor(_SERVE_CONTROLLER, _SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def delete_left_behind(cluster: str) -> list[FrontRecord]:
    """Stops replicas that killed fronts on this machine left in this cluster. Returns the fronts."""
    left = [record for record in ray_cluster.records() if record.cluster.address == cluster and not record.is_alive]
    for record in left:
        if _serve_runs():
            _delete(record)
        ray_cluster.forget(record)
    return left


def _delete(record: FrontRecord) -> None:
    """Deletes the front's application and waits until its replicas have ended; stops Serve if the front started it and
    nothing else is running there."""
    from ray import serve

    serve.delete(record.application)
    if record.started_serve and not serve.status().applications:
        serve.shutdown()
