"""`cppbatch bench`: a group; its commands are in modules of their own."""

from __future__ import annotations

import click

from cppbatch.cli.bench_commands import serve
from cppbatch.cli.bench_strategies import strategies
from cppbatch.cli.bench_throughput import throughput


@click.group()
def bench() -> None:
    """Measures this machine: speed, strategies, servers."""


bench.add_command(throughput)
bench.add_command(strategies)
bench.add_command(serve)
