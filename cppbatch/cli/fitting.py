"""What `serve` and `generate` do with their settings before a model is loaded: its profile, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from cppbatch.cli.engine_options import option
from cppbatch.config import EngineConfig

if TYPE_CHECKING:
    from cppbatch.cluster.deployment import Deployment

Command = Callable[..., Any]

_OPTIONS = [
    option(
        "--profile/--no-profile", "use_profile", env="PROFILE", default=True,
        help="Take what is not given from what `cppbatch tune` has found.",
    ),
    option(
        "--memory-check/--no-memory-check", "memory_check", env="MEMORY_CHECK", default=True,
        help="Refuse to start with settings for which there is not enough memory.",
    ),
]  # fmt: skip


def given_settings() -> set[str]:
    """Those of the engine's settings that the user has given, by flag or environment."""
    context = click.get_current_context()
    given = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return {name for name in EngineConfig.__struct_fields__ if context.get_parameter_source(name) in given}


def fitted(command: Command) -> Command:
    """Adds --no-profile and --no-memory-check; the command gets its `config` with the profile's settings."""

    @wraps(command)
    def with_fitted(config: EngineConfig, use_profile: bool, memory_check: bool, **arguments: Any) -> Any:
        if use_profile:
            config = _with_profile(config)
        if memory_check:
            _check(config, arguments.get("deployment"))
        return command(config=config, **arguments)

    wrapped: Command = with_fitted
    for add in reversed(_OPTIONS):
        wrapped = add(wrapped)
    return wrapped


def _with_profile(config: EngineConfig) -> EngineConfig:
    from cppbatch.bench.profile import use_profile

    changed, line = use_profile(config, given_settings())
    if line:
        click.echo(line, err=True)
    return changed


def _check(config: EngineConfig, deployment: Deployment | None) -> None:
    from cppbatch.bench.memory.memory_check import check_memory

    check_memory(config, deployment.configs if deployment else lambda one: [one])
