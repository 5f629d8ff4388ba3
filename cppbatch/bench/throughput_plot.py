"""The plot of `cppbatch bench throughput`: prefill and decode speed by batch size, and the parts of a step's time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cppbatch.bench.plot import from_zero, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from cppbatch.bench.report import Report


def plot_throughput(report: Report) -> Figure:
    """Plots a solid line for the engine and a dashed one for the bare loop, for each setting and kind of requests."""
    figure, (prefill, decode, split) = new_figure(report, 3)
    for axes, key in ((prefill, "prefill"), (decode, "decode")):
        for name, rows in _lines(report.rows).items():
            sizes = [row["batch_size"] for row in rows]
            (line,) = axes.plot(sizes, [row[key].median for row in rows], "o-", label=name)
            axes.plot(sizes, [row[f"bare_{key}"].median for row in rows], "--", color=line.get_color())
        axes.set_title(f"{key} tokens/s; dashed: bare llama_decode")
        axes.set_xlabel("sequences at once")
        from_zero(axes)
    decode.legend(fontsize=7)
    _draw_split(split, report.rows)
    return figure


def _lines(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["batch_size"]):
        lines.setdefault(_name(row), []).append(row)
    return lines


def _name(row: dict[str, Any]) -> str:
    kind = "" if row["kind"] == "greedy" else f", {row['kind']}"
    return f"{row['kv_layout']}, FA {row['flash_attn']}{kind}"


def _draw_split(axes: Any, rows: list[dict[str, Any]]) -> None:
    labels = [f"{_name(row)}, B = {row['batch_size']}" for row in rows]
    left = [0.0] * len(rows)
    for phase in (phase for phase in rows[0]["phases_ms"] if phase != "decode"):
        widths = [1000 * row["phases_ms"][phase].median for row in rows]
        axes.barh(labels, widths, left=left, label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlim(0, 1.35 * max(left))  # room for the legend
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.set_title("microseconds of a step outside llama_decode")
    axes.legend(fontsize=7)
