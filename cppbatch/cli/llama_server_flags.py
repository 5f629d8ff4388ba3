"""llama-server's flags that `cppbatch serve` renames or ignores, so that existing launch scripts work."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import wraps
from typing import Any, NamedTuple

import click

from cppbatch.cli.engine_options import Command, with_options
from cppbatch.cli.option_groups import GroupedCommand

flags_log = logging.getLogger("cppbatch.flags")


class UnneededFlag(NamedTuple):
    """A flag of llama-server that is accepted and ignored."""

    names: str
    """Its names, separated by spaces."""
    instead: str
    """What applies instead."""
    value: str = ""
    """The placeholder for the flag's value; "": it has none."""
    values: tuple[str, ...] = ()
    """The only accepted values, which have no effect. (): any."""


RENAMED: Mapping[str, tuple[str, ...]] = {
    "-kvu": ("--kv-layout", "unified"),
    "--kv-unified": ("--kv-layout", "unified"),
    "-no-kvu": ("--kv-layout", "per-sequence"),
    "--no-kv-unified": ("--kv-layout", "per-sequence"),
    "-nr": ("--repack", "off"),
    "--no-repack": ("--repack", "off"),
    "--mmap": ("--load-mode", "mmap"),
    "--no-mmap": ("--load-mode", "none"),
    "--mlock": ("--load-mode", "mmap+mlock"),
}
"""Flags without a value, and their equivalents here."""

_STARTED = "the model is ready when the server answers"
_TEMPLATE = "chat templates are always Jinja templates, or llama.cpp's own by name"
_LINES = "--log-format chooses between text and JSON"

UNNEEDED = (
    UnneededFlag("-cb --cont-batching -nocb --no-cont-batching", "batching is always continuous"),
    UnneededFlag("--jinja --no-jinja", _TEMPLATE),
    UnneededFlag(
        "--embedding --embeddings --rerank --reranking", "the model type determines the output; see --pooling"
    ),
    UnneededFlag("--warmup --no-warmup", _STARTED),
    UnneededFlag(
        "-bs --backend-sampling", "--sampling auto, the default, already selects tokens on the GPU where possible"
    ),
    UnneededFlag("--offline", "a local model is not downloaded again; HF_HUB_OFFLINE=1 disables the hub"),
    UnneededFlag("--cache-idle-slots --no-cache-idle-slots", "any request can use any cached prefix"),
    UnneededFlag("--cache-reuse", "the prefix cache shares prefixes only; other parts are recomputed", "N"),
    UnneededFlag("-sps --slot-prompt-similarity", "any request can use any cached prefix", "SIMILARITY"),
    UnneededFlag("-dt --defrag-thold", "KV cells are never fragmented", "N"),
    UnneededFlag("-tb --threads-batch", "--threads applies to both prefill and decode", "N"),
    UnneededFlag("-td --threads-draft --spec-draft-threads", "--threads also applies to the draft model", "N"),
    UnneededFlag(
        "-tbd --threads-batch-draft --spec-draft-threads-batch", "--threads also applies to the draft model", "N"
    ),
    UnneededFlag("--threads-http", "one thread answers all connections", "N"),
    UnneededFlag("--prio", "set the priority with nice or a systemd unit", "N"),
    UnneededFlag("--prio-batch", "set the priority with nice or a systemd unit", "N"),
    UnneededFlag("--poll", "OMP_WAIT_POLICY controls how compute threads wait", "N"),
    UnneededFlag("--poll-batch", "OMP_WAIT_POLICY controls how compute threads wait", "N"),
    UnneededFlag("-to --timeout", "--request-timeout limits a request, --idle-timeout a client that stops", "SECONDS"),
    UnneededFlag("--perf --no-perf", "/metrics and timings are always measured"),
    UnneededFlag("-lv --verbosity --log-verbosity", "--verbose shows llama.cpp's log", "N"),
    UnneededFlag("--log-colors", _LINES, "on|off|auto"),
    UnneededFlag("--log-prefix --no-log-prefix --log-timestamps --no-log-timestamps", _LINES),
    UnneededFlag("--spec-draft-n-min", "the number of drafts adapts to their acceptance and the cost of a step", "N"),
    UnneededFlag("--spec-draft-p-min --draft-p-min", "drafts adapt to their acceptance and the cost of a step", "P"),
    UnneededFlag(
        "--spec-draft-p-split --draft-p-split", "drafts adapt to their acceptance and the cost of a step", "P"
    ),
    UnneededFlag(
        "--reasoning-format", "reasoning is returned as reasoning_content", "auto or deepseek", ("auto", "deepseek")
    ),
    UnneededFlag("--prefill-assistant", "a final assistant message is continued; see continue_final_message"),
)
"""Flags that do not affect any response."""


class LlamaServerCommand(GroupedCommand):
    """A command that accepts llama-server's names for its flags, with _ or - between the words."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As in click, after `RENAMED`."""
        return super().parse_args(ctx, [part for arg in args for part in RENAMED.get(arg.replace("_", "-"), (arg,))])


def list_devices_flag(command: Command) -> Command:
    """Adds --list-devices, which prints the devices as llama-server does."""

    @wraps(command)
    def with_list(list_devices: bool, **arguments: Any) -> Any:
        if not list_devices:
            return command(**arguments)
        from cppbatch.llama import Backend, RpcConnections
        from cppbatch.rpc_endpoint import parse_endpoint

        backend = Backend.get()
        connections = RpcConnections([parse_endpoint(each) for each in arguments["rpc"]])
        found = [each for each in backend.devices() if each.kind != "CPU"]
        click.echo("Available devices:")
        for each in found:
            memory = f"{each.memory_total >> 20} MiB, {each.memory_free >> 20} MiB free"
            click.echo(f"  {each.name}: {each.description} ({memory})")
        if not found:
            click.echo("  (none)")
        connections.close()
        return None

    help = "Print the names of the devices, with those of --rpc, and exit."
    return with_options(with_list, [click.option("--list-devices", is_flag=True, help=help)])


def unneeded_flags(command: Command) -> Command:
    """Adds the flags of `UNNEEDED`. Each one given is logged, with what applies instead."""

    @wraps(command)
    def with_flags_logged(**arguments: Any) -> Any:
        for i, flag in enumerate(UNNEEDED):
            if arguments.pop(_variable(i)):
                flags_log.info("%s: no effect; %s", flag.names.replace(" ", " or "), flag.instead)
        return command(**arguments)

    return with_options(
        with_flags_logged,
        [
            click.option(
                *flag.names.split(),
                _variable(i),
                type=click.Choice(flag.values) if flag.values else None,
                is_flag=not flag.value,
                default=None,
                hidden=True,
            )
            for i, flag in enumerate(UNNEEDED)
        ],
    )


def _variable(i: int) -> str:
    return f"unneeded_{i}"
