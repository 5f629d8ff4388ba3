"""Options that several commands share, named as llama.cpp users know them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from functools import wraps
from pathlib import Path
from typing import Any, Literal, get_args

import click

from cppbatch.config import CacheType, EngineConfig, Pooling

Command = Callable[..., Any]

_DEFAULTS = EngineConfig(model_path="")


def option(*names: str, env: str, **settings: Any) -> Callable[[Command], Command]:
    """An option with its environment variable, CPPBATCH_<env>."""
    return click.option(*names, envvar=f"CPPBATCH_{env}", show_envvar=True, **{"show_default": True, **settings})


def _adapters(_context: object, _option: object, given: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """FILE or FILE=SCALE, each; a file's name may have a = in it."""
    return tuple(_adapter(each) for each in given)


def _adapter(given: str) -> tuple[str, float]:
    path, _, scale = given.rpartition("=")
    if path and not Path(given).is_file():
        with contextlib.suppress(ValueError):  # no number: part of the name
            return path, float(scale)
    return given, 1.0


_MODEL = option(
    "-m", "--model", env="MODEL", metavar="FILE",
    help="GGUF file. Without it: the only one in the models folder, else the default model, fetched.",
)  # fmt: skip

_ENGINE = [
    option("-c", "--ctx-size", "n_ctx", env="CTX_SIZE", type=int, default=_DEFAULTS.n_ctx, help="KV cells in all."),
    option(
        "-np", "--parallel", "n_parallel", env="PARALLEL", type=int, default=_DEFAULTS.n_parallel,
        help="Sequences that run at once.",
    ),
    option(
        "-b", "--batch-size", "n_batch", env="BATCH_SIZE", type=int, default=_DEFAULTS.n_batch,
        help="Most tokens of one step.",
    ),
    option(
        "-ub", "--ubatch-size", "n_ubatch", env="UBATCH_SIZE", type=int, default=_DEFAULTS.n_ubatch,
        help="Tokens computed at once within a step.",
    ),
    option(
        "-ngl", "--gpu-layers", "n_gpu_layers", env="GPU_LAYERS", type=int, default=_DEFAULTS.n_gpu_layers,
        help="Layers on the GPU; -1: all, 0: none.",
    ),
    option(
        "-t", "--threads", "n_threads", env="THREADS", type=int, default=_DEFAULTS.n_threads,
        help="Compute threads; 0: one for each core.",
    ),
    option(
        "-fa", "--flash-attn", "flash_attn", env="FLASH_ATTN", type=click.Choice(["auto", "on", "off"]),
        default=_DEFAULTS.flash_attn, help="Flash attention.",
    ),
    option(
        "--kv-layout", env="KV_LAYOUT", type=click.Choice(["auto", "unified", "per-sequence"]),
        default=_DEFAULTS.kv_layout,
        help="unified: all sequences share the cells; per-sequence: each has ctx-size / parallel of its own.",
    ),
    option(
        "-ctk", "--cache-type-k", "cache_type_k", env="CACHE_TYPE_K", type=click.Choice(get_args(CacheType)),
        default=_DEFAULTS.cache_type_k, help="How keys are kept in the KV cache.",
    ),
    option(
        "-ctv", "--cache-type-v", "cache_type_v", env="CACHE_TYPE_V", type=click.Choice(get_args(CacheType)),
        default=_DEFAULTS.cache_type_v, help="How values are kept; quantised ones need flash attention.",
    ),
    option(
        "--sampling", env="SAMPLING", type=click.Choice(["auto", "host", "backend"]), default=_DEFAULTS.sampling,
        help="backend: the GPU finds the likeliest tokens; host: the CPU; auto: backend where there is a GPU.",
    ),
    option(
        "--prefix-cache/--no-prefix-cache", env="PREFIX_CACHE", default=_DEFAULTS.prefix_cache,
        help="Compute the common beginning of requests once.",
    ),
    option(
        "--prefix-cache-ram", env="PREFIX_CACHE_RAM", type=int, default=_DEFAULTS.prefix_cache_ram,
        help="MiB of host memory for cached prefixes that had to leave their KV cells.",
    ),
    option(
        "--max-queue", env="MAX_QUEUE", type=int, default=_DEFAULTS.max_queue,
        help="Requests that may wait; more are refused with 429.",
    ),
    option(
        "--swap-space", env="SWAP_SPACE", type=int, default=_DEFAULTS.swap_space,
        help="MiB of host memory for sequences that must give up their KV cells; 0: compute them again.",
    ),
    option(
        "--lora", env="LORA", metavar="FILE[=SCALE]", multiple=True, callback=_adapters,
        help="A LoRA adapter, at scale 1 unless told otherwise; may be given several times. Requests may choose.",
    ),
    option(
        "--target-step-ms", env="TARGET_STEP_MS", type=float, default=_DEFAULTS.target_step_ms,
        help="How long a step may take while anybody decodes; 0: 2.5 times a step without prompts.",
    ),
    option(
        "--trace", env="TRACE", metavar="FILE.json", default=_DEFAULTS.trace, show_default=False,
        help="Write what each step does to this file, for ui.perfetto.dev; for looking into things, it grows fast.",
    ),
    option(
        "--pooling", env="POOLING", type=click.Choice(get_args(Pooling)), default=_DEFAULTS.pooling,
        help="Give vectors in place of text, pooled like this; embedding models and rerankers do so by themselves.",
    ),
]  # fmt: skip


def engine_options(command: Command, *, without: Collection[str] = ()) -> Command:
    """Adds the engine's options; the command gets `config`, an `EngineConfig`, in their place.

    `without`: fields of `EngineConfig` that the command chooses by itself; there are no options for these.
    """

    @wraps(command)
    def with_config(model: str | None, verbose: bool, **arguments: Any) -> Any:
        from cppbatch.models.pull import choose_model

        _set_up_logs(verbose, arguments.pop("log_format", None))
        settings = {name: arguments.pop(name) for name in EngineConfig.__struct_fields__ if name in arguments}
        EngineConfig(model_path="", **settings)  # complains about flags before a model is fetched
        return command(config=EngineConfig(model_path=str(choose_model(model)), **settings), **arguments)

    wrapped: Command = click.option("-v", "--verbose", is_flag=True, help="Show llama.cpp's log.")(with_config)
    for add in reversed([_MODEL, *_ENGINE]):
        wrapped = add(wrapped)
    options: list[click.Parameter] = wrapped.__click_params__  # type: ignore[attr-defined]  # where click collects them
    options[:] = [each for each in options if each.name not in without]
    return wrapped


def _set_up_logs(verbose: bool, log_format: Literal["text", "json"] | None) -> None:
    """With a `log_format`, as a server's."""
    if log_format:
        from cppbatch.server.logs import set_up

        set_up(log_format, verbose=verbose)
        return
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
