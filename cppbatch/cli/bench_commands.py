"""`cppbatch bench serve`."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from cppbatch.bench.prompts import Lengths
from cppbatch.cli.report_options import Draw, report_options
from cppbatch.cli.values import lengths
from cppbatch.errors import ConfigError

if TYPE_CHECKING:
    from cppbatch.bench.load.compare_servers import Progress
    from cppbatch.bench.load.target import Target
    from cppbatch.bench.load.workload import LoadSettings
    from cppbatch.bench.report import Report

_SIZES = {  # of each workload, in tokens: its prompts, its outputs
    "mixed": (Lengths(32, 512), Lengths(16, 128)),
    "fixed": (Lengths(128, 128), Lengths(64, 64)),
    "shared-prefix": (Lengths(20, 20), Lengths(32, 32)),
    "fan-out": (Lengths(256, 256), Lengths(32, 32)),
}


@click.command("serve")
@click.option(
    "--url",
    "urls",
    multiple=True,
    required=True,
    metavar="[NAME=]URL",
    help="A server, such as http://127.0.0.1:8080. Several are measured in turn and compared with the first.",
)
@click.option("--label", help="The server's name in the table, as NAME= does.")
@click.option(
    "--workload",
    type=click.Choice(list(_SIZES)),
    default="mixed",
    show_default=True,
    help="mixed: prompts and outputs of many lengths; fixed: of one; shared-prefix: prompts that begin alike; "
    "fan-out: many samples of each prompt.",
)
@click.option(
    "--requests",
    "n_requests",
    type=int,
    default=48,
    show_default=True,
    help="How many in each repeat; with fan-out, how many samples.",
)
@click.option(
    "--concurrency", type=int, help="Clients that wait for their answer before they ask again.  [default: 16]"
)
@click.option(
    "--rate", type=float, metavar="PER_SECOND", help="Instead: requests at random times, whatever the server does."
)
@click.option(
    "--prompt-tokens",
    callback=lengths,
    metavar="N|LOW-HIGH",
    help="Of each prompt, about; with shared-prefix, of what follows the prefix.  [default: the workload's]",
)
@click.option(
    "--output-tokens", callback=lengths, metavar="N|LOW-HIGH", help="Of each answer.  [default: the workload's]"
)
@click.option(
    "--prefix-tokens",
    type=int,
    default=580,
    show_default=True,
    help="With shared-prefix: how many all prompts have in common.",
)
@click.option("--samples", type=int, default=16, show_default=True, help="With fan-out: how many of each prompt.")
@click.option(
    "--samples-by",
    type=click.Choice(["requests", "n"]),
    default="requests",
    show_default=True,
    help="Whether fan-out sends a request for each sample, or one that asks for all with n.",
)
@click.option(
    "--endpoint",
    type=click.Choice(["completions", "chat"]),
    default="completions",
    show_default=True,
    help="/v1/completions or /v1/chat/completions.",
)
@click.option("--model", help="Its name there.  [default: the first of /v1/models]")
@click.option("--api-key", envvar="CPPBATCH_BENCH_API_KEY", show_envvar=True, help="Sent as a bearer token.")
@click.option("--warmup", type=int, default=4, show_default=True, help="Requests before those that are measured.")
@click.option("--repeats", type=int, default=3, show_default=True, help="Each with new prompts.")
@click.option(
    "--seed",
    type=int,
    help="For the same prompts and times again, on servers that were started anew.  [default: random]",
)
@click.option("--latency-bound-ms", type=float, help="Count requests whose first text came in time (goodput).")
@click.option("--timeout", type=float, default=300, show_default=True, help="Seconds that a request may take.")
@report_options
def serve(urls: tuple[str, ...], label: str | None, **settings: Any) -> tuple[Report, Draw]:
    """Puts load on OpenAI-compatible servers, and shows how fast they answer.

    \b
    cppbatch bench serve --url http://127.0.0.1:8080
    cppbatch bench serve --url ours=http://127.0.0.1:8080 --url other=http://127.0.0.1:8090 --plot both.png
    """
    from cppbatch.bench.load.compare_servers import compare_servers
    from cppbatch.bench.load.load_plot import plot_load

    targets, load = _targets(urls, label), _load(**settings)
    with _progress(load) as progress:
        report = compare_servers(targets, load, progress)
    return report, plot_load


def _targets(urls: tuple[str, ...], label: str | None) -> list[Target]:
    from cppbatch.bench.load.target import Target

    if label and len(urls) > 1:
        raise ConfigError(f"--label {label}: with several servers, name each: --url NAME=URL")
    targets = [Target.read(f"{label}={url}" if label else url) for url in urls]
    for what, values in (("name", [each.label for each in targets]), ("address", [each.url for each in targets])):
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ConfigError(f"--url: two servers have the {what} {twice}; give each one of its own")
    return targets


def _load(
    *,
    workload: Any,
    n_requests: int,
    prompt_tokens: Lengths | None,
    output_tokens: Lengths | None,
    prefix_tokens: int,
    samples: int,
    samples_by: Any,
    concurrency: int | None,
    rate: float | None,
    seed: int | None,
    **others: Any,
) -> LoadSettings:
    from cppbatch.bench.load.workload import LoadSettings, Workload

    if rate is not None and concurrency is not None:
        raise ConfigError("--rate and --concurrency exclude each other: at a rate, nobody waits for answers")
    prompt, output = _SIZES[workload]
    return LoadSettings(
        workload=Workload(
            kind=workload,
            n_requests=n_requests,
            prompt_tokens=prompt_tokens or prompt,
            output_tokens=output_tokens or output,
            prefix_tokens=prefix_tokens if workload == "shared-prefix" else 0,
            samples=samples if workload == "fan-out" else 1,
            samples_by=samples_by,
        ),
        concurrency=16 if concurrency is None else concurrency,
        rate=rate,
        seed=secrets.randbelow(2**31) if seed is None else seed,
        **others,
    )


@contextlib.contextmanager
def _progress(load: LoadSettings) -> Iterator[Progress]:
    """A line that says where it is, on stderr, if that is a terminal. It is drawn seldom: this is a measurement."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    with console.status("looking at the servers ...", refresh_per_second=2) as status:

        def show(label: str, repeat: int, n_done: int) -> None:
            what = f"repeat {repeat + 1} of {load.repeats}" if repeat >= 0 else "warming up"
            status.update(Text(f"{label}: {what}, {n_done} requests done"))

        yield show
