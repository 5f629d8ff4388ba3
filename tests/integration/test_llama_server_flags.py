"""docs/llama-server.md sorts the flags of the pinned llama-server. Its own page names them: the first run on a machine
fetches it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppbatch.cli.llama_server_flags import PRESETS, REFUSED, RENAMED, UNNEEDED
from tests.llama_server.flags import ServerFlag, page_table, read_flags, sort_flags, variables
from tests.support.llama_cpp_source import server_readme

PAGE = (Path(__file__).parents[2] / "docs" / "llama-server.md").read_text()


@pytest.fixture(scope="module")
def there() -> list[ServerFlag]:
    """The flags in the page of the pinned llama-server."""
    return read_flags(server_readme())


@pytest.mark.nightly  # it changes only with the page and with the pinned version
def test_the_page_sorts_all_flags_of_the_pinned_llama_server(there: list[ServerFlag]) -> None:
    assert len(there) > 250
    found = sort_flags(there)
    assert found.unknown == []
    assert page_table(found) in PAGE, "run ./scripts/test llama-server flags"


def test_only_flags_of_tools_and_proxies_are_refused(there: list[ServerFlag]) -> None:
    names = {flag.names[0] for flags in sort_flags(there).refused.values() for flag in flags}
    assert names == {"--tools", "-ag", "--mcp-servers-config", "--mcp-servers-json", "--ui-mcp-proxy"}


def test_the_variables_of_flags_that_do_the_same_are_read_too(there: list[ServerFlag]) -> None:
    same = sort_flags(there).same
    assert sum(bool(flag.env) for flag in same) > 100
    assert {flag.env for flag in same if flag.env} - {"HF_TOKEN"} <= variables()  # the hub's client reads that one


def test_no_flag_is_ignored_or_refused_that_llama_server_does_not_have(there: list[ServerFlag]) -> None:
    """Except names of older versions."""
    names = {name for flag in there for name in flag.names}
    rows = [flag.names for flag in UNNEEDED] + [flag.names for flag in REFUSED]
    ours = {name for row in rows for name in row.split()} | RENAMED.keys() | PRESETS.keys()
    assert ours - names == {"--mmap", "--no-mmap", "--mlock", "--log-verbosity"} - names
