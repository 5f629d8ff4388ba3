"""`cppbatch serve`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cppbatch.cli.engine_options import (
    deployment_options,
    engine_options,
    given_settings,
    profile_and_memory_options,
)
from cppbatch.cli.llama_server_flags import LlamaServerCommand, unneeded_flags
from cppbatch.cli.loading_bar import loading_bar
from cppbatch.cli.model_sources import ModelSources, many_models, model_source_options
from cppbatch.cli.quiet_imports import QuietImports
from cppbatch.cli.ray_options import RayTarget, ray_options
from cppbatch.cli.server_options import server_options
from cppbatch.cluster import worker_process
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from cppbatch.cluster.deployment import Deployment, EngineStarter
    from cppbatch.server.address import Address
    from cppbatch.server.served_models import ServedModels
    from cppbatch.server.settings import ServerSettings


COMMON = (
    "model hf_repo mmproj lora chat_template reasoning n_parallel n_ctx prefix_cache_disk cache_type_k cache_type_v "
    "n_threads n_gpu_layers use_profile flash_attn prefer spec draft_model models_dir models_config workers devices "
    "sleep_idle_seconds hosts port api_keys api_key_file cors_origins allowed_hosts max_tokens request_timeout aliases "
    "n_predict temperature log_level"
)
"""The options that --help shows; --help-all shows all."""


@click.command(
    cls=LlamaServerCommand,
    common=COMMON,
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},  # as llama-server does
)
@server_options  # first, so that their errors come before a model is downloaded
@deployment_options
@ray_options
@model_source_options
@partial(engine_options, several=True)
@unneeded_flags  # where the log is set up
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
    """Serve one or more models over HTTP with an OpenAI-compatible API.

    Accepts llama-server's flags; flags with nothing to configure here are ignored with a log line
    (docs/llama-server.md).
    """

    async def run(start: Callable[[], ServedModels], find_advice: Callable[[], str | None]) -> None:
        from cppbatch.server.run_server import run_server

        await run_server(start, settings, address, say=say, find_advice=find_advice, show_loading=loading_bar)

    async def run_one(config: EngineConfig, starter: EngineStarter, *, start_early: bool) -> None:
        say(f"loading {config.model_path} ...")
        if start_early:
            await worker_process.start_early()  # it imports beside this process, which has as much to import
        with QuietImports():
            engine = starter.start(config)
            await asyncio.sleep(0)  # the worker gets its settings, and loads the model during the imports that follow
            from cppbatch.server.served_models import OneModel

        await run(lambda: OneModel.of(engine, settings), lambda: find_advice(config))

    if sources:
        if ray:
            raise ConfigError("--ray runs a single model on a cluster; leave it out, or give one model with -m")
        asyncio.run(run(many_models(sources, config, given_settings(), deployment, settings), lambda: None))
        return
    if ray is None:
        asyncio.run(run_one(config, deployment, start_early=not deployment.in_process))
        return
    if config.rpc:
        raise ConfigError(
            "--rpc and --ray cannot be combined: --rpc is for one engine on this machine, --ray "
            "runs engines on a cluster"
        )
    from cppbatch.ray.ray_deployment import deployed

    with deployed(ray.address, config, ray.options, step_timeout=deployment.step_timeout, say=say) as replicas:
        asyncio.run(run_one(replicas.config, replicas, start_early=False))


def find_advice(config: EngineConfig) -> str | None:
    """What `cppbatch models inspect` advises for this model, None if nothing.

    Reads the header of the file and cached times, in 0.07 s with imports. Types that were never timed on this machine
    are timed, in about a second.
    """
    from cppbatch.models.kernel_advice import kernel_report

    if config.rpc:  # another machine's kernels
        return None
    try:
        return kernel_report(Path(config.model_path), n_gpu_layers=config.n_gpu_layers).advice
    except ModelError:  # loading says what is wrong with the file
        return None


def say(line: str) -> None:
    """Prints a line; ignores a closed terminal: after SIGHUP the server still finishes its requests."""
    with contextlib.suppress(OSError):
        click.echo(line)
