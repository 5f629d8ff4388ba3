"""`--help` of the commands that run a model is in groups, and each option is in exactly one."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_shows_each_option_once_under_a_heading(name: str) -> None:
    text = CliRunner().invoke(cli, [name, "--help"], terminal_width=110).output
    headings = [heading for heading in (*GROUPS, "Other options") if f"\n{heading}:\n" in text]
    assert len(headings) >= 7
    assert text.index("\nModel:\n") < text.index("\nBatch and memory:\n") < text.index("\nSampling:\n")
    for option in options(name):
        assert any(f"\n  {name}" in text for name in option.opts), option.opts
    others = text[text.index("\nOther options:\n") :]
    assert "--help" in others
    assert others.count("\n  -") == 1, f"put the new option into a group of cppbatch/cli/option_groups.py: {others}"


def test_no_group_names_an_option_twice_or_one_that_is_gone() -> None:
    names = [name for group in GROUPS.values() for name in group.split()]
    assert sorted(names) == sorted(set(names))
    assert set(names) <= {option.name for name in COMMANDS for option in options(name)}
