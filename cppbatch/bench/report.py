"""The result of a benchmark: rows of figures and the machine they were measured on, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from cppbatch.bench.machine import Machine
from cppbatch.errors import ConfigError


class Spread(msgspec.Struct, frozen=True):
    """The median, the smallest and the largest of several measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarises at least one value."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])

    def text(self, digits: int) -> str:
        """Returns `142.1 ±3.0`, the median and half of the range; only the median if all values are equal."""
        if self.low == self.high:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ±{(self.high - self.low) / 2:.{digits}f}"


class Column(msgspec.Struct, frozen=True):
    """A column of a report's table."""

    key: str
    """Key of the value in the rows."""
    title: str
    digits: int = 1
    """Decimal places of numbers."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one benchmark. A row's values are strings, numbers, `Spread`s, or None if not measured."""

    kind: str
    """throughput, strategies, serve, memory ..."""
    title: str
    machine: Machine
    model: str | None = None
    settings: dict[str, Any] = {}
    """What was run: sizes, repeats, flags."""
    columns: list[Column]
    rows: list[dict[str, Any]]
    """Everything measured. The table shows some of it."""
    notes: list[str] = []
    """Sentences below the table."""

    def table(self) -> Table:
        """Returns a table for a terminal. Brackets in names and errors are not markup."""
        caption = Text("\n".join([self.machine.line(), *self.notes]))
        table = Table(title=Text(self.title), title_justify="left", caption=caption, caption_justify="left")
        for column in self.columns:
            is_text = all(isinstance(row.get(column.key), str) for row in self.rows)
            table.add_column(column.title, justify="left" if is_text else "right")
        for row in self.rows:
            table.add_row(*(Text(format_cell(row.get(column.key), column.digits)) for column in self.columns))
        return table

    def as_json(self) -> str:
        """The report as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def write_json(self, path: Path) -> None:
        """Raises `ConfigError` if the file cannot be written."""
        try:
            path.write_text(self.as_json())
        except OSError as error:
            raise ConfigError(f"--json {path} cannot be written: {error.strerror}. Choose another file") from error


def format_cell(value: Any, digits: int) -> str:
    """Formats a row's value for a table."""
    if value is None:
        return "-"
    if isinstance(value, Spread):
        return value.text(digits)
    return f"{value:,.{digits}f}" if isinstance(value, float) else str(value)
