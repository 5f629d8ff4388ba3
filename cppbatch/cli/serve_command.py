"""`cppbatch serve`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.core import ParameterSource

from cppbatch.cli.deployment_options import CountRange, deployment_options
from cppbatch.cli.engine_options import (
    Command,
    engine_options,
    given_settings,
    option,
    profile_and_memory_options,
    with_options,
)
from cppbatch.cli.llama_server_flags import (
    LlamaServerCommand,
    information_flags,
    list_devices_flag,
    refused_flags,
    unneeded_flags,
)
from cppbatch.cli.model_sources import ModelSources, many_models, model_source_options
from cppbatch.cli.output import loading_bar
from cppbatch.cli.quiet_imports import QuietImports
from cppbatch.cli.server_options import server_options
from cppbatch.cluster.worker import process
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from cppbatch.cluster.deployment import Deployment, EngineStarter
    from cppbatch.ray.replica.options import ReplicaOptions
    from cppbatch.server.address import Address
    from cppbatch.server.models.served import ServedModels
    from cppbatch.server.settings import ServerSettings


_LOCAL = "local"  # `ray_cluster.LOCAL`, not imported because --help does not need that package

_OPTIONS = [
    option(
        "--ray", "ray_address", is_flag=False, flag_value=_LOCAL, metavar="[ADDRESS]",
        help="Run the engines as replicas on a Ray cluster. No address: join the cluster that `ray start` started on "
        "this machine, or start a new one; auto: join, but never start one; HOST:PORT: the address of the head node "
        "(docs/ray.md).",
    ),
    option(
        "--replicas", type=CountRange(), default="1", metavar="N or MIN..MAX",
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
        from cppbatch.ray.cluster import check_installed, starts_own
        from cppbatch.ray.replica.options import ReplicaOptions

        check_installed()
        least, most = replicas[0], replicas[1] or replicas[0]
        options = ReplicaOptions(min_replicas=least, max_replicas=most, downscale_delay=deployment.downscale_delay)
        if starts_own(ray_address):
            here = Deployment(workers=min(most, MAX_WORKERS), step_timeout=deployment.step_timeout)
        else:  # the memory of the cluster's machines is unknown here
            here = Deployment(step_timeout=deployment.step_timeout)
            arguments["memory_check"] = False
        return command(ray=RayTarget(address=ray_address, options=options), deployment=here, **arguments)

    return with_options(with_ray, _OPTIONS)


def _is_given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


COMMON = (
    "model mmproj lora chat_template n_parallel n_ctx n_threads n_gpu_layers "
    "flash_attn spec models_dir models_config workers sleep_idle_seconds hosts port api_keys api_key_file cors_origins "
    "max_tokens temperature log_level"
)
"""The options that --help shows; --help-all shows all."""


@click.command(
    cls=LlamaServerCommand,
    common=COMMON,
    argument="-m",
    options_metavar="[OPTIONS] [MODEL]",
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},  # as llama-server does
)
@refused_flags
@information_flags
@list_devices_flag
@server_options  # first, so that they are validated before a model is downloaded
@deployment_options
@ray_options
@model_source_options
@partial(engine_options, several=True)
@unneeded_flags  # after the log is set up
@partial(profile_and_memory_options, to_stderr=False)  # stderr is for the log, which may be JSON
def serve(
    *,
    config: EngineConfig,
    sources: ModelSources | None,
    deployment: Deployment,
    ray: RayTarget | None,
    settings: ServerSettings,
    address: Address,
) -> None:
    """Serve models over HTTP, with an OpenAI-compatible API.

    Accepts llama-server's flags; flags with nothing to configure here are ignored with a log line
    (docs/llama-server.md).
    """

    async def run(start: Callable[[], ServedModels], find_advice: Callable[[], str | None]) -> None:
        from cppbatch.server.run_server import run_server

        await run_server(start, settings, address, say=say, find_advice=find_advice, show_loading=loading_bar)

    async def run_one(config: EngineConfig, starter: EngineStarter) -> None:
        say(f"loading {config.model_path} ...")
        with QuietImports():
            engine = starter.start(config)
            await asyncio.sleep(0)  # sends the worker its settings: it loads the model during the next imports
            from cppbatch.server.models.served import OneModel

        await run(lambda: OneModel.of(engine, settings), lambda: find_advice(config))

    if ray or deployment.in_process:
        process.end_early()
    if sources:
        if ray:
            raise ConfigError("--ray runs a single model on a cluster; leave it out, or give one model with -m")
        asyncio.run(run(many_models(sources, config, given_settings(), deployment, settings), lambda: None))
        return
    if ray is None:
        asyncio.run(run_one(config, deployment))
        return
    if config.rpc:
        raise ConfigError(
            "--rpc and --ray cannot be combined: --rpc is for one engine on this machine, --ray "
            "runs engines on a cluster"
        )
    from cppbatch.ray.deployment import deploy

    with deploy(ray.address, config, ray.options, step_timeout=deployment.step_timeout, say=say) as replicas:
        asyncio.run(run_one(replicas.config, replicas))


def find_advice(config: EngineConfig) -> str | None:
    """The advice of `cppbatch models inspect` for this model; None: no advice.

    Reads the file's header and cached times, in 0.07 s including imports. Types that were never timed on this machine
    are timed, which takes about a second.
    """
    from cppbatch.models.batch_gain import kernel_report

    if config.rpc:  # another machine's kernels
        return None
    try:
        return kernel_report(Path(config.model_path), n_gpu_layers=config.n_gpu_layers).advice
    except ModelError:  # loading reports what is wrong with the file
        return None


def say(line: str) -> None:
    """Prints a line; ignores a closed terminal: after SIGHUP the server still finishes its requests."""
    with contextlib.suppress(OSError):
        click.echo(line)
