"""Messages that name what the user wrote: a setting in Python, a flag on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import BashComplete

from cppbatch import EngineConfig, EngineProcess, LocalEngine
from cppbatch.cli.engine_options import engine_options
from cppbatch.cli.main import cli
from cppbatch.config import EngineSettings, named
from cppbatch.errors import ConfigError


@pytest.mark.parametrize("engine", [LocalEngine, EngineProcess])
def test_an_asyncio_engine_outside_an_event_loop_says_where_it_belongs(
    engine: type[LocalEngine] | type[EngineProcess],
) -> None:
    with pytest.raises(ConfigError, match=rf"needs a running event loop: .*async with {engine.__name__}.*asyncio use"):
        engine("model.gguf")


def test_a_message_about_a_setting_has_its_name_and_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"^n_ctx \(-c\) is 1, less than n_parallel \(-np\), which is 16"):
        EngineConfig("model.gguf", n_ctx=1)
    with pytest.raises(ConfigError, match=r"^swap_space \(--swap-space\) is -1"):
        EngineConfig("model.gguf", swap_space=-1)


def test_the_flags_in_messages_are_those_of_the_commands() -> None:
    command: Any = engine_options(lambda: None)
    flags = {flag for option in command.__click_params__ for flag in (*option.opts, *option.secondary_opts)}
    flags |= {"--devices"}  # of the deployment
    for setting in EngineSettings.__annotations__:
        if setting != "step_ms":  # it has no option
            name, flag = named(setting).removesuffix(")").split(" (")
            assert name == setting
            assert flag in flags


def test_shells_complete_commands_and_flags_as_the_readme_says() -> None:
    completion = BashComplete(cli, {}, "cppbatch", "_CPPBATCH_COMPLETE")
    assert [each.value for each in completion.get_completions([], "bat")] == ["batch"]
    assert "--template" in [each.value for each in completion.get_completions(["batch"], "--tem")]
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert 'eval "$(_CPPBATCH_COMPLETE=bash_source cppbatch)"' in readme
