"""Per-model settings in the file of --models-config: flag names as keys, validated like the flags."""

from __future__ import annotations

import configparser
import contextlib
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from cppbatch.cli.engine_options import context_length, deployment_options, engine_settings_options
from cppbatch.cli.llama_server_flags import RENAMED, UNNEEDED
from cppbatch.cli.server_options import THINKING, model_options
from cppbatch.cluster.deployment import Deployment
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError, ModelError
from cppbatch.server.settings import ServerSettings
from cppbatch.typed_json import decode_toml

Settings = Mapping[str, Any]


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a settings file, before validation."""

    default: str | None = None
    """The model for requests that name none."""
    defaults: dict[str, Any] = {}
    """Settings of all models."""
    models: dict[str, dict[str, Any]] = {}
    """The settings of each model, by its name."""


class _Toml(ModelFile, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


def read_settings(path: Path) -> ModelFile:
    """Reads a settings file: TOML, or llama-server's presets if it ends in .ini. Raises `ConfigError`."""
    try:
        text = path.read_text("utf-8")
        return _presets(text) if path.suffix == ".ini" else decode_toml(text, _Toml)
    except OSError as error:
        raise ConfigError(f"--models-config {path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, configparser.Error) as error:
        raise ConfigError(f"--models-config {path}: {error}") from error


def _presets(text: str) -> ModelFile:
    """llama-server's format: a section for each model, and [*] for all."""
    parser = configparser.ConfigParser(interpolation=None, default_section="*", strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keys such as ngl and NGL are not the same
    parser.read_string(f"[*]\n{text}")  # `version = 1` comes before the first section
    defaults = {key: value for key, value in parser.defaults().items() if key != "version"}
    own = {name: dict(parser.items(name)) for name in parser.sections()}
    return ModelFile(
        defaults=defaults,
        models={
            name: {key: value for key, value in section.items() if key != "version"} for name, section in own.items()
        },
    )


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The given settings of a model, validated."""

    engine: dict[str, Any]
    """Fields of `EngineConfig`."""
    deployment: dict[str, Any]
    """Fields of `Deployment`."""
    server: dict[str, Any]
    """Fields of `ServerSettings`."""

    def config(self, base: EngineConfig, path: Path) -> EngineConfig:
        """The engine settings for a model file, with its context length in place of -c 0. Raises `ConfigError`."""
        engine = {name: value for name, value in self.engine.items() if (name, value) != ("n_ctx", 0)}
        config = msgspec.structs.replace(base, model_path=str(path), **engine)
        if self.engine.get("n_ctx") == 0:
            with contextlib.suppress(ModelError, ConfigError):  # loading reports what is wrong with the file
                return msgspec.structs.replace(config, n_ctx=context_length(path))
        return config

    def settings(self, base: ServerSettings) -> ServerSettings:
        """The server settings for this model. Its sampling defaults and template variables extend the shared ones."""
        given = dict(self.server)
        for name in ("sampling_defaults", "template_variables"):
            if name in given:
                given[name] = getattr(base, name) | given[name]
        return msgspec.structs.replace(base, **{"aliases": (), "tags": (), **given})


def parse_settings(settings: Settings, where: str) -> ModelSettings:
    """Validates settings like the flags of `cppbatch serve`. `where`: for errors. Raises `ConfigError`."""
    arguments = [part for key, value in settings.items() for part in _arguments(key, value, where)]
    try:
        context = _collect.make_context("serve", arguments)
        return _collect.invoke(context)  # type: ignore[no-any-return]
    except click.ClickException as error:
        raise ConfigError(f"{where}: {error.format_message()}") from error


def _arguments(key: str, value: Any, where: str) -> list[str]:
    """A setting as command-line arguments."""
    flag = next((each for each in (f"--{key}", f"-{key}") if each in _OPTIONS or each in _UNNEEDED), None)
    if f"--{key}" in RENAMED or f"-{key}" in RENAMED:
        return list(RENAMED[f"--{key}" if f"--{key}" in RENAMED else f"-{key}"]) if _is_on(value) else []
    if flag is None:
        names = [each.lstrip("-") for each in _OPTIONS]
        close = difflib.get_close_matches(key, names, 1)
        hint = (
            f"; did you mean {close[0]}?"
            if close
            else "; valid keys are the flags of `cppbatch serve` without the leading dashes"
        )
        raise ConfigError(f"{where}: unknown model setting {key!r}{hint}")
    if flag in _UNNEEDED:
        return []
    option = _OPTIONS[flag]
    if option.is_flag:
        negated = next((each for each in option.secondary_opts if each.startswith("--no-")), None)
        on = _is_on(value)
        is_negation = flag in option.secondary_opts
        if on != is_negation:
            return [option.opts[-1]]
        return [negated] if negated else []
    if option.nargs > 1:
        return [flag, *(value if isinstance(value, list) else _text(value).replace(",", " ").split())]
    values = value if isinstance(value, list) else [value]
    if not option.multiple:
        values = [",".join(map(_text, values))]
    return [part for each in values for part in (flag, _text(each))]


def _is_on(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "on", "yes", "enabled")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, dict) else str(value)


@click.command()
@model_options
@deployment_options
@engine_settings_options
@click.pass_context
def _collect(
    context: click.Context,
    *,
    deployment: Deployment,
    engine: dict[str, Any],
    aliases: tuple[str, ...],
    tags: tuple[str, ...],
    chat_template: str | None,
    template_variables: dict[str, Any],
    reasoning: str,
    thinking_tokens: int | None,
    parse_special: bool,
    sampling_defaults: dict[str, Any],
) -> ModelSettings:
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    server: dict[str, Any] = {
        "aliases": aliases, "tags": tags, "chat_template": chat_template, "thinking_tokens": thinking_tokens,
        "parse_special": parse_special,
    }  # fmt: skip
    server = {name: value for name, value in server.items() if name in given}
    if sampling_defaults:
        server["sampling_defaults"] = sampling_defaults
    if variables := template_variables | THINKING[reasoning]:
        server["template_variables"] = variables
    of_workers = {"workers": ("workers", "max_workers")}
    fields = [field for name in given for field in of_workers.get(name, (name,))]
    return ModelSettings(
        engine={name: value for name, value in engine.items() if name in given},
        deployment={name: getattr(deployment, name) for name in fields if name in Deployment.__struct_fields__},
        server=server,
    )


for _option in _collect.params:
    _option.envvar = None  # environment variables apply to all models
_OPTIONS = {
    name: option
    for option in _collect.params
    if isinstance(option, click.Option)
    for name in (*option.opts, *option.secondary_opts)
}
_UNNEEDED = {name for flag in UNNEEDED for name in flag.names.split()}
