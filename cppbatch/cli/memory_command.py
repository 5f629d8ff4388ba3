"""`cppbatch memory`."""

from __future__ import annotations

import sys
from functools import partial, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cppbatch.cli.engine_options import Command, engine_options, given_settings, with_options
from cppbatch.cli.report_options import Draw, report_options
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError

if TYPE_CHECKING:
    from cppbatch.bench.report import Report


def _shape_options(command: Command) -> Command:
    """Adds --shape and --type, as alternatives to a file. The exit code is 1 if memory is insufficient."""

    @wraps(command)
    def with_shape(shape: str | None, weights: str, model: str | None, **arguments: Any) -> None:
        from cppbatch.models.synthetic import LLAMA2_VOCAB, LLAMA3_VOCAB, OLDER_SHAPES, SHAPES, byte_vocab, write_llama

        with TemporaryDirectory() as folder:
            if shape:
                if model:
                    raise click.UsageError("--shape and -m cannot be combined: --shape replaces a model file")
                vocab = byte_vocab(LLAMA2_VOCAB if shape in OLDER_SHAPES else LLAMA3_VOCAB)
                file, sizes = Path(folder) / f"{shape}.{weights}.gguf", {**SHAPES, **OLDER_SHAPES}[shape]
                model = str(write_llama(file, sizes, quant=weights, vocab=vocab, is_hollow=True))
            report = command(model=model, **arguments)
        if not all(demand.will_fit for demand in report.settings["demands"]):
            sys.exit(1)

    options = [
        click.option(
            "--shape", type=click.Choice(["1B", "7B", "8B", "13B", "70B"]), default=None,
            help="Estimate for a Llama model of this size instead of a file: 7B and 13B as Llama 2, the others as "
            "Llama 3.",
        ),
        click.option(
            "--type", "weights", type=click.Choice(["Q4_0", "Q8_0", "F16"]), default="Q4_0", show_default=True,
            help="Weight type for --shape.",
        ),
    ]  # fmt: skip
    return with_options(with_shape, options)


@click.command()
@_shape_options
@partial(engine_options, without=("max_wait_ms", "trace"))
@report_options
@click.option(
    "--seq-len", type=click.IntRange(1), metavar="TOKENS",
    help="Tokens per sequence (prompt plus answer), instead of -c; sets -c to -np times this.",
)  # fmt: skip
@click.option(
    "--margin", type=click.FloatRange(0, 99), default=0, show_default=True, metavar="PERCENT",
    help="Fraction of the free memory to keep free.",
)  # fmt: skip
@click.option(
    "--overhead", is_flag=True,
    help="Show the extra memory for several sequences over one, in percent, by number and length.",
)  # fmt: skip
@click.option("--load", is_flag=True, help="Also load the model and show its actual memory use.")
def memory(
    config: EngineConfig, *, seq_len: int | None, margin: float, overhead: bool, load: bool
) -> tuple[Report, Draw]:
    """Estimate the memory that a model needs, without loading it.

    Without -np or -c, shows the sizes that `serve`, `generate` and `batch` would choose without a profile. --plot draws
    the estimate over context size and number of sequences. The exit code is 1 if memory is insufficient.
    """
    from cppbatch.bench.memory_report import (
        measure_memory,
        memory_overhead,
        memory_report,
        plot_memory,
        plot_overhead,
        with_measured,
    )  # fmt: skip
    from cppbatch.sizing.attention import plan_attention
    from cppbatch.sizing.memory_check import first_ample
    from cppbatch.sizing.placement import describe_placements
    from cppbatch.sizing.sizes import SIZES, candidates_for

    given = given_settings()
    if overhead:
        if seq_len or load or not given.isdisjoint(SIZES):
            raise ConfigError("--overhead covers many sizes: leave out -np, -c, --seq-len and --load")
        return memory_overhead(config), plot_overhead
    if seq_len:
        if "n_batch" in given and "n_parallel" not in given:
            raise ConfigError(
                f"--batch-size (-b) sets the tokens per step; for {config.n_batch} parallel sequences give -np "
                f"{config.n_batch}"
            )
        if "n_ctx" in given:
            raise ConfigError("--seq-len and -c cannot be combined: -c is -np times --seq-len")
        config = msgspec.structs.replace(config, n_ctx=seq_len * config.n_parallel)
    config = plan_attention(config, given).config
    candidates = [config] if seq_len else candidates_for(config, given)
    others: list[str] = []
    if len(candidates) == 1 and config.is_placed:
        config = candidates[0]
    else:
        planned = first_ample(candidates, decided=given)
        if planned.speeds and planned.estimate:
            others = describe_placements(candidates, planned.estimate.devices, given)
        config = planned.config
    report = memory_report(config, margin=margin / 100)
    report.notes.extend(others)
    if load:
        report = with_measured(report, measure_memory(config))
    return report, plot_memory
