"""Settings before a model is loaded: the profile, sizes that fit into memory, and the lines that say so."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from msgspec.structs import replace

from cppbatch.bench.attention_plan import ATTENTION, plan_attention
from cppbatch.bench.memory.choose_sizes import SIZES, candidates_for
from cppbatch.bench.memory.memory_check import Engines, Planned, check_planned, first_ample
from cppbatch.bench.memory.memory_demand import free_host_memory
from cppbatch.bench.profile import profile_path
from cppbatch.bench.profile import use_profile as with_profile
from cppbatch.cli.start_lines import model_line, sizes_line
from cppbatch.config import EngineConfig
from cppbatch.errors import ModelError
from cppbatch.models.inspect import inspect_model


def plan_start(
    config: EngineConfig,
    given: Collection[str],
    engines: Engines,
    *,
    use_profile: bool,
    memory_check: bool,
    say: Callable[[str], object],
    says_start: bool = True,
) -> EngineConfig:
    """`config` with the settings of its profile, and with sizes that fit where neither has any.

    `given`: the settings that the user has given. `engines`: the settings of all engines. `memory_check`: without it,
    the memory is not estimated. `say` gets the lines; without `says_start` only the one about a profile that is used.
    Raises `ConfigError` if the engines need more memory than is free.
    """
    decided = set(given)
    if use_profile:
        used = with_profile(config, given)
        config, decided = used.config, decided | used.decided
        if used.line:
            say(used.line)
    candidates = candidates_for(config, decided) if memory_check else [config]
    attention = plan_attention(candidates[0], decided)
    planned = Planned(attention.config, None)
    if memory_check:
        planned = first_ample([_with_attention(each, attention.config) for each in candidates], engines)
        check_planned(planned, engines)
    if says_start:
        _say_what_runs(planned, is_chosen=not decided >= SIZES, misses_profile=use_profile, say=say)
        for line in filter(None, (attention.line, attention.proposal)):
            say(f"attention: {line}")
    return planned.config


def _with_attention(config: EngineConfig, planned: EngineConfig) -> EngineConfig:
    return replace(config, **{name: getattr(planned, name) for name in ATTENTION})


def _say_what_runs(planned: Planned, *, is_chosen: bool, misses_profile: bool, say: Callable[[str], object]) -> None:
    """`misses_profile`: whether a missing profile is worth a line."""
    try:
        facts = inspect_model(Path(planned.config.model_path))
    except ModelError:  # loading says what is wrong with the file
        return
    say(model_line(planned.config, facts, planned.estimate))
    if facts.pooling or planned.config.pooling:
        return  # no sequence keeps its cells, and nothing can be tuned
    say(sizes_line(planned.config, planned.estimate, free_host_memory(), chosen=is_chosen))
    if misses_profile and not os.path.isfile(profile_path(planned.config)):
        say("no profile for this model: run `cppbatch tune` to find the fastest settings (up to 5 minutes)")
