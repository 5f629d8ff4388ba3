"""docs/llama-server.md has the tables of llama-server's tests, and names flags that exist."""

from __future__ import annotations

import re
from pathlib import Path

from cppbatch.cli.llama_server_flags import UNNEEDED
from cppbatch.cli.serve_command import serve
from tests.llama_server.known import KnownFile, page_tables, read_known, surprises_of_cppbatch
from tests.llama_server.ring import Outcome

PAGE = (Path(__file__).parents[2] / "docs" / "llama-server.md").read_text()


def test_the_page_has_the_ratios_and_the_exceptions() -> None:
    assert page_tables(read_known()) in PAGE


def test_the_flags_that_mean_the_same_are_flags_of_the_command() -> None:
    (paragraph,) = re.findall(r"These mean the same in both: (.*?)and others", PAGE, re.DOTALL)
    known = {name for option in serve.params for name in (*option.opts, *option.secondary_opts)}
    assert set(re.findall(r"`(-[^`]+)`", paragraph)) <= known


def test_the_page_lists_the_flags_that_need_nothing() -> None:
    rows = ["| accepted | what applies |", "|---|---|"]
    for flag in UNNEEDED:
        names = ", ".join(f"`{name}`" for name in flag.names.split())
        rows.append(f"| {names}{' ' + flag.value.replace('|', chr(92) + '|') if flag.value else ''} | {flag.instead} |")
    assert "\n".join(rows) + "\n" in PAGE


def test_a_run_reports_unknown_failures_and_exceptions_that_pass() -> None:
    known = KnownFile(not_here={"elsewhere": "a text"}, exceptions={"ever": "no such thing", "one[b]": "not so"})
    outcomes = {
        "elsewhere[a]": Outcome("failed", "E"),
        "ever[1]": Outcome("failed", "E"),
        "ever[2]": Outcome("passed", ""),
        "one[a]": Outcome("failed", "E assert 1 == 2"),
        "one[b]": Outcome("failed", "E"),
        "left out": Outcome("skipped", ""),
    }
    assert list(surprises_of_cppbatch(known, outcomes)) == [
        "ever[2]: passes now: it is no longer an exception",
        "one[a]: fails: E assert 1 == 2",
    ]
