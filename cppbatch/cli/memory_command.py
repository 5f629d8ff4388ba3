"""`cppbatch memory`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click
import msgspec

from cppbatch.cli.engine_options import engine_options, given_settings
from cppbatch.cli.report_options import Draw, report_options
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError

if TYPE_CHECKING:
    from cppbatch.bench.report import Report


@click.command()
@partial(engine_options, without=("max_wait_ms", "trace"))
@report_options
@click.option(
    "--seq-len", type=click.IntRange(1), metavar="TOKENS",
    help="Tokens of each sequence, prompt and answer, in place of -c: -np times as many cells.",
)  # fmt: skip
@click.option(
    "--margin", type=click.FloatRange(0, 99), default=0, show_default=True, metavar="PERCENT",
    help="The part of the free memory that must stay free.",
)  # fmt: skip
@click.option("--load", is_flag=True, help="Then load the model, and show its actual memory use too.")
def memory(config: EngineConfig, seq_len: int | None, margin: float, load: bool) -> tuple[Report, Draw]:
    """Estimates the memory that an engine needs, without loading the model.

    Without -np or -c it shows the sizes that `serve`, `generate` and `batch` would choose without a profile. --plot
    shows it over the context size and over the parallel sequences.
    """
    from cppbatch.bench.memory.choose_sizes import candidates_for
    from cppbatch.bench.memory.memory_check import first_ample
    from cppbatch.bench.memory.memory_report import memory_report, plot_memory, with_measured

    given = given_settings()
    if seq_len:
        if "n_ctx" in given:
            raise ConfigError("--seq-len and -c exclude each other: -c is -np times --seq-len")
        config = msgspec.structs.replace(config, n_ctx=seq_len * config.n_parallel)
    elif len(candidates := candidates_for(config, given)) > 1:
        config = first_ample(candidates).config
    report = memory_report(config, margin=margin / 100)
    if load:
        from cppbatch.bench.memory.measure_memory import measure_memory

        report = with_measured(report, measure_memory(config))
    return report, plot_memory
