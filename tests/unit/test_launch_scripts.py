"""Launch scripts of llama-server from public issues and pages: each starts here, with the settings that it names."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from cppbatch.cli.deployment_options import deployment_options
from cppbatch.cli.engine_options import engine_options, given_settings
from cppbatch.cli.llama_server_flags import LlamaServerCommand, refused_flags, unneeded_flags
from cppbatch.cli.model_sources import Catalog, ModelSources, model_source_options
from cppbatch.cli.serve_command import serve
from cppbatch.cli.server_options import server_options
from cppbatch.cluster.deployment import Deployment
from cppbatch.config import EngineConfig
from cppbatch.server.address import Address
from cppbatch.server.settings import ServerSettings

Json = dict[str, Any]


class Script(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of the file."""

    what: str
    line: str
    env: dict[str, str] = {}
    preset: str = ""
    engine: Json = {}
    server: Json = {}
    defaults: Json = {}
    address: Json = {}
    models: dict[str, Json] = {}


class Scripts(msgspec.Struct):
    script: list[Script]


FILE = Path(__file__).parents[1] / "llama_server" / "launch_scripts.toml"
SCRIPTS = msgspec.toml.decode(FILE.read_bytes(), type=Scripts).script


class Read(msgspec.Struct):
    """What a command line means."""

    config: EngineConfig
    settings: ServerSettings
    address: Address
    models: dict[str, EngineConfig]


def read(script: Script, folder: Path) -> Read:
    """The settings of `cppbatch serve` with the script's flags and variables."""
    found: list[Read] = []

    @click.command(cls=LlamaServerCommand, context_settings=serve.context_settings)
    @refused_flags
    @server_options
    @deployment_options
    @model_source_options
    @partial(engine_options, several=True)
    @unneeded_flags
    def command(
        config: EngineConfig,
        sources: ModelSources | None,
        deployment: Deployment,
        settings: ServerSettings,
        address: Address,
    ) -> None:
        specs = Catalog(sources, config, given_settings(), deployment, settings).read().specs if sources else []
        found.append(Read(config, settings, address, {spec.name: spec.config for spec in specs}))

    (folder / "models").mkdir()
    (folder / "other.gguf").write_bytes(b"GGUF" + b"\1" * 20)
    (folder / "preset.ini").write_text(script.preset)
    line = script.line
    for name, path in (("file", "other.gguf"), ("folder", "models"), ("preset", "preset.ini")):
        line = line.replace(f"{{{name}}}", str(folder / path))
    result = CliRunner().invoke(command, shlex.split(line), env=script.env)
    assert not result.exception, (result.output, result.exception)
    return found[0]


def same(wanted: Any, got: Any) -> bool:
    return tuple(wanted) == got if isinstance(wanted, list) and isinstance(got, tuple) else bool(wanted == got)


def different(wanted: Json, got: object) -> Json:
    """The fields that are not as wanted."""
    values = got if isinstance(got, Mapping) else {name: getattr(got, name) for name in wanted}
    return {name: values.get(name) for name in wanted if not same(wanted[name], values.get(name))}


def test_there_are_enough_scripts_of_every_kind() -> None:
    assert len(SCRIPTS) >= 30
    assert sum(bool(script.preset) for script in SCRIPTS) >= 4
    assert sum(bool(script.env) for script in SCRIPTS) >= 2
    assert len({script.what for script in SCRIPTS}) == len(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.what)
def test_a_launch_script_has_the_settings_that_it_names(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cppbatch.models.pull.choose_model", lambda named: Path(named or "m.gguf"))
    monkeypatch.setattr("cppbatch.models.pull.choose_projector", lambda named: None)
    monkeypatch.setattr("cppbatch.cli.engine_options.context_length", lambda _path: 32768)
    monkeypatch.setattr("cppbatch.cli.engine_options.may_see", lambda *_: False)
    got = read(script, tmp_path)
    assert different(script.engine, got.config) == {}
    assert different(script.server, got.settings) == {}
    assert different(script.defaults, got.settings.sampling_defaults) == {}
    assert different(script.address, got.address) == {}
    for name, wanted in script.models.items():
        assert different(wanted, got.models[name]) == {}
