"""The plot of `cppbatch bench roofline`: operations a second over operations for each byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cppbatch.bench.plot import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cppbatch.bench.report import Report


def plot_roofline(report: Report) -> Figure:
    """Draws the roof that memory and compute make, and the measured steps below it; both axes are logarithmic."""
    figure, (axes,) = new_figure(report)
    bandwidth, peak = report.settings["bytes_per_s"], report.settings["flops"]
    intensities = [row["intensity"] for row in report.rows]
    ridge = peak / bandwidth
    x = np.geomspace(min(*intensities, ridge) / 2, max(*intensities, ridge) * 2, 100)
    axes.plot(x, np.minimum(bandwidth * x, peak) / 1e9, color="black", label="roof: memory, then compute")
    axes.axvline(ridge, color="tab:red", linestyle="--", label=f"ridge: {ridge:.1f} FLOP/byte")
    axes.plot(intensities, [row["flops"].median / 1e9 for row in report.rows], "o-", label="measured steps")
    for row, intensity in zip(report.rows, intensities, strict=True):
        axes.annotate(
            f"B={row['batch_size']}",
            (intensity, row["flops"].median / 1e9),
            (5, -9),
            textcoords="offset points",
            fontsize=7,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations for each byte (FLOP/byte)")
    axes.set_ylabel("GFLOP/s")
    axes.legend(fontsize=8)
    return figure
