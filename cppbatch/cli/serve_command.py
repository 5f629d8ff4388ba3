"""`cppbatch serve`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import click

from cppbatch.cli.deployment_options import deployment_options
from cppbatch.cli.engine_options import engine_options
from cppbatch.cli.fitting import fitted
from cppbatch.cli.server_options import server_options
from cppbatch.config import EngineConfig

if TYPE_CHECKING:
    from cppbatch.cluster.deployment import Deployment
    from cppbatch.server.listener import Address
    from cppbatch.server.settings import ServerSettings


@click.command()
@server_options  # these first, so that they complain before a model is fetched
@deployment_options
@engine_options
@fitted
def serve(config: EngineConfig, deployment: Deployment, settings: ServerSettings, address: Address) -> None:
    """Serves a model over HTTP with an OpenAI-compatible API."""
    from cppbatch.server.run_server import run_server as run

    say(f"loading {config.model_path} ...")
    asyncio.run(run(config, deployment, settings, address, say=say))


def say(line: str) -> None:
    """To the terminal, if it is still there: a server that is left by it (SIGHUP) still finishes what runs."""
    with contextlib.suppress(OSError):
        click.echo(line)
