"""llama-server's flags that cppbatch has under other names, or accepts and logs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cppbatch.cli.engine_options import engine_options
from cppbatch.cli.llama_server_flags import UNNEEDED, LlamaServerCommand, UnneededFlag, flags_log, unneeded_flags
from cppbatch.cli.serve_command import serve
from cppbatch.config import EngineConfig
from cppbatch.server.observe.log_setup import set_up


def config_of(*flags: str, **variables: str) -> EngineConfig:
    """The settings of a command line with these flags."""
    found: list[EngineConfig] = []

    def found_config(config: EngineConfig) -> None:
        found.append(config)

    command = click.command(cls=LlamaServerCommand)(engine_options(unneeded_flags(found_config)))
    result = CliRunner().invoke(command, ["-m", "m.gguf", *flags], env=variables)
    assert not result.exception, (result.output, result.exception)
    return found[0]


@pytest.fixture(autouse=True)
def any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cppbatch.models.pull.choose_model", lambda given: given)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["-kvu"], {"kv_layout": "unified"}),
        (["--kv-unified"], {"kv_layout": "unified"}),
        (["--kv_unified"], {"kv_layout": "unified"}),
        (["-no-kvu"], {"kv_layout": "per-sequence"}),
        (["--no-kv-unified"], {"kv_layout": "per-sequence"}),
        (["-nr"], {"repack": "off"}),
        (["--cache-ram", "64"], {"prefix_cache_ram": 64}),
        (["-cram=64"], {"prefix_cache_ram": 64}),
        (["--cache-ram", "-1"], {"prefix_cache_ram": 2**31 - 1}),
        (["--no-cache-prompt"], {"prefix_cache": False}),
        (["--spec-type", "none"], {"spec": "off"}),
        (["--spec-type", "ngram-mod"], {"spec": "suffix"}),
    ],
)
def test_a_flag_that_has_an_equal_sets_it(flags: list[str], expected: dict[str, Any]) -> None:
    assert config_of(*flags) == EngineConfig("m.gguf", **expected)


@pytest.mark.parametrize(
    ("name", "spec"), [("simple", "draft"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dflash")]
)
def test_the_kinds_of_draft_models_have_llama_servers_names(tmp_path: Path, name: str, spec: str) -> None:
    file = tmp_path / "draft.gguf"
    file.write_bytes(b"GGUF" + b"\1" * 20)
    assert config_of("--spec-type", f"draft-{name}", "-md", str(file)).spec == spec


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("LLAMA_ARG_KV_UNIFIED", "1", {"kv_layout": "unified"}),
        ("LLAMA_ARG_KV_UNIFIED", "false", {"kv_layout": "per-sequence"}),
        ("LLAMA_ARG_CACHE_RAM", "64", {"prefix_cache_ram": 64}),
        ("LLAMA_ARG_SPEC_TYPE", "none", {"spec": "off"}),
    ],
)
def test_llama_servers_variables_change_the_same_settings(variable: str, value: str, expected: dict[str, Any]) -> None:
    assert config_of(**{variable: value}) == EngineConfig("m.gguf", **expected)


@pytest.mark.parametrize("flag", UNNEEDED, ids=lambda flag: flag.names.split()[0])
def test_an_unneeded_flag_changes_nothing_and_is_one_line_in_the_log(
    flag: UnneededFlag, caplog: pytest.LogCaptureFixture
) -> None:
    for name in flag.names.split():
        caplog.clear()
        with caplog.at_level(logging.INFO, flags_log.name):
            assert config_of(name, *(flag.values or ("1",))[: bool(flag.value)]) == EngineConfig("m.gguf")
        (line,) = caplog.messages
        assert name in line
        assert line.endswith(f": no effect; {flag.instead}")


def test_a_command_line_without_them_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, flags_log.name):
        config_of("-c", "512", "-np", "2")
    assert not caplog.messages


def test_serve_takes_them_and_shows_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name for option in serve.params for name in (*option.opts, *option.secondary_opts)}
    assert {name for flag in UNNEEDED for name in flag.names.split()} <= names
    monkeypatch.setattr(logging, "basicConfig", lambda **_others: None)  # it would replace pytest's handlers
    set_up("text")
    assert flags_log.isEnabledFor(logging.INFO)


def test_a_flag_that_would_change_something_is_still_refused() -> None:
    assert "No such option" in CliRunner().invoke(serve, ["--override-kv", "a=int:5"]).output
    result = CliRunner().invoke(serve, ["--reasoning-format", "none"])
    assert "'none' is not one of 'auto', 'deepseek'" in result.output
