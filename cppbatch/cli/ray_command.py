"""`cppbatch ray`: shows and stops what this user's `cppbatch serve --ray` runs on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from cppbatch.ray.cluster import FrontRecord


@click.group()
def ray() -> None:
    """Show or stop what `cppbatch serve --ray` started here."""


@ray.command()
def status() -> None:
    """Show each server with its cluster and replicas: state, process, machine, requests."""
    found = _records()
    if not found:
        return
    from cppbatch.ray.front_status import state_of

    for record in found:
        whose = "its own Ray cluster" if record.cluster.is_own else "the Ray cluster it joined,"
        state = "" if record.is_alive else "  (killed: `cppbatch ray down` stops its replicas)"
        click.echo(f"cppbatch serve, pid {record.pid}, on {whose} at {record.cluster.address}{state}")
        click.echo(f"model {record.model}, replicas {record.replicas}, logs {record.cluster.session_logs}")
        front = state_of(record)
        table = Table(box=None, pad_edge=False)
        for column in ("replica", "state", "pid", "machine", "CPUs", "requests"):
            table.add_column(column)
        for each in front.replicas:
            pid, requests = ("-" if number is None else str(number) for number in (each.pid, each.in_flight))
            table.add_row(each.name, each.state, pid, each.machine or "-", f"{each.num_cpus:g}", requests)
        Console(soft_wrap=True).print(table)
        if front.message:
            click.echo(front.message)


@ray.command()
def down() -> None:
    """Stop each server (after its running requests finish), its replicas, and its cluster if it started one."""
    found = _records()
    if not found:
        return
    from cppbatch.ray.front_status import end

    ended = [end(record, say=click.echo) for record in found]
    sys.exit(0 if all(ended) else 1)


def _records() -> list[FrontRecord]:
    from cppbatch.ray.cluster import check_installed, records

    found = records()
    if found:
        check_installed()
    else:
        click.echo("this user has no `cppbatch serve --ray` running on this machine")
    return found
