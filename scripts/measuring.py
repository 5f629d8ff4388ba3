"""Measures variants alternately and compares them turn by turn.

The speed of a shared machine changes from minute to minute, so a ratio compares figures of the same turn; the median of
the turns' ratios counts. Every other turn has the reverse order.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cppbatch.bench.report import Column, Spread, order_of_turn

Figures = Mapping[str, float | None]
"""The figures of a variant in one turn by key; None: not measured."""


class Comparison:
    """The figures of variants by name, turn by turn."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)
        self.turns: list[dict[str, Figures]] = []

    def measure(self, n_turns: int, measure: Callable[[str, int], Figures], *, uncounted: int = 0) -> Comparison:
        """Measures each variant once per turn, after `uncounted` turns that are dropped."""
        for name, turn in self.schedule(n_turns, uncounted=uncounted):
            self.note(name, turn - uncounted, measure(name, turn))
        return self

    def schedule(self, n_turns: int, *, uncounted: int = 0) -> Iterator[tuple[str, int]]:
        """Yields each variant with the number of its turn, in the order in which they are to be measured."""
        for turn in range(uncounted + n_turns):
            for name in order_of_turn(self.names, turn):
                yield name, turn

    def note(self, name: str, turn: int, figures: Figures) -> None:
        """Adds the figures of a variant, and shows the first ones on stderr. A negative turn is not counted."""
        known = [f"{key} {value:.4g}" for key, value in figures.items() if value is not None]
        print(f"turn {turn + 1}, {name}: {', '.join(known[:5])}", file=sys.stderr, flush=True)
        if turn >= 0:
            self.add(name, turn, figures)

    def add(self, name: str, turn: int, figures: Figures) -> None:
        """Adds the figures of a variant; turns without all variants count in no ratio."""
        self.turns += [{} for _ in range(turn + 1 - len(self.turns))]
        self.turns[turn][name] = figures

    def values(self, name: str, key: str) -> list[float | None]:
        """Returns the figure of a variant in each turn."""
        return [turn.get(name, {}).get(key) for turn in self.turns]

    def median(self, name: str, key: str) -> float | None:
        """Returns the median over the turns; None if the figure was never measured."""
        spread = Spread.of_known(self.values(name, key))
        return spread.median if spread else None

    def ratio(self, key: str, name: str, base: str) -> Spread | None:
        """Returns the ratios of two variants' figures of the same turn; None without such a pair."""
        pairs = zip(self.values(name, key), self.values(base, key), strict=True)
        return Spread.of_ratios(pairs)

    def table(
        self, columns: Sequence[Column], ratios: Mapping[str, str] | None = None, base: str = "", digits: int = 2
    ) -> str:
        """Returns a Markdown table with a row for each variant: medians, then ratios to `base`.

        `ratios`: titles of the ratios by the key of their figure. `base`: the first variant unless given. `digits`: of
        the ratios.
        """
        base = base or self.names[0]
        rows = [
            [
                name,
                *(cell(self.median(name, column.key), column.digits) for column in columns),
                *(ratio_cell(self.ratio(key, name, base), digits) for key in ratios or ()),
            ]
            for name in self.names
        ]
        return markdown_table(["", *(column.title for column in columns), *(ratios or {}).values()], rows)

    def side_by_side(self, columns: Sequence[Column], pairs: Sequence[tuple[str, str]]) -> list[list[str]]:
        """Returns a row for each figure: title, medians of all variants, ratios of each pair."""
        return [
            [
                column.title,
                *(cell(self.median(name, column.key), column.digits) for name in self.names),
                *(ratio_cell(self.ratio(column.key, *pair)) for pair in pairs),
            ]
            for column in columns
        ]


def cell(value: float | None, digits: int) -> str:
    """Formats a figure of a table."""
    return "-" if value is None else f"{value:,.{digits}f}"


def ratio_cell(ratio: Spread | None, digits: int = 2) -> str:
    """Formats a ratio with its range."""
    return "-" if ratio is None else ratio.range_text(digits)


def markdown_table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """Returns a table with the first column left-aligned and the others right-aligned."""
    titles = list(head)
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *body]
    return "\n".join(
        "| " + " | ".join(" ".join(each.split()).replace("|", "\\|") for each in line) + " |" for line in lines
    )


def milliseconds(seconds: Sequence[float], percentile: float) -> float | None:
    """Returns a percentile of these times; None without any."""
    return 1000 * float(np.percentile(seconds, percentile)) if len(seconds) else None


class MeasuringChild:
    """A program that answers each line of JSON on its standard input with a line of JSON (`answer_lines`)."""

    def __init__(self, command: Sequence[object], env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def ask(self, *question: Any) -> Any:
        """Sends a question and waits for its answer. Raises SystemExit if the program has ended."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("answer "):  # a library may print lines of its own
                return json.loads(line.removeprefix("answer "))
        raise SystemExit(f"a measuring process has ended with code {self._process.wait()}; its message is above")

    def __enter__(self) -> MeasuringChild:
        return self

    def __exit__(self, *exc: object) -> None:
        """Closes the standard input, at which the program ends."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def answer_lines(answer: Callable[..., Any]) -> None:
    """Answers the questions of a `MeasuringChild` until the standard input ends."""
    for line in sys.stdin:
        print("answer " + json.dumps(answer(*json.loads(line))), flush=True)


def script_arguments(about: str | None, *, turns: int | None = None) -> argparse.ArgumentParser:
    """Returns the parser of a script with this docstring: `-m`, and `--turns` with a default."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="GGUF file (the default model)")
    if turns is not None:
        parser.add_argument("--turns", "--repeats", type=int, default=turns, help=f"measurements of each ({turns})")
    return parser


def words(given: str) -> list[str]:
    """Reads `one,other` as an argument."""
    return given.split(",")


def numbers(given: str) -> list[int]:
    """Reads `1,4,16` as an argument."""
    return list(map(int, given.split(",")))
