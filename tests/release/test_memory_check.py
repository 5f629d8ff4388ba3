"""`generate` and `serve` refuse settings that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from cppbatch.cli.main import cli
from cppbatch.errors import ConfigError
from cppbatch.sizing import memory_check
from tests.support.server_process import ServerProcess


def test_generate_is_refused_and_can_insist(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "free_host_memory", lambda: 2**20)
    sizes = ["-c", "512", "-np", "2", "-t", "1"]
    arguments = ["generate", "-m", str(tiny_llama), *sizes, "-p", "ab", "-n", "2", "--no-profile"]
    refused = CliRunner().invoke(cli, arguments)
    assert isinstance(refused.exception, ConfigError)
    assert "1.0 MiB are free. Use a smaller model" in str(refused.exception)
    assert CliRunner().invoke(cli, [*arguments, "--no-memory-check"]).exit_code == 0


def test_serve_ends_before_it_loads_what_can_never_fit(default_model: Path) -> None:
    with ServerProcess(
        "-m", default_model, "-c", "2147483647", "-np", "4", "--kv-layout", "unified", "-fa", "on"
    ) as server:
        assert server.wait() == 2
    message = "".join(server.errors)
    assert "error: -c 2147483647 -np 4 needs 4" in message  # some 46 TiB
    assert "It would fit with -c " in message or "Use a smaller model" in message  # as this machine has room
    assert not [line for line in server.lines if "loading" in line]
