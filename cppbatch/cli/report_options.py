"""`--json` and `--plot`, the options of benchmark commands, and lists of numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from cppbatch.cli.engine_options import Command, with_options
from cppbatch.errors import ConfigError
from cppbatch.regular_files import is_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cppbatch.bench.report import Report


Draw = Callable[["Report"], "Figure"]

_OPTIONS = [
    click.option(
        "--json", "json_file", type=click.Path(path_type=Path), metavar="[FILE]",
        is_flag=False, flag_value=Path("-"), help="Write all results to this file as JSON; without FILE, print them.",
    ),
    click.option(
        "--plot", "plot_file", type=click.Path(path_type=Path), metavar="FILE.png",
        help="Plot the results into this file (requires cppbatch[plot]).",
    ),
]  # fmt: skip


def report_options(command: Command) -> Command:
    """Adds --json and --plot. The command returns its report and a function that draws it. This writes both, and
    returns the report."""

    @wraps(command)
    def with_report(json_file: Path | None, plot_file: Path | None, **arguments: Any) -> Report:
        for path in filter(None, (json_file, plot_file)):
            if not path.absolute().parent.is_dir():  # checked now: the measurement may take hours
                raise ConfigError(f"{path}: folder not found: {path.absolute().parent}")
            if is_model(path):
                raise ConfigError(f"{path}: is a model file, which is never overwritten: give another name")
        if plot_file:
            from cppbatch.bench.report import check_plotting

            check_plotting(plot_file)
        report: Report
        report, draw = command(**arguments)
        if json_file == Path("-"):
            click.echo(report.as_json())
            json_file = None
            console = Console(stderr=True)
        else:
            console = Console()
        if not console.is_terminal:
            console.width = 200  # the output is not a terminal
        console.print(report.table())
        if json_file:
            report.write_json(json_file)
        if plot_file:
            from cppbatch.bench.report import save_figure

            save_figure(draw(report), plot_file)
        return report

    return with_options(with_report, _OPTIONS)


def numbers(_context: click.Context, _option: click.Parameter, given: str | None) -> tuple[int, ...] | None:
    """`1,4,16`, as a tuple of positive integers without duplicates; None if the option is not given."""
    if given is None:
        return None
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(
            f"{given!r} is not valid; give numbers of at least 1, separated by commas, such as 1,4,16"
        )
    return tuple(dict.fromkeys(map(int, parts)))
