"""`cppbatch bench explain`: breaks down the time of a trace (`--trace`), relative to the minimum cost of its work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from cppbatch.bench.prompts import random_prompt
from cppbatch.bench.report import Column, Report, new_figure
from cppbatch.config import EngineConfig, available_threads
from cppbatch.engine.ideal import LOST, BareCosts, StepWork, TimeSplit
from cppbatch.engine.observe.trace import TRACKS
from cppbatch.engine.runtime import Computation, Runtime, load_runtime
from cppbatch.engine.step_budget import StepBudget
from cppbatch.errors import ConfigError
from cppbatch.llama import Batch
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
    Column("part", "part"),
    Column("seconds", "s", 3),
    Column("percent", "% of the time"),
    Column("meaning", "meaning"),
]
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
            "part": part,
            "seconds": before[part],
            "percent": 100 * before[part] / took,
            "meaning": _MEANING[part],
            "over_time": over_time[part],
        }
        for part in ("ideal", *LOST)
    ]
    return Report(
        kind="explain",
        title=f"{path.name}: {len(steps)} steps in {took:.2f} s, {100 * of_ideal:.1f}% of ideal without waiting",
        machine=this_machine(with_llama=False),
        settings={
            "steps": len(steps),
            "seconds": took,
            "of_ideal": of_ideal,
            "decode_rows": sum(each.rows for each in work),
            "prompt_tokens": sum(each.prompt_tokens for each in work),
            "ms_by_rows": {n: 1000 * seconds for n, seconds in costs.rows},
            "token_ms_by_piece": {n: 1000 * seconds for n, seconds in costs.tokens},
        },
        columns=_COLUMNS,
        rows=rows,
        notes=[
            "(The machine shown is the one that read the trace.)",
            _costs_line(costs),
        ],
    )


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


# --- bare costs ------------------------------------------------------------------------------------------------------
# The current minimum cost of `llama_decode` on this machine, for `ideal_seconds`. The measurement takes seconds.


_SHORT = 16  # tokens of a sequence for measuring rows
_ROUNDS = 5  # steps per number of rows; medians count
_PIECES = (16, 64, 256, 512)
_PIECE_ROUNDS = 3
_LONG = (256, 64, 16)  # half of a long sequence: the first one that fits
_N_LONG = 4  # sequences
_MAX_PIECE_S, _MAX_LONG_PIECE_S = 5.0, 1.0


def measure_bare_costs(runtime: Runtime, most_rows: int) -> BareCosts:
    """Measures prompt pieces of 16, 64, 256 and 512 tokens, and steps of 1, 4, 8, 16 ... `most_rows` rows, on short
    sequences and on four long ones, which give the cost of a cell: medians of some times each, because the fastest
    time of a shared machine is one that a load does not have for long.

    Computes about 5,000 prompt tokens; fewer if the context is small, or a piece would take seconds. The context must
    be empty and have cells for two tokens of each sequence; it is empty again afterwards. Raises `LlamaError`.
    """
    return _Measurement(runtime, most_rows).run()


@contextmanager
def bare_costs_of_model(model_path: str, most_rows: int) -> Iterator[Callable[[], BareCosts]]:
    """Loads a model with the engine's default settings. Yields `measure_bare_costs` for it. Raises the errors of
    loading."""
    n_ctx = most_rows * max(2 * _LONG[0] + 2 * _SHORT, _PIECES[-1])
    config = EngineConfig(model_path=model_path, n_parallel=most_rows, n_ctx=n_ctx, spec="off", prefix_cache=False)
    runtime = load_runtime(config)
    runtime.context.use_threads(available_threads())  # a program that was busy while loading may be idle now
    try:
        yield lambda: measure_bare_costs(runtime, most_rows)
    finally:
        runtime.close()


class _Measurement:
    def __init__(self, runtime: Runtime, most_rows: int) -> None:
        self._context: Computation = runtime.context
        self._batch = Batch(self._context.n_batch)
        self._tokens = random_prompt(np.random.default_rng(0), max(_PIECES), runtime.info.n_vocab)
        self._ends = [0] * most_rows  # per sequence
        self._most_rows = most_rows
        context = runtime.context
        self._room = (
            context.n_ctx // most_rows if context.kv_unified else context.n_ctx_seq
        )  # per sequence, if all are in use
        self._short = min(_SHORT, self._room // 2, context.n_batch)
        self._piece_s: dict[int, list[float]] = {}

    def run(self) -> BareCosts:
        most = self._most_rows
        rows_s = {}
        for n in sorted({1, *(n for n in (4, *range(8, most, 8)) if n < most), most}):
            for seq_id in range(n):
                self._compute_piece(seq_id, self._short)
            rows_s[n] = median(self._compute_rows(range(n)) for _ in range(min(_ROUNDS, self._room - self._short)))
            self._empty()
        row_cell_s, token_cell_s = self._measure_cells(rows_s[1])
        for n in _PIECES:
            if self._is_possible(n, n, 1, _MAX_PIECE_S):
                for _ in range(_PIECE_ROUNDS):
                    self._compute_piece(0, n)
                    self._empty()
        piece_s = {n: median(times) for n, times in self._piece_s.items()}
        return BareCosts.of(
            ((n, max(0.5 * s, s - n * row_cell_s * self._short)) for n, s in rows_s.items()),
            ((n, max(0.5 * s, s - n * token_cell_s * n / 2) / n) for n, s in piece_s.items()),
            row_cell_s=row_cell_s,
            token_cell_s=token_cell_s,
        )

    def _measure_cells(self, one_row_s: float) -> tuple[float, float]:
        """Returns the additional seconds per cell of a row and of a prompt token. Steps of long and of short sequences
        alternate, because the speed of a shared machine changes by more than the cells cost."""
        n_long = max(1, min(_N_LONG, self._most_rows // 2))
        long, short = range(n_long), range(n_long, min(2 * n_long, self._most_rows))
        piece = next((n for n in _LONG if self._is_possible(n, 2 * n + _ROUNDS, n_long, _MAX_LONG_PIECE_S)), 0)
        if not piece:
            return 0.0, 0.0
        pairs = [[self._compute_piece(seq_id, piece) for _ in range(2)] for seq_id in long]
        for seq_id in short:
            self._compute_piece(seq_id, self._short)
        more_s = [
            self._compute_rows(long) - (self._compute_rows(short) if short else one_row_s) for _ in range(_ROUNDS)
        ]
        self._empty()
        token_more_s = median(second_s - first_s for first_s, second_s in pairs)
        return max(0.0, median(more_s)) / n_long / (2 * piece), max(0.0, token_more_s) / piece**2

    def _is_possible(self, piece: int, length: int, n_sequences: int, most_s: float) -> bool:
        """Whether a piece fits into a ubatch and the time, and these sequences have cells for this length."""
        context = self._context
        has_cells = length <= context.n_ctx_seq and (not context.kv_unified or n_sequences * length <= context.n_ctx)
        return has_cells and piece <= min(context.n_ubatch, context.n_batch) and self._seconds(piece) <= most_s

    def _seconds(self, n: int) -> float:
        """The maximum time of a piece, extrapolated from a short one."""
        return n * median(self._piece_s[self._short]) / self._short

    def _compute_piece(self, seq_id: int, n: int) -> float:
        """Appends `n` tokens to a sequence. Returns the seconds; keeps those of new sequences."""
        self._batch.clear()
        self._batch.add_run(self._tokens[:n], self._ends[seq_id], seq_id, n_logits=1)
        seconds = self._decode()
        if not self._ends[seq_id]:
            self._piece_s.setdefault(n, []).append(seconds)
        self._ends[seq_id] += n
        return seconds

    def _compute_rows(self, seq_ids: range) -> float:
        """Appends a token to each of these sequences. Returns the seconds."""
        self._batch.clear()
        self._batch.add_rows([int(self._tokens[0])] * len(seq_ids), [self._ends[i] for i in seq_ids], list(seq_ids))
        for seq_id in seq_ids:
            self._ends[seq_id] += 1
        return self._decode()

    def _decode(self) -> float:
        began = perf_counter()
        self._context.decode(self._batch)
        return perf_counter() - began

    def _empty(self) -> None:
        for seq_id in range(self._most_rows):
            self._context.remove(seq_id)
        self._ends = [0] * self._most_rows
