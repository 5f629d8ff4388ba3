"""Benchmark reports: rows of figures and the machine on which they were measured, as a table, JSON, plots."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from rich.table import Table
from rich.text import Text

from cppbatch.errors import ConfigError
from cppbatch.extras import require
from cppbatch.sizing.machine import Machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure


T = TypeVar("T")


class Spread(msgspec.Struct, frozen=True):
    """The median, minimum and maximum of several measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarises at least one value."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])

    @classmethod
    def of_known(cls, values: Iterable[float | None]) -> Spread | None:
        """Summarises the values that are not None; None without any."""
        known = [value for value in values if value is not None]
        return cls.of(known) if known else None

    @classmethod
    def of_ratios(cls, pairs: Iterable[tuple[float | None, float | None]]) -> Spread | None:
        """Summarises the ratios of the pairs whose values are known and not 0; None without any."""
        return cls.of_known(one / other for one, other in pairs if one and other)

    def text(self, digits: int) -> str:
        """Returns `142.1 ±3.0`, the median and half of the range; only the median if all values are equal."""
        if self.low == self.high:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ±{(self.high - self.low) / 2:.{digits}f}"

    def range_text(self, digits: int) -> str:
        """Returns `1.16 (0.90 to 1.31)`, the median and the range."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def order_of_turn(items: Iterable[T], turn: int) -> list[T]:
    """Returns the items in the order in which turn number `turn` measures them."""
    return list(items)[:: -1 if turn % 2 else 1]


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
    """The settings of the run: sizes, repeats, flags."""
    columns: list[Column]
    rows: list[dict[str, Any]]
    """All measurements. The table shows some of them."""
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
        """Writes the report as JSON. Raises `ConfigError` if the file cannot be written."""
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


# --- plot ------------------------------------------------------------------------------------------------------------


def check_plotting(path: Path) -> None:
    """Raises `ConfigError` if matplotlib is not installed or cannot write this file type."""
    require("matplotlib", "--plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lstrip(".") not in kinds:
        raise ConfigError(f"--plot {path}: the extension must be one of {', '.join(sorted(kinds))}")


def new_figure(report: Report, n_plots: int = 1) -> tuple[Figure, list[Any]]:
    """Returns a figure with the report's title, and `n_plots` axes side by side. Does not need a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 5.5 * n_plots, 4.5), dpi=120, layout="constrained")
    figure.suptitle(f"{report.title}\n{report.machine.line()}", fontsize=10)
    axes = figure.subplots(1, n_plots, squeeze=False)[0]
    for each in axes:
        each.grid(visible=True, alpha=0.3)
    return figure, list(axes)


def by_name(rows: Iterable[dict[str, Any]], name: Callable[[dict[str, Any]], str]) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each name, by batch size."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["batch_size"]):
        found.setdefault(name(row), []).append(row)
    return found


def plot_line(axes: Any, xs: Iterable[float], ys: Iterable[Any], style: str = "o-", **more: Any) -> Any:
    """Draws a line through these points, medians of spreads. Returns it."""
    return axes.plot(list(xs), [y.median if isinstance(y, Spread) else y for y in ys], style, **more)[0]


def plot_bars(axes: Any, places: Iterable[float], spreads: Iterable[Spread | None], **style: Any) -> Any:
    """Draws bars with their range; none for a figure that was not measured. Returns them."""
    known = [(place, spread) for place, spread in zip(places, spreads, strict=True) if spread]
    heights = [spread.median for _, spread in known]
    ranges = [[spread.median - spread.low for _, spread in known], [spread.high - spread.median for _, spread in known]]
    return axes.bar([place for place, _ in known], heights, yerr=ranges, capsize=3, **style)


def doubling_axis(axes: Any, sizes: Sequence[int], label: str) -> None:
    """Makes the x axis logarithmic, with a mark for each of these sizes, and the y axis start at 0."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set_xlabel(label)
    from_zero(axes)


def from_zero(axes: Any) -> None:
    """Makes the y axis start at 0, with some space above the highest point."""
    axes.set_ylim(0, 1.1 * axes.dataLim.y1 or 1)


def save_figure(figure: Figure, path: Path) -> None:
    """Raises `ConfigError` if the file cannot be written."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}. Choose another file") from error
