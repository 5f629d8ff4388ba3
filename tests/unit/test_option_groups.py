"""`--help` of the commands that run a model is in groups, and each option is in exactly one."""

from __future__ import annotations

import runpy
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cppbatch.cli.main import cli
from cppbatch.cli.option_groups import GROUPS, GroupedCommand

COMMANDS = ("serve", "generate", "chat", "batch")


def options(name: str) -> list[click.Option]:
    command = cli.commands[name]
    assert isinstance(command, GroupedCommand)
    return [each for each in command.params if isinstance(each, click.Option) and not each.hidden]


def help_of(name: str, flag: str = "") -> str:
    return CliRunner().invoke(cli, [name, flag or "--help-all"], terminal_width=80 if flag else 110).output


def test_the_list_of_commands_starts_with_the_most_used_and_each_line_is_whole() -> None:
    text = CliRunner().invoke(cli, ["--help"], terminal_width=80).output
    lines = text[text.index("Commands:") :].splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(cli.commands)
    assert lines[0].split()[0] == "serve"
    assert [line for line in lines if line.endswith("...")] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_shows_each_option_once_under_a_heading(name: str) -> None:
    text = help_of(name)
    headings = [heading for heading in (*GROUPS, "Other options") if f"\n{heading}:\n" in text]
    assert len(headings) >= 7
    assert text.index("\nModel:\n") < text.index("\nBatch and memory:\n") < text.index("\nSampling:\n")
    for option in options(name):
        assert any(f"\n  {name}" in text for name in option.opts), option.opts
    others = text[text.index("\nOther options:\n") :]
    assert "--help" in others
    assert others.count("\n  -") == 2, f"put it into a group of cppbatch/cli/option_groups.py: {others}"


def test_no_group_names_an_option_twice_or_one_that_is_gone() -> None:
    names = [name for group in GROUPS.values() for name in group.split()]
    assert sorted(names) == sorted(set(names))
    assert set(names) <= {option.name for name in COMMANDS for option in options(name)}


@pytest.mark.parametrize("name", ["serve", "generate", "chat", "batch"])
def test_the_help_of_a_command_fits_on_two_screens_and_help_all_has_what_it_leaves_out(name: str) -> None:
    short, whole = help_of(name, "--help"), help_of(name)
    assert len(short.splitlines()) <= 90
    assert "CPPBATCH_" not in short
    assert "CPPBATCH_MODEL" in whole
    assert "the default model, which is downloaded" not in short, "of each option, the first sentence"
    assert len(whole.splitlines()) > 300
    command = cli.commands[name]
    assert isinstance(command, GroupedCommand)
    assert set(command.common) <= {option.name for option in options(name)}
    assert short.count("\n  -") == len(command.common) + 2  # --help and --help-all
    assert "--help-all" in short
    for flag in ("--max-queue", "--ubatch-size", "--dry-base"):
        assert f"{flag} " in whole
        assert f"{flag} " not in short


def test_a_type_with_an_underscore_is_shown_as_it_is_and_may_be_written_with_a_dash() -> None:
    assert "[f32|f16|bf16|q8_0|q5_1|q5_0|q4_1|q4_0|iq4_nl]" in help_of("serve")
    for given in ("q8_0", "q8-0"):
        result = CliRunner().invoke(cli, ["serve", "-ctk", given, "-m", "nosuch.gguf"])
        assert "file not found" in str(result.exception)
    assert "'q4_0'" in CliRunner().invoke(cli, ["serve", "-ctk", "q9"]).output


def test_the_tables_of_settings_are_what_their_script_writes() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "write_settings_page.py"))
    for page, text in script["pages"]().items():
        assert page.read_text() == text, "run scripts/write_settings_page.py"
