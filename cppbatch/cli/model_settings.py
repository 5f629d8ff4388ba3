"""Per-model settings in the file of --models-config: flag names as keys, validated like the flags."""

from __future__ import annotations

import configparser
import contextlib
import difflib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from cppbatch.cli.deployment_options import deployment_options
from cppbatch.cli.engine_options import context_length, engine_settings_options
from cppbatch.cli.llama_server_flags import RENAMED, UNNEEDED
from cppbatch.cli.server_options import MODEL_SETTINGS, model_options, take_template_variables
from cppbatch.cluster.deployment import Deployment
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError, ModelError
from cppbatch.server.settings import ServerSettings
from cppbatch.typed_json import decode_toml

Settings = Mapping[str, Any]

log = logging.getLogger("cppbatch.flags")


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
    parser = configparser.ConfigParser(
        interpolation=None, default_section="*", strict=True, delimiters=("=",), empty_lines_in_values=False
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keys such as ngl and NGL are not the same
    parser.read_string(f"[*]\n{text}")  # `version = 1` comes before the first section

    def settings(given: Iterable[tuple[str, str]]) -> dict[str, Any]:
        return {key: _COMMENT.split(value, maxsplit=1)[0] for key, value in given if key != "version"}

    own = {name: settings(parser.items(name)) for name in parser.sections()}
    return ModelFile(defaults=settings(parser.defaults().items()), models=own)


_COMMENT = re.compile(r"\s*[;#]")


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
    key = _VARIABLES.get(key, key)
    flag = next((each for each in (f"--{key}", f"-{key}") if each in _OPTIONS or each in _UNNEEDED), None)
    if renamed := next((each for each in (f"--{key}", f"-{key}") if each in RENAMED), None):
        return list(RENAMED[renamed] if _is_on(value) else RENAMED.get(_opposite(renamed), ()))
    if key in _OF_SERVER and flag is None:
        log.info("%s: %s has no effect; it applies to the server, not to one of its models", where, key)
        return []
    if flag is None:
        names = [each.lstrip("-") for each in _OPTIONS]
        close = difflib.get_close_matches(key, names, 1)
        hint = (
            f"; did you mean {close[0]}?"
            if close
            else "; valid keys are the flags of `cppbatch serve` without the leading dashes"
        )
        raise ConfigError(f"{where}: unknown model setting {key!r}{hint}")
    return [] if flag in _UNNEEDED else _option_arguments(flag, value)


def _option_arguments(flag: str, value: Any) -> list[str]:
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


def _opposite(flag: str) -> str:
    """--no-mmap for --mmap, and the reverse."""
    dashes, name = flag[: len(flag) - len(flag.lstrip("-"))], flag.lstrip("-")
    return f"{dashes}{name.removeprefix('no-')}" if name.startswith("no-") else f"{dashes}no-{name}"


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
    /,
    *,
    deployment: Deployment,
    engine: dict[str, Any],
    sampling_defaults: dict[str, Any],
    **arguments: Any,
) -> ModelSettings:
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    server = {name: arguments[name] for name in MODEL_SETTINGS if name in given}
    if sampling_defaults:
        server["sampling_defaults"] = sampling_defaults
    if variables := take_template_variables(arguments):
        server["template_variables"] = variables
    of_workers = {"workers": ("workers", "max_workers")}
    fields = [field for name in given for field in of_workers.get(name, (name,))]
    return ModelSettings(
        engine={name: value for name, value in engine.items() if name in given},
        deployment={name: getattr(deployment, name) for name in fields if name in Deployment.__struct_fields__},
        server=server,
    )


_VARIABLES = {
    variable: option.opts[-1].lstrip("-")
    for option in _collect.params
    for variable in option.envvar or ()
    if variable.startswith("LLAMA_")
}
"""llama.cpp's variables, which are keys too."""
_OF_SERVER = frozenset(
    "host port metrics no-metrics props slots no-slots webui no-webui ui no-ui path api-prefix reuse-port log-file "
    "log-disable log-jsonl models-max models-autoload".split()
)
"""Keys of llama-server's presets that are settings of the whole server here."""
for _option in _collect.params:
    _option.envvar = None  # environment variables apply to all models
_OPTIONS = {
    name: option
    for option in _collect.params
    if isinstance(option, click.Option)
    for name in (*option.opts, *option.secondary_opts)
}
_UNNEEDED = {name for flag in UNNEEDED for name in flag.names.split()}
