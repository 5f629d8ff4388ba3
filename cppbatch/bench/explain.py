"""`cppbatch bench explain`: breaks down the time of a trace (`--trace`), relative to the minimum cost of its work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cppbatch.bench.report import Column, Report, new_figure
from cppbatch.engine.ideal import LOST, BareCosts, StepWork, TimeSplit
from cppbatch.engine.observe.trace import TRACKS
from cppbatch.engine.step_budget import StepBudget
from cppbatch.errors import ConfigError
from cppbatch.sizing.machine import this_machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_MEANING = {
    "ideal": "minimum cost of the work",
    "padding": "padding rows",
    "drafts": "rows of rejected draft tokens",
    "few_rows": "steps with fewer rows than unfinished sequences",
    "small_pieces": "prompt tokens beyond their cost in pieces of the best size",
    "computed_again": "tokens of preempted sequences whose keys and values were lost",
    "sampling": "rows of logits to tokens",
    "engine": "schedule, fill, advance",
    "serving": "between two steps, while there was work",
    "slower": "the rest of llama_decode: other programs, longer contexts",
    "waiting": "no request",
}
_COLUMNS = [
    Column("part", "part"), Column("seconds", "s", 3), Column("percent", "% of the time"), Column("meaning", "meaning"),
]  # fmt: skip
_PHASES = ("schedule", "fill", "decode", "sample", "advance")
_TRACKS = (TRACKS["device"], TRACKS["steps"])
_INTERVALS = 60  # of the plot


class _Event(msgspec.Struct, frozen=True):
    name: str = ""
    ph: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int = 0
    args: dict[str, Any] = {}


class TracedStep(NamedTuple):
    """A step of a trace. Times are in seconds."""

    began: float
    ended: float
    phases: dict[str, float]
    work: StepWork
    waited_s: float
    """Idle time before it."""


def read_steps(path: Path) -> list[TracedStep]:
    """The computed steps of a trace, which may be truncated. Raises `ConfigError`."""
    try:
        steps = list(_steps(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Give a file written by --trace") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a cppbatch trace: {error}. Give a file written by --trace") from error
    if not steps:
        raise ConfigError(f"{path} contains no steps with timings. Give a file written by --trace with this version")
    return steps


def _steps(path: Path) -> Iterator[TracedStep]:
    decoder = msgspec.json.Decoder(_Event)
    phases: dict[str, float] = {}
    began = 0.0
    with path.open("rb") as file:
        lines = iter(file)
        if next(lines, b"").strip() != b"[":
            raise msgspec.DecodeError("its first line is not [")
        for line in lines:
            if not line.endswith(b"\n") or line.startswith(b"{}]"):  # truncated; the end
                break
            event = decoder.decode(line.rstrip().removesuffix(b","))
            if event.ph != "X" or event.tid not in _TRACKS or event.name not in _PHASES:
                continue
            if event.name == "schedule":
                phases, began = {}, event.ts / 1e6
            phases[event.name] = event.dur / 1e6
            if event.name == "advance" and "groups" in event.args:
                work = msgspec.convert([event.args.get(name) for name in StepWork._fields], StepWork)
                waited_s = msgspec.convert(event.args.get("waited"), float) / 1e6
                yield TracedStep(began, (event.ts + event.dur) / 1e6, phases, work, waited_s)


def bare_costs_of(steps: list[TracedStep]) -> BareCosts:
    """The minimum costs of steps, as learned by an engine; from all steps, so the first ones are also covered."""
    budget = StepBudget(1)
    for step in steps:
        decode_s = step.phases["decode"]
        budget.observe(step.work.groups, step.work.prompt_tokens, decode_s, decode_s)
    return budget.cost.bare()


def explain(path: Path) -> Report:
    """Reads a trace and reports its time by cause. Raises `ConfigError`."""
    steps = read_steps(path)
    costs = bare_costs_of(steps)
    first, last = steps[0].began, steps[-1].ended
    width = (last - first) / _INTERVALS
    total, before, ended = TimeSplit(), dict.fromkeys(_MEANING, 0.0), first
    over_time = {part: [0.0] * _INTERVALS for part in _MEANING}
    for step in steps:
        pause_s = max(0.0, step.began - ended)
        waiting_s = min(pause_s, step.waited_s)
        total.add_pause(pause_s - waiting_s, waiting_s)
        engine_s = step.ended - step.began - step.phases["decode"] - step.phases.get("sample", 0.0)
        total.add_steps(step.work, costs, step.phases["decode"], step.phases.get("sample", 0.0), engine_s)
        covered = _intervals((ended - first) / width, (step.ended - first) / width)
        ended = step.ended
        now = {"ideal": total.ideal, **total.lost}
        for part, seconds in now.items():
            for interval, share in covered:
                over_time[part][interval] += share * (seconds - before[part])
        before = now
    took, of_ideal = last - first, total.of_ideal or 0.0
    work = [step.work for step in steps]
    rows = [
        {
            "part": part, "seconds": before[part], "percent": 100 * before[part] / took, "meaning": _MEANING[part],
            "over_time": over_time[part],
        }
        for part in ("ideal", *LOST)
    ]  # fmt: skip
    return Report(
        kind="explain",
        title=f"{path.name}: {len(steps)} steps in {took:.2f} s, {100 * of_ideal:.1f}% of ideal without waiting",
        machine=this_machine(with_llama=False),
        settings={
            "steps": len(steps), "seconds": took, "of_ideal": of_ideal,
            "decode_rows": sum(each.rows for each in work),
            "prompt_tokens": sum(each.prompt_tokens for each in work),
            "ms_by_rows": {n: 1000 * seconds for n, seconds in costs.rows},
            "token_ms_by_piece": {n: 1000 * seconds for n, seconds in costs.tokens},
        },
        columns=_COLUMNS, rows=rows,
        notes=["(The machine shown is the one that read the trace.)", _costs_line(costs)],
    )  # fmt: skip


def _intervals(start: float, end: float) -> list[tuple[int, float]]:
    """The intervals of this time, in multiples of their width, each with its share of the time."""
    indices = range(int(start), min(_INTERVALS, int(end) + 1))
    overlaps = [(i, min(end, i + 1) - max(start, i)) for i in indices]
    total = sum(overlap for _, overlap in overlaps)
    return [(i, overlap / total) for i, overlap in overlaps] if total > 0 else [(min(indices, default=0), 1.0)]


def _costs_line(costs: BareCosts) -> str:
    rows = f"a row {1000 * costs.row_s(1 << 30):.3g} ms" if costs.rows else "no rows"
    return f"Minimum in this trace: a prompt token {1000 * costs.token_s:.3g} ms, {rows}."


def plot_explanation(report: Report) -> Figure:
    """Plots the parts of the total time, and their changes over time."""
    figure, (whole, axes) = new_figure(report, 2)
    rows = [row for row in report.rows if row["seconds"] > 0]
    whole.barh([row["part"] for row in rows], [row["percent"] for row in rows])
    whole.invert_yaxis()
    whole.set_xlabel("% of the time")
    width = report.settings["seconds"] / _INTERVALS
    at = [width * i for i in range(_INTERVALS)]
    sums = [sum(column) or 1.0 for column in zip(*(row["over_time"] for row in rows), strict=True)]
    axes.stackplot(
        at,
        [[100 * part / whole_s for part, whole_s in zip(row["over_time"], sums, strict=True)] for row in rows],
        labels=[row["part"] for row in rows],
        step="post",
    )
    axes.set_ylim(0, 100)
    axes.set_xlabel("seconds since the first step")
    axes.set_ylabel("% of the time")
    axes.legend(fontsize=7)
    return figure
