"""Prints what the agents did."""

from __future__ import annotations

from typing import NamedTuple

import pytest


class Result(NamedTuple):
    """A row of the table."""

    agent: str
    version: str
    n_requests: int
    n_refused: int
    finished: bool
    n_first: int
    """Tokens of the first prompt, in the default model's vocabulary."""

    @property
    def row(self) -> tuple[str, str, str]:
        """As in docs/agents.md: the version, refused requests, whether it finished."""
        return self.version, str(self.n_refused), "yes" if self.finished else "no"


RESULTS = pytest.StashKey[list[tuple[str, Result]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = [("template", "agent", "version", "refused", "finished", "requests", "first prompt")]
    for template, result in config.stash[RESULTS]:
        lines.append((template, result.agent, *result.row, str(result.n_requests), f"{result.n_first:,}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        terminalreporter.write_line(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        )
