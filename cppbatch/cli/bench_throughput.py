"""`cppbatch bench throughput`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cppbatch.cli.engine_options import engine_options
from cppbatch.cli.report_options import Draw, report_options
from cppbatch.cli.values import names_of, numbers
from cppbatch.config import EngineConfig

if TYPE_CHECKING:
    from cppbatch.bench.report import Report

option = partial(click.option, show_default=True)

_LAYOUTS, _FLASH_ATTNS = ("unified", "per-sequence"), ("on", "off")
_KINDS = ("greedy", "sampled", "defaults", "penalised", "chain", "json", "logprobs")
_CHOSEN_HERE = (
    "n_ctx", "n_parallel", "flash_attn", "kv_layout", "prefix_cache", "prefix_cache_ram", "max_queue", "swap_space",
    "target_step_ms", "pooling", "trace",
)  # fmt: skip


@click.command()
@option(
    "-B", "--batch-sizes", callback=numbers, default="1,4,8,16", metavar="N,N...", help="Sequences that run at once."
)
@option(
    "--layouts", callback=names_of(_LAYOUTS), default=",".join(_LAYOUTS), metavar="NAME,NAME...", help="KV layouts."
)
@option(
    "--flash-attns", callback=names_of(_FLASH_ATTNS), default=",".join(_FLASH_ATTNS), metavar="on,off",
    help="With and without flash attention.",
)  # fmt: skip
@option(
    "--kinds", callback=names_of(_KINDS), default="greedy", metavar="NAME,NAME...",
    help=f"Kinds of requests: {', '.join(_KINDS)}.",
)  # fmt: skip
@option("--prompt-tokens", type=int, default=128, help="Length of each prompt.")
@option("--new-tokens", type=int, default=64, help="Length of each output.")
@option("--repeats", type=int, default=3, help="Measurements of each figure, after a warm-up.")
@report_options
@partial(engine_options, without=_CHOSEN_HERE)
def throughput(config: EngineConfig, **sizes: Any) -> tuple[Report, Draw]:
    """Measures prefill and decode tokens/s beside a bare loop over llama_decode, and where the time of a step goes."""
    from cppbatch.bench.throughput import Sizes, measure_throughput
    from cppbatch.bench.throughput_plot import plot_throughput

    return measure_throughput(config, Sizes(**sizes), partial(click.echo, err=True)), plot_throughput
