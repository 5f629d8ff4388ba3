"""Options of `cppbatch serve` for a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.core import ParameterSource

from cppbatch.cli.engine_options import Command, CountRange, option, with_options
from cppbatch.errors import ConfigError

if TYPE_CHECKING:
    from cppbatch.cluster.deployment import Deployment
    from cppbatch.ray.replica_options import ReplicaOptions

_LOCAL = "local"  # `ray_cluster.LOCAL`, whose package imports more than --help needs

_OPTIONS = [
    option(
        "--ray", "ray_address", env="RAY", is_flag=False, flag_value=_LOCAL, default=None, metavar="[ADDRESS]",
        help="Run the engines as replicas on a Ray cluster. No address: join the cluster that `ray start` started on "
        "this machine, or start a new one; auto: join, but never start one; HOST:PORT: the address of the head node "
        "(docs/ray.md).",
    ),
    option(
        "--replicas", env="REPLICAS", type=CountRange(), default="1", metavar="N or MIN..MAX",
        help="With --ray: number of engines in the cluster, each with its own copy of the model and its own KV cache. "
        "1..8: scale with the load.",
    ),
]  # fmt: skip

_NOT_WITH_RAY: Mapping[str, tuple[str, str]] = {
    "workers": ("--workers", "--replicas sets the number of engines in the cluster"),
    "in_process": ("--in-process", "the engines run in cluster processes"),
    "devices": ("--devices", "Ray assigns a GPU to each replica"),
    "sleep_idle_seconds": ("--sleep-idle-seconds", "--replicas 1..N stops idle replicas"),
}


class RayTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where the engines run with --ray."""

    address: str
    options: ReplicaOptions


def ray_options(command: Command) -> Command:
    """Adds --ray and --replicas below `deployment_options`. The command gets `ray`, a `RayTarget` or None, and a
    `deployment` that describes the engines of this machine."""

    @wraps(command)
    def with_ray(
        ray_address: str | None, replicas: tuple[int, int | None], deployment: Deployment, **arguments: Any
    ) -> Any:
        if ray_address is None:
            if _is_given("replicas"):
                raise ConfigError(
                    "--replicas requires --ray; without --ray, use --workers to set the number of engines"
                )
            return command(ray=None, deployment=deployment, **arguments)
        for name, (flag, instead) in _NOT_WITH_RAY.items():
            if _is_given(name):
                raise ConfigError(f"{flag} does not apply with --ray: {instead}; leave out {flag}")

        from cppbatch.cluster.deployment import MAX_WORKERS, Deployment
        from cppbatch.ray.ray_cluster import check_installed, starts_own
        from cppbatch.ray.replica_options import ReplicaOptions

        check_installed()
        least, most = replicas[0], replicas[1] or replicas[0]
        options = ReplicaOptions(min_replicas=least, max_replicas=most, downscale_delay=deployment.downscale_delay)
        if starts_own(ray_address):
            here = Deployment(workers=min(most, MAX_WORKERS), step_timeout=deployment.step_timeout)
        else:  # how much memory the machines of the cluster have is not known here
            here = Deployment(step_timeout=deployment.step_timeout)
            arguments["memory_check"] = False
        return command(ray=RayTarget(address=ray_address, options=options), deployment=here, **arguments)

    return with_options(with_ray, _OPTIONS)


def _is_given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
