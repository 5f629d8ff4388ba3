"""Settings before a model is loaded: the profile, sizes that fit into memory, and the lines that report them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from msgspec.structs import replace

from cppbatch.cli.output import format_bytes, format_count
from cppbatch.config import CPU_PARTS, EngineConfig, available_threads
from cppbatch.errors import ModelError
from cppbatch.models.attention_times import RequestSizes
from cppbatch.models.draft_files import describe_draft
from cppbatch.models.inspect import ModelFacts, encoded_media, inspect_model
from cppbatch.sizing.attention import ATTENTION, plan_attention
from cppbatch.sizing.demand import HOST, format_gib, location, memory_demands
from cppbatch.sizing.estimate import MemoryEstimate
from cppbatch.sizing.machine import free_host_memory
from cppbatch.sizing.memory_check import Planned, check_planned, first_ample
from cppbatch.sizing.placement import Engines, describe_speeds
from cppbatch.sizing.profile import profile_path
from cppbatch.sizing.profile import use_profile as with_profile
from cppbatch.sizing.sizes import SIZES, candidates_for


def plan_start(
    config: EngineConfig,
    given: Collection[str],
    engines: Engines,
    *,
    use_profile: bool,
    memory_check: bool,
    say: Callable[[str], object],
    says_start: bool = True,
    sizes: RequestSizes | None = None,
) -> EngineConfig:
    """`config` with the settings of its profile, and with sizes that fit where neither sets them.

    `given`: the settings that the user has given. `engines`: the settings of all engines. `memory_check`: False skips
    the memory estimate. `say` gets the lines; without `says_start` only the one about the profile in use. `sizes`:
    those of the requests, if they are known. Raises `ConfigError` if the engines need more memory than is free.
    """
    decided = set(given)
    if use_profile:
        used = with_profile(config, given)
        config, decided = used.config, decided | used.decided
        if used.line:
            say(used.line)
    candidates = candidates_for(config, decided) if memory_check else [config]
    attention = plan_attention(candidates[0], decided, sizes)
    planned = Planned(attention.config, None)
    if memory_check:
        planned = first_ample([_with_attention(each, attention.config) for each in candidates], engines, decided)
        check_planned(planned, engines)
    if says_start:
        _say_what_runs(planned, is_chosen=not decided >= SIZES, misses_profile=use_profile, say=say)
        for line in filter(None, (attention.line, attention.proposal)):
            say(f"attention: {line}")
    return planned.config


def _with_attention(config: EngineConfig, planned: EngineConfig) -> EngineConfig:
    return replace(config, **{name: getattr(planned, name) for name in ATTENTION})


def _say_what_runs(planned: Planned, *, is_chosen: bool, misses_profile: bool, say: Callable[[str], object]) -> None:
    """`misses_profile`: whether to mention a missing profile."""
    try:
        facts = inspect_model(Path(planned.config.model_path))
    except ModelError:  # loading reports what is wrong with the file
        return
    say(model_line(planned.config, facts, planned.estimate))
    if facts.pooling or planned.config.pooling:
        return  # sequences keep no cells, so there is nothing to tune
    say(sizes_line(planned.config, planned.estimate, free_host_memory(), chosen=is_chosen))
    if planned.speeds:
        say(f"placed with --prefer {planned.config.prefer}: {describe_speeds(planned.config, planned.speeds)}")
    if misses_profile and not os.path.isfile(profile_path(planned.config)):
        say("optional: `cppbatch tune` finds the fastest settings for this model, in up to 5 minutes (no profile yet)")


def model_line(config: EngineConfig, facts: ModelFacts, estimate: MemoryEstimate | None) -> str:
    """The model with the number and type of its weights, and the devices that run it.

    `estimate`: for the engines, one per worker; None: unknown, and so are the devices.
    """
    name = Path(config.model_path).stem
    weights = f"{format_count(facts.n_params)} weights, mostly {facts.main_type}, {format_bytes(facts.size_bytes)}"
    if config.mmproj:
        weights += f", with {' and '.join(_kinds_of_media(Path(config.mmproj)))}"
    if facts.draft_heads and estimate:
        is_used = any(buffer.owner == "draft head" for buffer in estimate.footprints[0].buffers)
        weights += f", with a draft head{'' if is_used else ' that is not used'} (--spec {config.spec})"
    if config.draft_model and estimate and any(b.owner == "draft model" for b in estimate.footprints[0].buffers):
        path = Path(config.draft_model)
        weights += f", with {path.name} ({describe_draft(path) or 'draft model'}, --spec {config.spec})"
    return f"{name}: {weights}; {_where(config, estimate)}" if estimate else f"{name}: {weights}"


def _kinds_of_media(projector: Path) -> list[str]:
    names = {"vision": "images", "audio": "audio"}
    return [names[kind] for kind in encoded_media(projector)] or ["a projector"]


def sizes_line(config: EngineConfig, estimate: MemoryEstimate | None, host_free: int, *, chosen: bool) -> str:
    """The number of concurrent answers, their maximum tokens, and the memory required; then llama.cpp's words for them.

    `host_free`: bytes. `chosen`: whether -np or -c was not given.
    """
    n = config.n_parallel
    answers = f"{n} answers at once" if n > 1 else "1 answer at a time"
    of_workers = f" in each of {len(estimate.footprints)} engines" if estimate and len(estimate.footprints) > 1 else ""
    source = ", chosen to fit into memory" if chosen and estimate else ""
    sequences = f"{n} sequences" if n > 1 else "1 sequence"
    cells = f"({sequences}, {config.n_ctx:,} KV cells: -np {n} -c {config.n_ctx}{source})"
    if estimate is None:
        return f"{answers}{of_workers} {cells}"
    footprint = estimate.footprints[0]
    each, most = config.n_ctx // n, min(footprint.sequence_cells, footprint.n_ctx_train)
    tokens = f"{each:,} tokens each, or up to {most:,} for one" if most > each else f"up to {most:,} tokens each"
    parts = [
        f"{_format_gb(demand.firm + demand.mapped)} of {_format_gb(demand.free)} GB {place}"
        for demand in memory_demands(estimate, host_free)
        if demand.free
        for place in ["free memory" if demand.where == HOST else f"of {demand.where}"]
    ]
    return f"{answers}{of_workers}, {tokens}, uses {' and '.join(parts) or 'unknown memory'} {cells}"


def _format_gb(n_bytes: int) -> str:
    """Gigabytes, as in the sizes of files."""
    return f"{n_bytes / 1e9:.1f}" if n_bytes >= 1e8 else f"{n_bytes / 1e9:.2f}"


def _where(config: EngineConfig, estimate: MemoryEstimate) -> str:
    n_engines = len(estimate.footprints)
    threads = config.n_threads or max(1, available_threads() // n_engines)  # the engines share the cores
    each = " each" if n_engines > 1 else ""
    on_cpu = f"on the CPU with {threads} thread{'s' if threads > 1 else ''}{each}"
    places = {location(b, estimate.devices) for f in estimate.footprints for b in f.buffers if b.kind == "weights"}
    used = [device for device in estimate.devices if device.name in places]
    if not used:
        return on_cpu
    n_layers = estimate.footprints[0].n_layers
    devices = " and ".join(f"{d.name} ({d.description})" if d.description else d.name for d in used)
    n = n_layers if config.n_gpu_layers < 0 else min(config.n_gpu_layers, n_layers)
    whole = f"{'all ' if n == n_layers else f'{n} of '}{n_layers} layers on {devices}"
    if n < n_layers:
        whole += f", the others {on_cpu}"
    if config.override_tensor or any(getattr(config, name) for name in CPU_PARTS):
        weights = (buffer for buffer in estimate.footprints[0].buffers if buffer.kind == "weights")
        at_host = sum(each.n_bytes for each in weights if location(each, estimate.devices) == HOST)
        whole += f", {format_gib(at_host)} of the weights {on_cpu}"
    return whole
