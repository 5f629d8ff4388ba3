"""`cppbatch bench`: throughput, strategies, serve."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cppbatch.bench.load.workload import PREFIX_TOKENS, SAMPLES, SIZES
from cppbatch.bench.prompts import Lengths
from cppbatch.bench.strategies import STRATEGIES
from cppbatch.bench.text_workloads import TEXT_WORKLOADS
from cppbatch.cli.engine_options import engine_options
from cppbatch.cli.report_options import Draw, numbers, report_options
from cppbatch.config import DRAFT_SETTINGS, MEDIA_SETTINGS, EngineConfig, Speculation
from cppbatch.errors import ConfigError

if TYPE_CHECKING:
    from cppbatch.bench.load.compare_servers import Progress
    from cppbatch.bench.load.results import LoadIdeal
    from cppbatch.bench.load.target import Target
    from cppbatch.bench.load.workload import LoadSettings
    from cppbatch.bench.report import Report

option = partial(click.option, show_default=True)
_SET_BY_ALL = (
    "n_ctx", "prefix_cache", "prefix_cache_ram", "prefix_cache_disk", "max_queue", "swap_space", "pooling",
    "max_wait_ms", "trace", *MEDIA_SETTINGS,
)  # fmt: skip
"""Settings that these commands choose themselves."""


@click.group()
def bench() -> None:
    """Benchmark this machine: speed, scheduling strategies, servers."""


# --- callbacks of options ---------------------------------------------------------------------------------------------


def _names_of(known: Sequence[str]) -> Callable[[click.Context, click.Parameter, str], tuple[str, ...]]:
    """A callback for `one,other`: a subset of these names, as a tuple without duplicates."""

    def names(_context: click.Context, _option: click.Parameter, given: str) -> tuple[str, ...]:
        parts = [part.strip() for part in given.split(",")]
        for part in parts:
            if part not in known:
                raise click.BadParameter(
                    f"{part!r} is not valid; give one or more of {', '.join(known)}, separated by commas"
                )
        return tuple(dict.fromkeys(parts))

    return names


def _lengths(_context: click.Context, _option: click.Parameter, given: str | None) -> Lengths | None:
    """`128` or `16-256`; None if the option is not given."""
    if given is None:
        return None
    parts = given.split("-")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise click.BadParameter(f"{given!r} is not valid; give a number, or a range such as 16-256")
    return Lengths(int(parts[0]), int(parts[-1]))


# --- bench throughput -------------------------------------------------------------------------------------------------

_LAYOUTS, _FLASH_ATTNS = ("unified", "per-sequence"), ("on", "off")
_KINDS = ("greedy", "sampled", "defaults", "penalised", "chain", "json", "logprobs")
_DRAFTS = ("auto", "suffix", "draft", "mtp", "eagle3", "dflash")
_SET_BY_THROUGHPUT = (
    *_SET_BY_ALL, "n_parallel", "flash_attn", "kv_layout", "target_itl_ms", "spec", "context_shift", "n_keep",
)  # fmt: skip


@bench.command()
@click.option(
    "-B", "--batch-sizes", callback=numbers, metavar="N,N...",
    help="Numbers of sequences that run at the same time.  [default: 1,4,8,16; with --spec 1,2,4,8,16]",
)  # fmt: skip
@option(
    "--layouts", callback=_names_of(_LAYOUTS), default=",".join(_LAYOUTS), metavar="NAME,NAME...", help="KV layouts."
)  # fmt: skip
@option(
    "--flash-attns", callback=_names_of(_FLASH_ATTNS), default=",".join(_FLASH_ATTNS), metavar="on,off",
    help="Measure with and without flash attention.",
)  # fmt: skip
@option(
    "--kinds", callback=_names_of(_KINDS), default="greedy", metavar="NAME,NAME...",
    help=f"Kinds of requests: {', '.join(_KINDS)}.",
)  # fmt: skip
@option("--prompt-tokens", type=int, default=128, help="Length of each prompt.")
@click.option(
    "--new-tokens", type=int, help="Length of each output.  [default: 64; with --spec limited by the workload]"
)  # fmt: skip
@option("--repeats", type=int, default=3, help="Runs of each measurement, after a warm-up.")
@click.option(
    "--watts", type=float, help="Power draw of the machine under load, in case no energy counter is available."
)
@click.option("--power-price", type=float, help="Price of a kWh, to report tokens per unit of currency.")
@click.option(
    "--spec", "speculation", type=click.Choice(_DRAFTS), is_flag=False, flag_value="auto",
    help="Measure the speedup from speculative decoding instead, with drafts from this source (default: auto). Layout "
    "and flash attention are then automatic.",
)  # fmt: skip
@option(
    "--workloads", callback=_names_of(tuple(TEXT_WORKLOADS)), default=",".join(TEXT_WORKLOADS), metavar="NAME,NAME...",
    help="With --spec: the kind of text that the model generates.",
)  # fmt: skip
@report_options
@partial(engine_options, without=_SET_BY_THROUGHPUT)
def throughput(
    *, config: EngineConfig, speculation: Speculation | None, workloads: tuple[str, ...],
    batch_sizes: tuple[int, ...] | None, new_tokens: int | None, repeats: int, watts: float | None,
    power_price: float | None, **sizes: Any,
) -> tuple[Report, Draw]:  # fmt: skip
    """Measure prefill and decode speed, memory and energy, and where the time of a step goes.

    Also shows the tokens/s of a bare llama_decode loop for comparison. With --spec: compares the same requests with and
    without drafts.
    """
    show = partial(click.echo, err=True)
    if speculation:
        from cppbatch.bench.speculation_speedup import SpeedupSizes, measure_speedup, plot_speedup

        wanted = SpeedupSizes(
            batch_sizes=batch_sizes or (1, 2, 4, 8, 16), workloads=workloads, new_tokens=new_tokens, repeats=repeats
        )
        config = msgspec.structs.replace(config, spec=speculation)
        return measure_speedup(config, wanted, show), plot_speedup
    from cppbatch.bench.energy import EnergySettings
    from cppbatch.bench.throughput import Sizes, measure_throughput, plot_throughput

    given = Sizes(
        batch_sizes=batch_sizes or (1, 4, 8, 16),
        new_tokens=64 if new_tokens is None else new_tokens,
        repeats=repeats,
        **sizes,
    )
    energy = EnergySettings(watts=watts, power_price=power_price)
    return measure_throughput(config, given, show, energy), plot_throughput


# --- bench roofline ---------------------------------------------------------------------------------------------------

_SET_BY_ROOFLINE = (*_SET_BY_ALL, "n_parallel", "target_itl_ms", "prefer", *DRAFT_SETTINGS, "sampling")


@bench.command()
@option(
    "-B", "--batch-sizes", callback=numbers, default="1,2,4,8,16,32,64", metavar="N,N...",
    help="Numbers of sequences that decode at the same time.",
)  # fmt: skip
@option("--prompt-tokens", type=int, default=64, help="Tokens in each sequence before measuring starts.")
@option("--repeats", type=int, default=3, help="Runs of each measurement, after a warm-up.")
@report_options
@partial(engine_options, without=_SET_BY_ROOFLINE)
def roofline(*, config: EngineConfig, **sizes: Any) -> tuple[Report, Draw]:
    """Show for each batch size whether decode steps are bound by memory or by compute.

    Measures the memory bandwidth and matrix throughput of the device, and compares each step with them.
    """
    from cppbatch.bench.roofline import RooflineSizes, measure_roofline, plot_roofline

    return measure_roofline(config, RooflineSizes(**sizes), partial(click.echo, err=True)), plot_roofline


# --- bench strategies -------------------------------------------------------------------------------------------------

_SET_BY_STRATEGIES = (*_SET_BY_ALL, *DRAFT_SETTINGS, "context_shift", "n_keep")


@bench.command()
@option(
    "--strategies", "names", callback=_names_of(STRATEGIES), default=",".join(STRATEGIES), metavar="NAME,NAME...",
    help="The strategies to compare.",
)  # fmt: skip
@click.option(
    "-B", "--batch-sizes", callback=numbers, default=None, metavar="N,N...",
    help="Numbers of parallel sequences to compare; default: the value of -np.",
)  # fmt: skip
@click.option(
    "--requests", "n_requests", type=int, default=None,
    help="Requests for each strategy.  [default: 48; with -B two per sequence]",
)  # fmt: skip
@option("--prompt-tokens", callback=_lengths, default="16-256", metavar="N|LOW-HIGH", help="Length of each prompt.")
@option("--new-tokens", callback=_lengths, default="16-256", metavar="N|LOW-HIGH", help="Length of each output.")
@option("--rate", type=float, default=0.0, help="Requests that arrive per second; 0: all at once.")
@option(
    "--max-wait-ms", "window_ms", type=float, default=50.0,
    help="How long static batches and continuous-window collect requests.",
)  # fmt: skip
@option(
    "--bucket", type=int, default=64, help="static-padded, static-buckets: prompts are padded to a multiple of this."
)
@option("--seed", type=int, default=0, help="Seed of lengths, tokens and arrival times.")
@option("--repeats", type=int, default=3, help="Number of runs per strategy.")
@report_options
@partial(engine_options, without=_SET_BY_STRATEGIES)
def strategies(
    *, config: EngineConfig, names: tuple[str, ...], batch_sizes: tuple[int, ...] | None, n_requests: int | None,
    window_ms: float, bucket: int, repeats: int, **work: Any,
) -> tuple[Report, Draw]:  # fmt: skip
    """Compare scheduling strategies on the same requests: one by one, interleaved, in batches, and continuously."""
    from cppbatch.bench.strategies.compare_strategies import (
        OfflineWorkload,
        StrategyComparison,
        compare_strategies,
        plot_strategies,
    )

    compared = StrategyComparison(
        names=names, batch_sizes=batch_sizes or (), max_wait_ms=window_ms, bucket=bucket, repeats=repeats,
        requests_per_sequence=2 if batch_sizes and n_requests is None else 0,
    )  # fmt: skip
    requests = OfflineWorkload(**work | ({} if n_requests is None else {"n_requests": n_requests}))
    report = compare_strategies(config, compared, requests, partial(click.echo, err=True))
    return report, plot_strategies


# --- bench explain ----------------------------------------------------------------------------------------------------


@bench.command("explain")
@click.argument("trace", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="TRACE.json")
@report_options
def explain_trace(trace: Path) -> tuple[Report, Draw]:
    """Show where the time in a trace went (--trace of serve and generate), and how much of it was ideal.

    Ideal is the lowest possible cost of the work, learned from the steps of the trace: each prompt token at the best
    piece size, each new token at the best number of rows up to the number of unfinished sequences. GET /metrics
    (ideal_seconds, lost_seconds) reports the same parts, as learned by the engine so far.
    """
    from cppbatch.bench.explain import explain, plot_explanation

    return explain(trace), plot_explanation


# --- bench serve ------------------------------------------------------------------------------------------------------

_MAX_ROWS = 32  # of a step, for `of ideal`
_SIZE_OPTIONS = ("prompt_tokens", "output_tokens", "prefix_tokens", "samples", "samples_by")


@bench.command("serve")
@click.option(
    "--url", "urls", multiple=True, required=True, metavar="[NAME=]URL",
    help="Server URL, such as http://127.0.0.1:8080. Several servers are measured in turn and compared with the first.",
)  # fmt: skip
@click.option("--label", help="The server's name in the table, same as NAME= in --url.")
@option(
    "--workload", type=click.Choice(list(SIZES)), default="mixed",
    help="mixed: prompts and outputs of many lengths; fixed: all of one length; shared-prefix: prompts with a common "
    "prefix; fan-out: many samples of each prompt. Texts for speculative decoding, which the model ends itself: "
    f"{'; '.join(f'{name}: {text.about}' for name, text in TEXT_WORKLOADS.items())}.",
)  # fmt: skip
@option(
    "--requests", "n_requests", type=int, default=48,
    help="Requests per repeat; with fan-out, samples per repeat.",
)  # fmt: skip
@click.option(
    "--concurrency", type=int,
    help="Number of clients; each waits for its answer before sending the next request.  [default: 16]",
)  # fmt: skip
@click.option(
    "--rate", type=float, metavar="PER_SECOND",
    help="Instead of --concurrency: send requests at this average rate at random times, without waiting for answers.",
)  # fmt: skip
@click.option(
    "--prompt-tokens", callback=_lengths, metavar="N|LOW-HIGH",
    help="Approximate length of each prompt; for shared-prefix, excluding the prefix. Not for text workloads.  "
    "[default: the workload's]",
)  # fmt: skip
@click.option(
    "--output-tokens", callback=_lengths, metavar="N|LOW-HIGH",
    help="Length of each output; for text workloads, the maximum.  [default: the workload's]",
)  # fmt: skip
@option("--prefix-tokens", type=int, default=PREFIX_TOKENS, help="With shared-prefix: length of the common prefix.")
@option("--samples", type=int, default=SAMPLES, help="With fan-out: samples of each prompt.")
@option(
    "--samples-by", type=click.Choice(["requests", "n"]), default="requests",
    help="With fan-out: send one request per sample, or one request with n for all samples.",
)  # fmt: skip
@click.option(
    "--endpoint", type=click.Choice(["completions", "chat"]),
    help="/v1/completions or /v1/chat/completions.  [default: completions; for text workloads chat]",
)  # fmt: skip
@click.option("--model", help="The model's name on the server.  [default: the first of /v1/models]")
@click.option(
    "-m", "--model-file", metavar="MODEL",
    help="Use this GGUF file to report how close the servers come to the lowest possible cost (`of ideal`). Takes "
    "seconds before and after each load; run it on the servers' machine. Uses the engine's default settings.",
)  # fmt: skip
@click.option(
    "--api-key", envvar=["CPPBATCH_BENCH_API_KEY", "CPPBATCH_API_KEY"], show_envvar=True,
    help="API key, sent as a bearer token.",
)  # fmt: skip
@option("--warmup", type=int, default=4, help="Warm-up requests before the measurement.")
@option("--repeats", type=int, default=3, help="Number of measurements, each with new prompts.")
@click.option(
    "--seed", type=int,
    help="Seed for prompts and arrival times, to repeat a measurement after restarting a server.  [default: random]",
)  # fmt: skip
@click.option(
    "--latency-bound-ms", type=float, help="Count the requests whose first text arrives within this time (goodput)."
)
@option("--timeout", type=float, default=300, help="Maximum seconds per request.")
@report_options
def serve(urls: tuple[str, ...], label: str | None, model_file: str | None, **settings: Any) -> tuple[Report, Draw]:
    """Send requests to OpenAI-compatible servers and measure how fast they answer.

    \b
    cppbatch bench serve --url http://127.0.0.1:8080
    cppbatch bench serve --url ours=http://127.0.0.1:8080 --url other=http://127.0.0.1:8090 --plot both.png
    """
    from cppbatch.bench.load.compare_servers import compare_servers
    from cppbatch.bench.load.results import plot_load

    targets, load = _targets(urls, label), _load(**settings)
    with _load_ideal(model_file, load) as ideal, _progress(load) as progress:
        report = compare_servers(targets, load, progress, ideal)
    return report, plot_load


@contextlib.contextmanager
def _load_ideal(model_file: str | None, load: LoadSettings) -> Iterator[LoadIdeal | None]:
    if not model_file:
        yield None
        return
    from cppbatch.bench.bare_costs import bare_costs_of_model
    from cppbatch.bench.load.results import LoadIdeal
    from cppbatch.models.pull import choose_model

    clients = None if load.rate else load.concurrency
    samples = load.workload.samples if load.workload.samples_by == "n" else 1
    most_rows = min(_MAX_ROWS, (clients or _MAX_ROWS) * samples)
    with bare_costs_of_model(str(choose_model(model_file)), most_rows) as measure:
        yield LoadIdeal(measure, most_rows, clients)


def _targets(urls: tuple[str, ...], label: str | None) -> list[Target]:
    from cppbatch.bench.load.target import Target

    if label and len(urls) > 1:
        raise ConfigError(f"--label {label} applies to a single server; to name several, use --url NAME=URL")
    targets = [Target.read(f"{label}={url}" if label else url) for url in urls]
    for what, values in (("name", [each.label for each in targets]), ("address", [each.url for each in targets])):
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ConfigError(f"--url: two servers have the same {what} {twice}; give each server its own")
    return targets


def _load(
    *, workload: str, n_requests: int, concurrency: int | None, rate: float | None, seed: int | None, endpoint: Any,
    **others: Any,
) -> LoadSettings:  # fmt: skip
    from cppbatch.bench.load.workload import LoadSettings, make_workload

    if rate is not None and concurrency is not None:
        raise ConfigError("--rate and --concurrency cannot be combined: with --rate, clients do not wait for answers")
    sizes = {name: others.pop(name) for name in _SIZE_OPTIONS}
    return LoadSettings(
        workload=make_workload(workload, n_requests, **sizes), concurrency=16 if concurrency is None else concurrency,
        rate=rate, seed=secrets.randbelow(2**31) if seed is None else seed,
        endpoint=endpoint or ("chat" if workload in TEXT_WORKLOADS else "completions"), **others,
    )  # fmt: skip


@contextlib.contextmanager
def _progress(load: LoadSettings) -> Iterator[Progress]:
    """Shows the progress on stderr, if that is a terminal; rarely redrawn, so as not to disturb the measurement."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    with console.status("checking the servers ...", refresh_per_second=2) as status:

        def show(label: str, repeat: int, n_done: int, n_requests: int) -> None:
            what = f"repeat {repeat + 1} of {load.repeats}" if repeat >= 0 else "warming up"
            done = f", {n_done} of {n_requests} requests done" if n_requests else ""
            status.update(Text(f"{label}: {what}{done}"))

        yield show
