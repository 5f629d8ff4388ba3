"""What work could cost at best, and where the rest of the time went. Pure: no clock, no model.

`ideal_seconds`: of whole requests, from bare costs that were measured (`cppbatch.bench.explain`). `TimeSplit`: of
each step of an engine, from the best costs that it has learned (`StepCost.bare`).
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
"""Where time goes that is not ideal. padding: padding rows. drafts: rows of draft tokens that were rejected (accepted
ones are work done). few_rows: steps with fewer rows than unfinished sequences. small_pieces: prompt tokens that cost
more than those of the best size of a piece. computed_again: tokens of preempted sequences whose keys and values were
lost. sampling, engine: the phases sample; schedule, fill, advance. serving: between two steps while there was work.
slower: the rest of `llama_decode`: other programs, longer contexts. waiting: nothing to do."""


class BareCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What `llama_decode` takes at best. Make it with `BareCosts.of`."""

    rows: tuple[tuple[int, float], ...]
    """Numbers of decode rows, rising, with the seconds of a step of them with no cells before. May be empty."""
    tokens: tuple[tuple[int, float], ...]
    """Sizes of a prompt's piece, rising, with the seconds of each of its tokens, with no cells before. May be empty."""
    row_cell_s: float = 0.0
    """Seconds that a decode row takes more for each cell of its sequence."""
    token_cell_s: float = 0.0
    """The same for a prompt token and the cells before it."""

    @classmethod
    def of(
        cls,
        rows: Iterable[tuple[int, float]],
        tokens: Iterable[tuple[int, float]],
        *,
        row_cell_s: float = 0.0,
        token_cell_s: float = 0.0,
    ) -> BareCosts:
        """A number of rows costs at most what a larger one does, because rows can be padded."""
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
        """Seconds of `n` rows: on the line through the next known numbers; beyond the last, that of each row there."""
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
        """Seconds of a row at best, where at most `most` rows are wanted; 0 if nothing is known."""
        return min((seconds / min(n, most) for n, seconds in self.rows), default=0.0)

    @property
    def token_s(self) -> float:
        """Seconds of a prompt token at best; 0 if nothing is known."""
        return min((seconds for _, seconds in self.tokens), default=0.0)

    def token_s_of(self, n: int) -> float:
        """Seconds of each token of a piece of `n`: of the known size that is nearest, by powers of two."""
        size = n.bit_length()
        return min((abs(known.bit_length() - size), seconds) for known, seconds in self.tokens)[1]

    def rows_s(self, n_rows: int, n_steps: float, most: int) -> float:
        """Seconds of `n_rows` decode rows in at least `n_steps` steps of 1 to `most` rows, at best.

        Steps of different sizes are mixed as they cost least, so it is `T * S(n_rows / T)`: S is the lower convex hull
        of the known step times, and T the larger of `n_steps` and of the steps of the size whose rows cost least.
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
    """To compute: without those of a cached prefix."""
    output_tokens: int
    """Of each sample, at least 1: the first one comes from the prompt, each other one needs a decode row."""
    cached_tokens: int = 0
    samples: int = 1
    arrives: float = 0.0
    """Seconds after the start."""


def ideal_seconds(
    requests: Sequence[RequestSize], costs: BareCosts, most_rows: int, clients: int | None = None
) -> float:
    """What these requests take at best, from the first arrival to the last token.

    Let c be the cost of a prompt token in the best size of a piece, S(n) that of a step of n rows, and

        work = prompt tokens * c + rows * S(k) / k          k: the number of rows, up to `most_rows`, that is best

    each with what its cells cost more. As prompts and rows are computed by the same device, both are added
    (docs/decisions/0002: mixing costs the sum). No load can always have k rows: a sequence has one row in a step, so
    there are at least as many steps as the longest output has rows. With L such steps for R rows, the rows cost at
    least L * S(R / L) (`BareCosts.rows_s`). Nothing is computed before it arrives: the result is the largest, over all
    times t of an arrival, of t plus the cost of the requests that arrive at t or later.

    `clients`: in order, this many of the requests are in flight, and each that ends lets the next one arrive (their
    `arrives` are not used). With at most `most_rows` sequences in flight the number of steps is then that of the
    schedule in which all of them have a row in each step: none has fewer.
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
    """What the cells of its rows cost."""
    mean_cells = request.cached_tokens + request.prompt_tokens + request.output_tokens / 2
    return _rows(request) * costs.row_cell_s * mean_cells


def _closed_loop_steps(requests: Sequence[RequestSize], most_rows: int, clients: int) -> float:
    """The least number of steps."""
    lengths = [request.output_tokens - 1 for request in requests]
    least = max(*lengths, sum(map(_rows, requests)) / most_rows)
    if clients * max(request.samples for request in requests) > most_rows:
        return least  # the engine chooses who has a row
    ends = [0] * clients
    for length in lengths:
        heapreplace(ends, ends[0] + length)
    return max(least, *ends)


# --- the steps of an engine -------------------------------------------------------------------------------------------


class StepWork(NamedTuple):
    """What a step computed."""

    rows: int
    """Decode rows, and tokens of prompts that were computed among them."""
    groups: Sequence[int]
    """Rows that were computed together, padding rows and drafts included."""
    drafted: int
    accepted: int
    prompt_tokens: int
    """The others."""
    again: int
    """Those of them that had been computed before."""
    unfinished: int
    """Sequences that could have had a row: those that ran or waited, up to n_parallel."""


class TimeSplit:
    """The time of steps, split into what their work costs at best (`ideal`) and where the rest went (`lost`, `LOST`).

    All parts are at least 0, and their sum is the time. A step's rows cost S(n) at best, which is divided by rows:
    padding rows and rejected drafts are lost, and of the others what each costs more than it does in the best number of
    rows up to the unfinished sequences. So a load of few sequences loses nothing to `few_rows`.
    """

    def __init__(self) -> None:
        self.ideal = 0.0
        self.lost = dict.fromkeys(LOST, 0.0)
        # Of the last step: most steps are like the one before.
        self._costs: BareCosts | None = None
        self._work: StepWork | None = None
        self._unfinished = -1
        self._groups: Sequence[int] = ()
        self._row_s = self._token_s = self._groups_row_s = self._ideal_s = self._expected_s = 0.0
        self._parts: list[tuple[str, float]] = []

    @property
    def busy(self) -> float:
        """Seconds without waiting."""
        return self.ideal + sum(self.lost.values()) - self.lost["waiting"]

    @property
    def of_ideal(self) -> float | None:
        """The ideal part of the time with work; None: there was none."""
        return self.ideal / busy if (busy := self.busy) else None

    def add_step(self, work: StepWork, costs: BareCosts, decode_s: float, sample_s: float, engine_s: float) -> None:
        """Adds a step: the seconds in `llama_decode`, in sampling, and in the engine's other phases."""
        lost = self.lost
        lost["sampling"] += sample_s
        lost["engine"] += engine_s
        if costs is not self._costs or work != self._work:
            self._expect(work, costs)
        expected_s = self._expected_s
        part = min(1.0, decode_s / expected_s) if expected_s else 0.0  # of a faster step less is lost
        self.ideal += part * self._ideal_s
        for name, seconds in self._parts:
            lost[name] += part * seconds
        lost["slower"] += decode_s - part * expected_s

    def _expect(self, work: StepWork, costs: BareCosts) -> None:
        """What `llama_decode` should take for this work, and what of that is lost to what."""
        n_rows, groups, drafted, accepted, n_prompt, again, unfinished = work
        if costs is not self._costs or unfinished != self._unfinished:
            self._unfinished, self._groups = unfinished, ()
            self._row_s, self._token_s = costs.row_s(max(1, unfinished)), costs.token_s
        self._costs, self._work = costs, work
        ideal = 0.0
        parts: list[tuple[str, float]] = []
        if groups and costs.rows:
            computed = groups[0] if len(groups) == 1 else sum(groups)
            if groups != self._groups:
                self._groups, self._groups_row_s = groups, sum(map(costs.step_s, groups)) / computed
            row_s, done = self._groups_row_s, n_rows + accepted
            ideal = done * min(row_s, self._row_s)
            parts.append(("few_rows", done * row_s - ideal))
            if drafted > accepted:
                parts.append(("drafts", row_s * (drafted - accepted)))
            if computed > n_rows + drafted:
                parts.append(("padding", row_s * (computed - n_rows - drafted)))
        if n_prompt and costs.tokens:
            ideal += (n_prompt - again) * self._token_s
            parts.append(("small_pieces", n_prompt * (costs.token_s_of(n_prompt) - self._token_s)))
            if again:
                parts.append(("computed_again", again * self._token_s))
        self._ideal_s, self._parts, self._expected_s = ideal, parts, ideal
        for _, seconds in parts:
            self._expected_s += seconds

    def add_pause(self, serving_s: float, waiting_s: float) -> None:
        """Adds the time before a step: with work, and without."""
        self.lost["serving"] += serving_s
        self.lost["waiting"] += waiting_s
