"""What all plots of reports have in common: checks, an empty figure with a title, and saving (matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cppbatch.errors import ConfigError
from cppbatch.extras import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cppbatch.bench.report import Report


def check_plotting(path: Path) -> None:
    """Raises `ConfigError` if matplotlib is not installed or cannot write this file type."""
    require("matplotlib", "--plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lstrip(".") not in kinds:
        raise ConfigError(f"--plot {path}: the extension must be one of {', '.join(sorted(kinds))}")


def new_figure(report: Report, n_plots: int = 1) -> tuple[Figure, list[Any]]:
    """Returns a figure with the report's title, and `n_plots` axes side by side. No display is needed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 5.5 * n_plots, 4.5), dpi=120, layout="constrained")
    figure.suptitle(f"{report.title}\n{report.machine.line()}", fontsize=10)
    axes = figure.subplots(1, n_plots, squeeze=False)[0]
    for each in axes:
        each.grid(visible=True, alpha=0.3)
    return figure, list(axes)


def from_zero(axes: Any) -> None:
    """Lets the y axis of drawn lines begin at 0, with room above the highest point."""
    axes.set_ylim(0, 1.1 * axes.dataLim.y1 or 1)


def save_figure(figure: Figure, path: Path) -> None:
    """Raises `ConfigError` if the file cannot be written."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}. Choose another file") from error
