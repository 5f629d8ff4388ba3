"""`cppbatch bench strategies`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cppbatch.bench.strategies import STRATEGIES
from cppbatch.cli.engine_options import engine_options
from cppbatch.cli.report_options import Draw, report_options
from cppbatch.cli.values import lengths, names_of
from cppbatch.config import EngineConfig

if TYPE_CHECKING:
    from cppbatch.bench.report import Report

option = partial(click.option, show_default=True)

_CHOSEN_HERE = ("n_ctx", "max_queue", "swap_space", "prefix_cache", "prefix_cache_ram", "pooling", "trace")


@click.command()
@option(
    "--strategies", "names", callback=names_of(STRATEGIES), default=",".join(STRATEGIES), metavar="NAME,NAME...",
    help="Those to compare.",
)  # fmt: skip
@option("--requests", "n_requests", type=int, default=48, help="How many each strategy gets.")
@option("--prompt-tokens", callback=lengths, default="16-256", metavar="N|LOW-HIGH", help="Of each prompt.")
@option("--new-tokens", callback=lengths, default="16-256", metavar="N|LOW-HIGH", help="Of each output.")
@option("--rate", type=float, default=0.0, help="Requests that arrive a second; 0: all at once.")
@option("--max-wait-ms", type=float, default=50.0, help="How long a static batch is collected.")
@option("--bucket", type=int, default=64, help="static-padded: prompts are filled up to a multiple of it.")
@option("--seed", type=int, default=0, help="Of lengths, tokens and arrivals.")
@option("--repeats", type=int, default=3, help="Runs of each strategy.")
@report_options
@partial(engine_options, without=_CHOSEN_HERE)
def strategies(
    config: EngineConfig, names: tuple[str, ...], max_wait_ms: float, bucket: int, repeats: int, **work: Any
) -> tuple[Report, Draw]:
    """Compares ways to schedule the same requests: one by one, interleaved, in batches, and continuously."""
    from cppbatch.bench.strategies.compare_strategies import StrategyComparison, compare_strategies
    from cppbatch.bench.strategies.offline_workload import OfflineWorkload
    from cppbatch.bench.strategies.strategies_plot import plot_strategies

    compared = StrategyComparison(names=names, max_wait_ms=max_wait_ms, bucket=bucket, repeats=repeats)
    report = compare_strategies(config, compared, OfflineWorkload(**work), partial(click.echo, err=True))
    return report, plot_strategies
