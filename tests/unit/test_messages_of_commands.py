"""Messages name what the user wrote: a setting in Python, a flag on the command line."""

from __future__ import annotations

import errno
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click import Group
from click.shell_completion import BashComplete

from cppbatch import EngineConfig, EngineProcess, LocalEngine
from cppbatch.cli.batch_command import BatchProgress
from cppbatch.cli.engine_options import engine_options
from cppbatch.cli.main import cli, main
from cppbatch.config import setting_name
from cppbatch.engine_settings import EngineSettings
from cppbatch.errors import ConfigError


@pytest.mark.parametrize("engine", [LocalEngine, EngineProcess])
def test_an_asyncio_engine_outside_an_event_loop_says_where_it_belongs(
    engine: type[LocalEngine] | type[EngineProcess],
) -> None:
    with pytest.raises(ConfigError, match=rf"needs a running event loop: .*async with {engine.__name__}.*asyncio, use"):
        engine("model.gguf")


def test_a_message_about_a_setting_has_its_name_and_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"^n_ctx \(-c\) is 1, less than n_parallel \(-np\), which is 16"):
        EngineConfig("model.gguf", n_ctx=1)
    with pytest.raises(ConfigError, match=r"^swap_space \(--swap-space\) is -1"):
        EngineConfig("model.gguf", swap_space=-1)


def test_quantised_values_without_flash_attention_are_refused_with_the_flag_to_leave_out() -> None:
    with pytest.raises(ConfigError, match=r"cache_type_v \(-ctv\) is 'q8_0', .* leave out flash_attn \(-fa\), or use"):
        EngineConfig("model.gguf", cache_type_v="q8_0", flash_attn="off")


def test_the_flags_in_messages_are_those_of_the_commands() -> None:
    command: Any = engine_options(lambda: None)
    flags = {flag for option in command.__click_params__ for flag in (*option.opts, *option.secondary_opts)}
    flags |= {"--devices"}  # of the deployment
    for setting in EngineSettings.__annotations__:
        if setting not in ("step_ms", "stream_flash_attn"):  # measured, not given
            name, flag = setting_name(setting).removesuffix(")").split(" (")
            assert name == setting
            assert flag in flags


def test_shells_complete_commands_and_flags_as_the_quickstart_says() -> None:
    completion = BashComplete(cli, {}, "cppbatch", "_CPPBATCH_COMPLETE")
    assert [each.value for each in completion.get_completions([], "bat")] == ["batch"]
    assert "--template" in [each.value for each in completion.get_completions(["batch"], "--tem")]
    assert "--max-queue" in [each.value for each in completion.get_completions(["serve"], "--max-q")]
    assert [each.value for each in completion.get_completions(["serve", "-ctk"], "q")] == [
        "q8_0",
        "q5_1",
        "q5_0",
        "q4_1",
        "q4_0",
    ]
    quickstart = (Path(__file__).parents[2] / "docs/quickstart.md").read_text()
    assert 'eval "$(_CPPBATCH_COMPLETE=bash_source cppbatch)"' in quickstart


def test_one_environment_name_gives_the_key_to_every_command() -> None:
    """`serve`, and the clients `chat --url` and `bench serve`: CPPBATCH_API_KEY."""
    bench = cli.commands["bench"]
    assert isinstance(bench, Group)
    for command in (cli.commands["serve"], cli.commands["chat"], bench.commands["serve"]):
        (key,) = [each for each in command.params if each.name in {"api_key", "api_keys"}]
        assert "CPPBATCH_API_KEY" in (key.envvar or ()), command.name


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception | None, *arguments: str) -> int:
    """The exit code of a command line, whose command ends with this error."""

    @click.command()
    def command() -> None:
        click.echo("output")
        if error:
            raise error

    monkeypatch.setattr(cli, "commands", {**cli.commands, "failing": command})
    monkeypatch.setattr("sys.argv", ["cppbatch", *(arguments or ["failing"])])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device; free some space, or write"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a.txt"), 1, "a.txt: No such file\n"),
        (
            RuntimeError("could not determine the home directory for '~'"),
            2,
            "this user has no home directory; set HOME",
        ),
    ],
)
def test_errors_of_the_system_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int, message: str
) -> None:
    assert failing(monkeypatch, error) == code
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_to_a_full_disk_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert failing(monkeypatch, None) == 1
        full.flush()  # what Python does at its end
    assert capsys.readouterr().err.startswith("error: No space left on device; free")


def test_closed_streams_discard_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert failing(monkeypatch, None) == 0


@pytest.mark.parametrize("output", ["", ".", "/"])
def test_an_output_without_a_name_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    assert failing(monkeypatch, None, "batch", "in.txt", "-o", output) == 2
    assert "is a folder; give the name of a file" in capsys.readouterr().err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_two_times_of_the_bar_have_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stderr", screen := _Terminal())
    journal = SimpleNamespace(n_completed=3, n_failed=1)
    files = SimpleNamespace(is_stream=False)
    job: Any = SimpleNamespace(job=files, journal=journal, n_lines=10, n_tokens=50, n_running=2)
    with BatchProgress(job) as progress:
        progress.start()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert re.search(r"4/10 done, 1 failed, .* batch 2 +elapsed: +\d:\d\d:\d\d +left: +[-\d:]+", shown), shown
