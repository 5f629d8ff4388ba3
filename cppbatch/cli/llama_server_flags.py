"""llama-server's flags that `cppbatch serve` renames, ignores or refuses, so that existing launch scripts work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import click

from cppbatch.cli.engine_options import Command, Option, with_options
from cppbatch.cli.option_groups import GroupedCommand

flags_log = logging.getLogger("cppbatch.flags")


class UnneededFlag(NamedTuple):
    """A flag of llama-server that is accepted and ignored."""

    names: str
    """The names of the flag, separated by spaces."""
    instead: str
    """What applies instead."""
    value: str = ""
    """The placeholder for the flag's value; "": it has none."""
    values: tuple[str, ...] = ()
    """The only accepted values, which have no effect. (): any."""


class RefusedFlag(NamedTuple):
    """A flag of llama-server that would change an answer or the safety of the machine, and does not exist here."""

    names: str
    reason: str
    llama_env: str = ""
    value: str = ""
    """The placeholder for the flag's value; "": it has none."""


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
    "--spec-default": ("--spec", "suffix"),
    "--log-jsonl": ("--log-format", "json"),
    "--no-log-jsonl": ("--log-format", "text"),
    "--log-disable": ("--log-level", "off"),
}
"""Flags without a value, and their equivalents here."""
_CODER = "ggml-org/Qwen2.5-Coder-"
_CODER_SIZES = "--port 8012 -ub 1024 -b 1024 -c 0"
_CODER_DRAFT = f"-hfd {_CODER}0.5B-Q8_0-GGUF:qwen2.5-coder-0.5b-q8_0.gguf"
_GPT_OSS = "--port 8013 -ub 2048 -b 32768 -np 2 -c 262144 --temp 1 --top-p 1 --top-k 0 --min-p 0.01"
PRESETS: Mapping[str, tuple[str, ...]] = {
    name: tuple(flags.split())
    for name, flags in {
        "--embd-gemma-default": "-hf ggml-org/embeddinggemma-300M-qat-q4_0-GGUF -hff embeddinggemma-300M-qat-Q4_0.gguf "
        "--port 8011 -ub 2048 -b 2048 -np 32 -c 65536",
        **{
            f"--fim-qwen-{size}b-{end}": f"-hf {_CODER}{size.upper()}B-Q8_0-GGUF -hff qwen2.5-coder-{size}b-q8_0.gguf "
            f"{_CODER_SIZES} {draft}"
            for size, end, draft in (
                ("1.5", "default", ""), ("3", "default", ""), ("7", "default", ""),
                ("7", "spec", _CODER_DRAFT), ("14", "spec", _CODER_DRAFT),
            )
        },
        "--fim-qwen-30b-default": "-hf ggml-org/Qwen3-Coder-30B-A3B-Instruct-Q8_0-GGUF "
        f"-hff qwen3-coder-30b-a3b-instruct-q8_0.gguf {_CODER_SIZES}",
        "--gpt-oss-20b-default": f"-hf ggml-org/gpt-oss-20b-GGUF -hff gpt-oss-20b-mxfp4.gguf {_GPT_OSS}",
        "--gpt-oss-120b-default": f"-hf ggml-org/gpt-oss-120b-GGUF {_GPT_OSS}",
        "--vision-gemma-4b-default": "-hf ggml-org/gemma-3-4b-it-qat-GGUF --port 8014 -c 0",
        "--vision-gemma-12b-default": "-hf ggml-org/gemma-3-12b-it-qat-GGUF --port 8014 -c 0",
    }.items()
}  # fmt: skip
"""Flags that stand for a model of the hub with its settings (llama.cpp's common/arg.cpp)."""

_STARTED = "the model is ready when the server answers"
_TEMPLATE = "chat templates are always Jinja templates, or llama.cpp's own by name"
_LINES = "--log-format chooses between text and JSON"

_ONE_THREADS = "one set of threads computes everything; --threads, --cpu-mask and --cpu-range apply to it"
_WAITING = "OMP_WAIT_POLICY controls how compute threads wait"
_BINDING = "OMP_PROC_BIND=true binds each thread to a core"
_PRIORITY = "set the priority with nice or a systemd unit"
_ADAPTS = "drafts adapt to their acceptance and the cost of a step"
_NGRAMS = "matches of several lengths count by how often they were right; --spec-draft-n-max limits the drafts"
_OWN_PAGE = "this server's web page has its own settings"
_NO_TOOLS = "the server runs no tools: clients run those that a model calls"

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
    UnneededFlag("-tb --threads-batch", _ONE_THREADS, "N"),
    UnneededFlag("-td --threads-draft --spec-draft-threads", _ONE_THREADS, "N"),
    UnneededFlag("-tbd --threads-batch-draft --spec-draft-threads-batch", _ONE_THREADS, "N"),
    UnneededFlag("-Cb --cpu-mask-batch", _ONE_THREADS, "M"),
    UnneededFlag("-Crb --cpu-range-batch", _ONE_THREADS, "LO-HI"),
    UnneededFlag("-Cd --cpu-mask-draft --spec-draft-cpu-mask", _ONE_THREADS, "M"),
    UnneededFlag("-Crd --cpu-range-draft --spec-draft-cpu-range", _ONE_THREADS, "LO-HI"),
    UnneededFlag("-Cbd --cpu-mask-batch-draft --spec-draft-cpu-mask-batch", _ONE_THREADS, "M"),
    UnneededFlag("--cpu-strict", _BINDING, "0|1"),
    UnneededFlag("--cpu-strict-batch", _BINDING, "0|1"),
    UnneededFlag("--cpu-strict-draft --spec-draft-cpu-strict", _BINDING, "0|1"),
    UnneededFlag("--cpu-strict-batch-draft --spec-draft-cpu-strict-batch", _BINDING, "0|1"),
    UnneededFlag("--threads-http", "one thread answers all connections", "N"),
    UnneededFlag("--prio", _PRIORITY, "N"),
    UnneededFlag("--prio-batch", _PRIORITY, "N"),
    UnneededFlag("--prio-draft --spec-draft-prio", _PRIORITY, "N"),
    UnneededFlag("--prio-batch-draft --spec-draft-prio-batch", _PRIORITY, "N"),
    UnneededFlag("--poll", _WAITING, "N"),
    UnneededFlag("--poll-batch", _WAITING, "N"),
    UnneededFlag("--poll-draft --spec-draft-poll", _WAITING, "N"),
    UnneededFlag("--poll-batch-draft --spec-draft-poll-batch", _WAITING, "N"),
    UnneededFlag("-to --timeout", "--request-timeout limits a request, --idle-timeout a client that stops", "SECONDS"),
    UnneededFlag("--perf --no-perf", "/metrics and timings are always measured"),
    UnneededFlag("-lv --verbosity --log-verbosity", "--verbose shows llama.cpp's log", "N"),
    UnneededFlag("--log-colors", _LINES, "on|off|auto"),
    UnneededFlag("--log-prefix --no-log-prefix --log-timestamps --no-log-timestamps", _LINES),
    UnneededFlag("--spec-draft-n-min", _ADAPTS, "N"),
    UnneededFlag("--draft-min --draft-n-min", _ADAPTS, "N"),
    UnneededFlag("--spec-draft-p-min --draft-p-min", _ADAPTS, "P"),
    UnneededFlag("--spec-draft-p-split --draft-p-split", _ADAPTS, "P"),
    *(
        UnneededFlag(f"--spec-ngram-{name}", _NGRAMS, "N")
        for name in (
            "mod-n-min mod-n-max mod-n-match simple-size-n simple-size-m simple-min-hits map-k-size-n map-k-size-m "
            "map-k-min-hits map-k4v-size-n map-k4v-size-m map-k4v-min-hits size-n size-m min-hits"
        ).split()
    ),
    UnneededFlag(
        "--spec-draft-backend-sampling --no-spec-draft-backend-sampling", "drafts are selected where that is faster"
    ),
    UnneededFlag("--spec-synth-len", "it is for benchmarks: the model decides which drafts are accepted", "L"),
    UnneededFlag("--spec-synth-rates", "it is for benchmarks: the model decides which drafts are accepted", "P,..."),
    UnneededFlag("-lcs --lookup-cache-static", "drafts come from earlier texts in memory (--spec)", "FILE"),
    UnneededFlag("-lcd --lookup-cache-dynamic", "drafts come from earlier texts in memory (--spec)", "FILE"),
    UnneededFlag("--ui-config --webui-config", _OWN_PAGE, "JSON"),
    UnneededFlag("--ui-config-file --webui-config-file", _OWN_PAGE, "FILE"),
    UnneededFlag("--no-ui-mcp-proxy --no-webui-mcp-proxy", "the server is never a proxy for other hosts"),
    UnneededFlag("-no-ag --no-agent", _NO_TOOLS),
    UnneededFlag("--tools-runtime", _NO_TOOLS, "OPTION"),
)
"""Flags that do not affect any response."""


REFUSED = (
    RefusedFlag("--tools", _NO_TOOLS, "LLAMA_ARG_TOOLS", "NAMES"),
    RefusedFlag("-ag --agent", _NO_TOOLS, "LLAMA_ARG_AGENT"),
    RefusedFlag(
        "--mcp-servers-config", "clients connect to MCP servers, not this one", "LLAMA_ARG_MCP_SERVERS_CONFIG", "FILE"
    ),
    RefusedFlag(
        "--mcp-servers-json", "clients connect to MCP servers, not this one", "LLAMA_ARG_MCP_SERVERS_JSON", "JSON"
    ),
    RefusedFlag(
        "--ui-mcp-proxy --webui-mcp-proxy", "the server is never a proxy for other hosts", "LLAMA_ARG_UI_MCP_PROXY"
    ),
)
"""The flags that are refused."""


class LlamaServerCommand(GroupedCommand):
    """A command that accepts llama-server's names for its flags, with _ or - between the words."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Replaces flags of `RENAMED` and `PRESETS` before click parses them."""
        renamed = {**RENAMED, **PRESETS}
        return super().parse_args(ctx, [part for arg in args for part in renamed.get(arg.replace("_", "-"), (arg,))])


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


def refused_flags(command: Command) -> Command:
    """Adds the flags of `REFUSED`, which say why."""

    def refuse(flag: RefusedFlag, _context: object, _option: object, given: str | bool | None) -> None:
        if given:
            raise click.UsageError(f"{flag.names.replace(' ', ' or ')}: {flag.reason}; leave it out")

    return with_options(
        command,
        [
            click.option(
                *flag.names.split(),
                envvar=flag.llama_env,
                is_flag=not flag.value,
                default=None,
                hidden=True,
                expose_value=False,
                callback=partial(refuse, flag),
            )
            for flag in REFUSED
        ],
    )


def information_flags(command: Command) -> Command:
    """Adds the flags that print something and exit, as in llama-server."""

    def flag(*names: str, help: str, lines: Callable[[click.Context], Iterable[str]]) -> Option:
        def show(context: click.Context, _option: object, given: bool) -> None:
            if given:
                for line in lines(context):
                    click.echo(line)
                context.exit()

        return click.option(*names, is_flag=True, is_eager=True, expose_value=False, callback=show, help=help)

    return with_options(
        command,
        [
            flag("--version", help="Print the version and exit.", lines=_version_lines),
            flag("-cl", "--cache-list", help="Print the models in the models folder and exit.", lines=_model_lines),
            flag("--completion-bash", help="Print a completion script for bash and exit.", lines=_completion_lines),
            flag("--usage", help="As --help.", lines=lambda context: [context.get_help()]),
        ],
    )


def _version_lines(_context: object) -> Iterable[str]:
    try:
        binding = version("llama-cpp-python")
    except PackageNotFoundError:
        binding = "is not installed"
    return [f"cppbatch {version('cppbatch')}, llama-cpp-python {binding}"]


def _model_lines(_context: object) -> Iterable[str]:
    from cppbatch.models.find import models_folder, models_in, short_name

    found = models_in(models_folder())
    return [
        f"number of models in the models folder: {len(found)}",
        *(f"{i:4}. {short_name(path)}" for i, path in enumerate(found, 1)),
    ]


def _completion_lines(_context: object) -> Iterable[str]:
    from click.shell_completion import BashComplete, ShellComplete

    script = BashComplete(click.Group(), {}, "cppbatch", "_CPPBATCH_COMPLETE")
    return [ShellComplete.source(script)]  # that of `BashComplete` runs bash to learn its version


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
