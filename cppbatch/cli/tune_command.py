"""`cppbatch tune`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click
from rich.console import Console

from cppbatch.cli.engine_options import engine_options, given_settings
from cppbatch.cli.report_options import Draw, numbers, report_options
from cppbatch.config import DRAFT_SETTINGS, MEDIA_SETTINGS, EngineConfig
from cppbatch.errors import ConfigError
from cppbatch.interrupts import interrupt_on_termination

if TYPE_CHECKING:
    from cppbatch.bench.report import Report


@click.command()
@partial(
    engine_options,
    without=(
        *DRAFT_SETTINGS, "max_wait_ms", "context_shift", "n_keep", "trace", *MEDIA_SETTINGS,
    ),
)  # fmt: skip
@report_options
@click.option("--max-parallel", type=click.IntRange(1, 256), default=64, show_default=True, help="Largest -np to try.")
@click.option(
    "-B", "--batch-sizes", callback=numbers, metavar="N,N...",
    help="Values of -np to compare.  [default: 1, 2, 4 ... until throughput stops improving]",
)  # fmt: skip
@click.option("--target-latency-ms", type=float, default=None, help="Maximum time between two tokens of a sequence.")
@click.option("--max-minutes", type=float, default=5, show_default=True, help="Maximum time for measuring.")
@click.option("--dry-run", is_flag=True, help="Show the best settings without writing a profile.")
def tune(
    *, config: EngineConfig, max_parallel: int, batch_sizes: tuple[int, ...] | None, target_latency_ms: float | None,
    max_minutes: float, dry_run: bool,
) -> tuple[Report, Draw]:  # fmt: skip
    """Find the best settings for this model on this machine.

    Tunes -np, KV layout, flash attention, -ub and threads; settings given as flags are kept. Each sequence gets -c /
    -np cells. `serve`, `generate` and `batch` use the resulting profile.
    """
    from cppbatch.bench.quality import measure_proposal
    from cppbatch.bench.tune.tuner import Tuner, check_limits
    from cppbatch.bench.tune.tuning_report import plot_tuning, tuning_report
    from cppbatch.sizing.profile import save_profile

    interrupt_on_termination()
    check_limits(target_latency_ms, max_minutes)
    if batch_sizes and "n_parallel" in given_settings():
        raise ConfigError("--batch-sizes and -np cannot be combined: --batch-sizes lists the values of -np to compare")
    console = Console(stderr=True)
    with console.status("tuning") as status:
        tuning = Tuner(
            config,
            given=given_settings(),
            most_parallel=max(batch_sizes) if batch_sizes else max_parallel,
            batch_sizes=batch_sizes or (),
            target_ms=target_latency_ms,
            seconds=60 * max_minutes,
            progress=status.update,
        ).run()
        measured = measure_proposal(tuning.config, given_settings(), status.update)
    report = tuning_report(tuning)
    if measured:
        report.notes.append(measured)
    if dry_run:
        return report, plot_tuning
    path = save_profile(config, tuning.settings(), tuning.figures(), tuning.step_ms())
    click.echo(f"wrote {path}; serve, generate and batch now use it", err=True)
    return report, plot_tuning
