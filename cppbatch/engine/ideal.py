"""The minimum cost of work, and the causes of the remaining time. Pure: no clock, no model.

`ideal_seconds`: for whole requests, from measured bare costs (`cppbatch.bench.explain`). `TimeSplit`: for each step of
an engine, from the best costs learned so far (`StepCost.bare`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from heapq import heapreplace
from typing import NamedTuple

import msgspec

LOST = (
    "padding",
    "drafts",
    "few_rows",
    "small_pieces",
    "computed_again",
    "sampling",
    "engine",
    "serving",
    "slower",
    "waiting",
)
"""Causes of time beyond the ideal. padding: padding rows. drafts: rows of rejected draft tokens (accepted ones are
useful work). few_rows: steps with fewer rows than unfinished sequences. small_pieces: prompt tokens that cost more than
in pieces of the best size. computed_again: tokens of preempted sequences whose keys and values were lost. sampling,
engine: the phases sample; schedule, fill, advance. serving: between two steps while there was work. slower: the rest of
`llama_decode`: other programs, longer contexts. waiting: no work."""


class BareCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The minimum time of `llama_decode`. Create it with `BareCosts.of`."""

    rows: tuple[tuple[int, float], ...]
    """Numbers of decode rows, ascending, with the seconds of a step of that size on empty sequences. May be empty."""
    tokens: tuple[tuple[int, float], ...]
    """Sizes of prompt pieces, ascending, with the seconds per token on an empty sequence. May be empty."""
    row_cell_s: float = 0.0
    """Additional seconds of a decode row per cell of its sequence."""
    token_cell_s: float = 0.0
    """The same for a prompt token and its preceding cells."""

    @classmethod
    def of(
        cls,
        rows: Iterable[tuple[int, float]],
        tokens: Iterable[tuple[int, float]],
        *,
        row_cell_s: float = 0.0,
        token_cell_s: float = 0.0,
    ) -> BareCosts:
        """A number of rows costs at most as much as a larger number, because rows can be padded."""
        least: list[tuple[int, float]] = []
        for n, seconds in sorted(rows, reverse=True):
            least.append((n, min(seconds, least[-1][1]) if least else seconds))
        return cls(
            rows=tuple(reversed(least)),
            tokens=tuple(sorted(tokens)),
            row_cell_s=row_cell_s,
            token_cell_s=token_cell_s,
        )

    def step_s(self, n: int) -> float:
        """Seconds of `n` rows: interpolated between known numbers; beyond the last, in proportion to the rows."""
        rows = self.rows
        at = bisect_left(rows, (n,))
        if at == len(rows):
            last, seconds = rows[-1]
            return seconds * n / last
        high, high_s = rows[at]
        if at == 0 or high == n:
            return high_s
        low, low_s = rows[at - 1]
        return low_s + (n - low) / (high - low) * (high_s - low_s)

    def row_s(self, most: int) -> float:
        """Minimum seconds per row, with at most `most` rows; 0 if unknown."""
        return min((seconds / min(n, most) for n, seconds in self.rows), default=0.0)

    @property
    def token_s(self) -> float:
        """Minimum seconds per prompt token; 0 if unknown."""
        return min((seconds for _, seconds in self.tokens), default=0.0)

    def token_s_of(self, n: int) -> float:
        """Seconds per token in a piece of `n`: those of the nearest known size, by powers of two."""
        size = n.bit_length()
        return min((abs(known.bit_length() - size), seconds) for known, seconds in self.tokens)[1]

    def rows_s(self, n_rows: int, n_steps: float, most: int) -> float:
        """Minimum seconds for `n_rows` decode rows in at least `n_steps` steps of 1 to `most` rows.

        Mixes step sizes at the lowest cost: `T * S(n_rows / T)`, where S is the lower convex hull of the known step
        times, and T the larger of `n_steps` and the number of steps of the size with the cheapest rows.
        """
        if n_rows <= 0:
            return 0.0
        known = {min(n, most): self.step_s(min(n, most)) for n in (1, most, *(n for n, _ in self.rows if n <= most))}
        best = min(known, key=lambda n: known[n] / n)
        steps = max(n_steps, n_rows / best)
        mean = max(1.0, n_rows / steps)
        hull = min(
            low_s if low == high else low_s + (mean - low) / (high - low) * (high_s - low_s)
            for low, low_s in known.items()
            for high, high_s in known.items()
            if low <= mean <= high
        )
        return steps * hull


class RequestSize(NamedTuple):
    """The work of a request."""

    prompt_tokens: int
    """Prompt tokens to compute, excluding a cached prefix."""
    output_tokens: int
    """Tokens per sample, at least 1: the first one comes from the prompt, each other one needs a decode row."""
    cached_tokens: int = 0
    samples: int = 1
    arrives: float = 0.0
    """Seconds after the start."""


def ideal_seconds(
    requests: Sequence[RequestSize], costs: BareCosts, most_rows: int, clients: int | None = None
) -> float:
    """The minimum time for these requests, from the first arrival to the last token.

    Let c be the cost of a prompt token in the best piece size, S(n) that of a step of n rows, and

        work = prompt tokens * c + rows * S(k) / k          k: the number of rows, up to `most_rows`, that is best

    each plus the additional cost of its cells. As the same device computes prompts and rows, both are added
    (docs/decisions/0002: mixing costs the sum). No load can always have k rows: a sequence has one row per step, so
    there are at least as many steps as the longest output has rows. With L such steps for R rows, the rows cost at
    least L * S(R / L) (`BareCosts.rows_s`). Nothing is computed before it arrives: the result is the maximum, over all
    arrival times t, of t plus the cost of the requests that arrive at t or later.

    `clients`: this many requests are in flight, in order, and each one that ends lets the next one arrive (`arrives` is
    ignored). With at most `most_rows` sequences in flight, the number of steps is then that of the schedule in which
    all of them have a row in each step, which is the minimum.
    """
    if not requests:
        return 0.0
    in_flight = len(requests) if clients is None else min(clients, len(requests))
    most_rows = min(most_rows, in_flight * max(request.samples for request in requests))
    if clients is not None:
        return _cost(requests, costs, most_rows, _closed_loop_steps(requests, most_rows, clients))
    best, prompts_s, cells_s, n_rows, longest = 0.0, 0.0, 0.0, 0, 0
    for request in sorted(requests, key=lambda request: -request.arrives):
        prompts_s += _prompt_s(request, costs)
        cells_s += _cells_s(request, costs)
        n_rows += _rows(request)
        longest = max(longest, request.output_tokens - 1)
        decode_s = costs.rows_s(n_rows, max(longest, n_rows / most_rows), most_rows)
        best = max(best, request.arrives + prompts_s + cells_s + decode_s)
    return best


def _cost(requests: Sequence[RequestSize], costs: BareCosts, most_rows: int, steps: float) -> float:
    prompts_s = sum(_prompt_s(request, costs) + _cells_s(request, costs) for request in requests)
    return prompts_s + costs.rows_s(sum(map(_rows, requests)), steps, most_rows)


def _rows(request: RequestSize) -> int:
    return request.samples * (request.output_tokens - 1)


def _prompt_s(request: RequestSize, costs: BareCosts) -> float:
    mean_cells = request.cached_tokens + request.prompt_tokens / 2
    return request.prompt_tokens * (costs.token_s + costs.token_cell_s * mean_cells)


def _cells_s(request: RequestSize, costs: BareCosts) -> float:
    """The cost of its rows' cells."""
    mean_cells = request.cached_tokens + request.prompt_tokens + request.output_tokens / 2
    return _rows(request) * costs.row_cell_s * mean_cells


def _closed_loop_steps(requests: Sequence[RequestSize], most_rows: int, clients: int) -> float:
    """The minimum number of steps."""
    lengths = [request.output_tokens - 1 for request in requests]
    least = max(*lengths, sum(map(_rows, requests)) / most_rows)
    if clients * max(request.samples for request in requests) > most_rows:
        return least  # the engine chooses which sequences have a row
    ends = [0] * clients
    for length in lengths:
        heapreplace(ends, ends[0] + length)
    return max(least, *ends)


class StepWork(NamedTuple):
    """The work of a step."""

    rows: int
    """Decode rows, and prompt tokens computed among them."""
    groups: Sequence[int]
    """Rows computed together, including padding rows and drafts."""
    drafted: int
    accepted: int
    prompt_tokens: int
    """Other prompt tokens."""
    again: int
    """Prompt tokens that had been computed before."""
    unfinished: int
    """Sequences that could have had a row: running or waiting, up to n_parallel."""


class TimeSplit:
    """The time of steps, split into the minimum cost of their work (`ideal`) and the rest by cause (`lost`, `LOST`).

    All parts are at least 0, and their sum is the time. A step's rows cost at least S(n), which is divided by rows:
    padding rows and rejected drafts are lost; of each other row, the excess over its cost in the best number of rows,
    up to the unfinished sequences, is lost. So a load of few sequences loses nothing to `few_rows`.
    """

    def __init__(self) -> None:
        self.ideal = 0.0
        self.lost = dict.fromkeys(LOST, 0.0)

    @property
    def busy(self) -> float:
        """Seconds, excluding waiting."""
        return self.ideal + sum(self.lost.values()) - self.lost["waiting"]

    @property
    def of_ideal(self) -> float | None:
        """The ideal fraction of the time with work; None: no work so far."""
        return self.ideal / busy if (busy := self.busy) else None

    def add_steps(
        self, work: StepWork, costs: BareCosts, decode_s: float, sample_s: float, engine_s: float, *, n: int = 1
    ) -> None:
        """Adds `n` steps of the same work: the seconds in `llama_decode`, in sampling, and in the engine's other
        phases."""
        lost = self.lost
        lost["sampling"] += sample_s
        lost["engine"] += engine_s
        ideal_s, parts = _expected(work, costs)
        expected_s = n * (ideal_s + sum(parts.values()))
        part = n * min(1.0, decode_s / expected_s) if expected_s else 0.0  # a faster step loses less
        self.ideal += part * ideal_s
        for name, seconds in parts.items():
            lost[name] += part * seconds
        lost["slower"] += decode_s - part * expected_s / n

    def add_pause(self, serving_s: float, waiting_s: float) -> None:
        """Adds the time before a step: with and without work."""
        self.lost["serving"] += serving_s
        self.lost["waiting"] += waiting_s


def _expected(work: StepWork, costs: BareCosts) -> tuple[float, dict[str, float]]:
    """The minimum seconds of `llama_decode` for a step, and the further seconds that are expected, by cause."""
    n_rows, groups, drafted, accepted, n_prompt, again, unfinished = work
    ideal, parts = 0.0, {}
    if groups and costs.rows:
        computed = sum(groups)
        row_s, done = sum(map(costs.step_s, groups)) / computed, n_rows + accepted
        ideal = done * min(row_s, costs.row_s(max(1, unfinished)))
        parts["few_rows"] = done * row_s - ideal
        parts["drafts"] = row_s * max(0, drafted - accepted)
        parts["padding"] = row_s * max(0, computed - n_rows - drafted)
    if n_prompt and costs.tokens:
        ideal += (n_prompt - again) * costs.token_s
        parts["small_pieces"] = n_prompt * (costs.token_s_of(n_prompt) - costs.token_s)
        parts["computed_again"] = again * costs.token_s
    return ideal, parts
