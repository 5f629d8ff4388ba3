"""`cppbatch memory`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from cppbatch.cli.engine_options import engine_options
from cppbatch.cli.report_options import Draw, report_options
from cppbatch.config import EngineConfig

if TYPE_CHECKING:
    from cppbatch.bench.report import Report


@click.command()
@partial(engine_options, without=("max_wait_ms", "trace"))
@report_options
@click.option("--load", is_flag=True, help="Then load the model, and show its actual memory use too.")
def memory(config: EngineConfig, load: bool) -> tuple[Report, Draw]:
    """Estimates the memory that an engine needs, without loading the model.

    --plot shows it over the context size and over the parallel sequences.
    """
    from cppbatch.bench.memory.memory_report import memory_report, plot_memory, with_measured

    report = memory_report(config)
    if load:
        from cppbatch.bench.memory.measure_memory import measure_memory

        report = with_measured(report, measure_memory(config))
    return report, plot_memory
