"""`cppbatch serve --ray` and `cppbatch ray` without Ray: what is refused, in one sentence, and what is recorded."""

from __future__ import annotations

import socket
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from cppbatch.cli.main import cli
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError
from cppbatch.ray import cluster as ray_cluster
from cppbatch.ray.cluster import FrontRecord, RayCluster
from cppbatch.ray.serve_application import engine_config, read_arguments


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "check_installed", lambda: None)


def error_of(*flags: str) -> str:
    result = CliRunner().invoke(cli, ["serve", *flags])
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


@pytest.mark.parametrize(
    "flags", [("--workers", "2"), ("--in-process",), ("--devices", "0"), ("--sleep-idle-seconds", "60")]
)
def test_flags_of_worker_processes_are_refused_with_ray(installed: None, flags: tuple[str, ...]) -> None:
    message = error_of("--ray", *flags)
    assert message.startswith(f"{flags[0]} does not apply with --ray: ")
    assert message.endswith(f"; leave out {flags[0]}")


def test_replicas_without_ray_are_refused() -> None:
    assert "--workers" in error_of("--replicas", "2")


def test_without_ray_installed_the_message_has_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        if name == "cppbatch":  # its own version is read too, by whichever test comes first
            return "0.1.0"
        raise PackageNotFoundError(name)

    monkeypatch.setattr("cppbatch.ray.cluster.importlib.metadata.version", missing)
    message = error_of("--ray")
    assert "\n" not in message
    assert "pip install 'cppbatch[ray]'" in message
    assert "scripts/install.py --ray" in message


def test_an_old_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cppbatch.ray.cluster.importlib.metadata.version", lambda _: "2.9.3")
    monkeypatch.setattr("cppbatch.ray.cluster.importlib.util.find_spec", lambda _: object())
    with pytest.raises(ConfigError, match=r"2\.60 or newer, but 2\.9\.3 is installed"):
        ray_cluster.check_installed()


def test_a_cluster_of_ray_start_is_found_while_it_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_cluster.starts_own("local")
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{server.getsockname()[1]}\n")
        assert not ray_cluster.starts_own("local")
    assert ray_cluster.starts_own("local")  # the file is left, the cluster is not
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    assert not ray_cluster.starts_own("local")


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FrontRecord:
    monkeypatch.setattr("platformdirs.user_state_dir", lambda _: str(tmp_path))
    pid, created = ray_cluster.this_process()
    cluster = RayCluster(
        address="127.0.0.1:1", is_own=True, log_file="ray.log", session_logs="/tmp/ray/logs", wants_token=True
    )
    return FrontRecord(
        pid=pid, created=created, cluster=cluster, started_serve=True, application="cppbatch-serve-a-1",
        model="m.gguf", replicas="1..2",
    )  # fmt: skip


def test_a_record_lives_as_long_as_its_front(record: FrontRecord) -> None:
    with ray_cluster.keep_record(record):
        assert ray_cluster.records() == [record]
    assert ray_cluster.records() == []


def leave(record: FrontRecord, *, owns_cluster: bool) -> FrontRecord:
    """The record of a front that was killed and that has a pid now used by another process."""
    cluster = msgspec.structs.replace(record.cluster, is_own=owns_cluster)
    killed = msgspec.structs.replace(record, created=record.created - 100, cluster=cluster)
    ray_cluster.remember(killed)
    return killed


def test_the_record_of_a_killed_front_is_kept_while_its_replicas_may_run(record: FrontRecord) -> None:
    killed = leave(record, owns_cluster=False)
    assert not killed.is_alive
    assert ray_cluster.records() == [killed]
    ray_cluster.forget(killed)
    assert ray_cluster.records() == []


def test_a_killed_front_with_its_own_cluster_leaves_nothing(record: FrontRecord) -> None:
    leave(record, owns_cluster=True)
    assert ray_cluster.records() == []


@pytest.mark.parametrize("command", ["status", "down"])
def test_without_a_server_the_command_says_so(record: FrontRecord, command: str) -> None:
    result = CliRunner().invoke(cli, ["ray", command])
    assert (result.exit_code, result.output) == (0, "this user has no `cppbatch serve --ray` running on this machine\n")


def test_the_arguments_of_an_application_are_typed() -> None:
    given = read_arguments(
        {"min_replicas": 1, "max_replicas": 4, "server": {"aliases": ["a"], "api_keys": ["k"], "limits": {"max_n": 2}}}
    )
    assert given.max_replicas == 4
    settings = given.server.settings()
    assert settings.aliases == ("a",)
    assert settings.keys.rules_of("k")
    assert settings.limits.max_n == 2
    config = engine_config("m.gguf", {"n_parallel": 3, "lora": [["a.gguf", 0.5]]})
    assert config == EngineConfig(model_path="m.gguf", n_parallel=3, lora=(("a.gguf", 0.5),))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"replicas": 3}, "replicas"),
        ({"max_replicas": "3"}, r"\$.max_replicas"),
        ({"server": {"port": 1}}, "port"),
        ({"server": {"limits": {"max_n": 0}}}, "max-n"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_arguments(arguments).server.settings()


@pytest.mark.parametrize("engine", [{"n_paralel": 4}, {"model_path": "x"}, {"n_parallel": "4"}, {"n_parallel": 0}])
def test_a_wrong_setting_of_the_engine_is_named(engine: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(engine))):
        engine_config("m.gguf", engine)
