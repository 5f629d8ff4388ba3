"""The known results of llama-server's tests (`known.toml`), and the deviations of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from tests.llama_server.ring import Outcome

BESIDE_INFERENCE = ("test_mcp_servers", "test_proxy", "test_router", "test_tools_builtin")
"""Files with tests that request no text: a router of several models, and what serves llama-server's web page."""


class KnownFile(msgspec.Struct, forbid_unknown_fields=True):
    """Of one file of tests. Keys: a test, a function of which no case passes, or * for all tests; values: why."""

    llama_server: int = 0
    """Tests that llama-server passes with the made models."""
    cppbatch: int = 0
    """Of these, tests that cppbatch passes."""
    not_here: dict[str, str] = {}
    """Tests that llama-server does not pass with the made models either."""
    exceptions: dict[str, str] = {}
    """Tests that llama-server passes and cppbatch does not."""

    def is_not_here(self, test: str) -> bool:
        """Whether llama-server does not pass it here."""
        return _reason(self.not_here, test) is not None

    def is_exception(self, test: str) -> bool:
        """Whether llama-server passes it, and cppbatch is not to."""
        return _reason(self.exceptions, test) is not None

    def fails_on_cppbatch(self, test: str) -> bool:
        """Whether it is not to pass on cppbatch; one that llama-server does not pass here may."""
        return self.is_not_here(test) or self.is_exception(test)


def read_known() -> dict[str, KnownFile]:
    """By the names of the files."""
    text = Path(__file__).with_name("known.toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, KnownFile])


def surprises_of_llama_server(known: KnownFile, outcomes: Mapping[str, Outcome]) -> Iterable[str]:
    """The deviations from `known`, if llama-server was run."""
    for test, outcome in outcomes.items():
        listed = known.is_not_here(test)
        if outcome.result == "failed" and not listed:
            yield f"{test}: llama-server does not pass here: {outcome.why}"
        elif outcome.result == "passed" and listed:
            yield f"{test}: llama-server passes: it is not to be in not_here"


def surprises_of_cppbatch(known: KnownFile, outcomes: Mapping[str, Outcome]) -> Iterable[str]:
    """The same where cppbatch was run."""
    for test, outcome in outcomes.items():
        if known.is_not_here(test):
            continue
        listed = known.is_exception(test)
        if outcome.result == "failed" and not listed:
            yield f"{test}: fails: {outcome.why}"
        elif outcome.result == "passed" and listed:
            yield f"{test}: passes now: it is no longer an exception"


def unknown_names(known: KnownFile, tests: Iterable[str]) -> Iterable[str]:
    """Names in `known` that no test has."""
    found = {name for test in tests for name in _names(test)}
    yield from (f"{name}: there is no such test" for name in [*known.not_here, *known.exceptions] if name not in found)


def n_passed_by_llama_server(known: KnownFile, outcomes: Mapping[str, Outcome]) -> int:
    """How many of these tests it passes here."""
    return sum(o.result != "skipped" and not known.is_not_here(test) for test, o in outcomes.items())


def n_passed_by_cppbatch(known: KnownFile, outcomes: Mapping[str, Outcome]) -> int:
    """How many of those cppbatch passed."""
    return sum(o.result == "passed" and not known.is_not_here(test) for test, o in outcomes.items())


def page_tables(known: Mapping[str, KnownFile]) -> str:
    """The ratios by file and the exceptions by reason, as docs/llama-server.md has them."""
    rows = ["| tests | llama-server passes | of these cppbatch passes |", "|---|---|---|"]
    rows += [f"| {name} | {of.llama_server} | {of.cppbatch} |" for name, of in known.items() if of.llama_server]
    rows += [_sum_row("all", known.values())]
    inference = [of for name, of in known.items() if name not in BESIDE_INFERENCE]
    rows += [_sum_row(f"all but {', '.join(BESIDE_INFERENCE)}", inference), "", "| exceptions | why |", "|---|---|"]
    by_reason: dict[str, list[str]] = {}
    for name, of in known.items():
        for test, why in of.exceptions.items():
            by_reason.setdefault(why, []).append(f"all of {name}" if test == "*" else test)
    rows += [f"| {', '.join(tests)} | {why} |" for why, tests in by_reason.items()]
    return "\n".join(rows) + "\n"


def _sum_row(title: str, files: Collection[KnownFile]) -> str:
    there, here = sum(of.llama_server for of in files), sum(of.cppbatch for of in files)
    return f"| {title} | {there} | {here} ({here / there:.1%}) |"


def _names(test: str) -> tuple[str, str, str]:
    return test, test.partition("[")[0], "*"


def _reason(names: Mapping[str, str], test: str) -> str | None:
    return next((names[name] for name in _names(test) if name in names), None)
