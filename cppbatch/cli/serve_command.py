"""`cppbatch serve`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import click

from cppbatch.cli.engine_options import deployment_options, engine_options, profile_and_memory_options
from cppbatch.cli.server_options import server_options
from cppbatch.config import EngineConfig

if TYPE_CHECKING:
    from cppbatch.cluster.deployment import Deployment
    from cppbatch.server.listener import Address
    from cppbatch.server.settings import ServerSettings


@click.command()
@server_options  # first, so that their errors come before a model is downloaded
@deployment_options
@engine_options
@profile_and_memory_options
def serve(config: EngineConfig, deployment: Deployment, settings: ServerSettings, address: Address) -> None:
    """Serves a model over HTTP with an OpenAI-compatible API."""
    from cppbatch.server.run_server import run_server as run

    say(f"loading {config.model_path} ...")
    asyncio.run(run(config, deployment, settings, address, say=say))


def say(line: str) -> None:
    """Prints a line; ignores a closed terminal: after SIGHUP the server still finishes its requests."""
    with contextlib.suppress(OSError):
        click.echo(line)
