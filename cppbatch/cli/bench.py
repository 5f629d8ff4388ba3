"""`cppbatch bench`: a group; its commands are in modules of their own."""

from __future__ import annotations

import click


@click.group()
def bench() -> None:
    """Measures this machine: speed, strategies, servers."""
