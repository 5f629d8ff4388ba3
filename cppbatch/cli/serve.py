"""`cppbatch serve`."""

from __future__ import annotations

import asyncio

import click

from cppbatch.cli.options import engine_options, option
from cppbatch.config import EngineConfig


@click.command()
@engine_options
@option("--host", env="HOST", default="127.0.0.1", help="Address to listen on.")
@option("--port", env="PORT", type=click.IntRange(0, 65535), default=8080, help="Port; 0: any free one.")
@option("--api-key", env="API_KEY", default=None, help="Key that clients must send as a bearer token.")
def serve(config: EngineConfig, host: str, port: int, api_key: str | None) -> None:
    """Serves a model over HTTP with an OpenAI-compatible API."""
    from cppbatch.server.serve import serve as run

    click.echo(f"loading {config.model_path} ...")
    asyncio.run(run(config, host=host, port=port, api_key=api_key, say=click.echo))
