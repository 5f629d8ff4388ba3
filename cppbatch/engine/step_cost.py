"""The cost of a step on this device, learned from steps: seconds by decode rows, and by additional prompt tokens.

Example, Q4_0 weights on two AVX-512 cores: 12 rows take 13.6 ms, 15 rows 18.1 ms, 16 rows 14.2 ms, because the kernels
compute rows in tiles of 4 and 16, and the rest row by row. So 15 rows are computed as 16, with a padding row.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

from cppbatch.engine.ideal import BareCosts

TILES = (4, 16)
"""Rows that llama.cpp's CPU kernels compute at once (ggml-cpu `repack.cpp`, `llamafile/sgemm.cpp`)."""

NEW_TIME_WEIGHT = 0.3
"""The weight of a new time in a running mean: ten steps after a change, it has 97% of it."""
_SHAPE_WEIGHT = 0.1  # of a new measurement in the shape, once a number of rows has been seen ten times
_MAX_OVERRUN = 0.25  # a step longer than expected counts as at most this fraction longer: probably a disturbance
MAX_TIME_RATIO = 2.0  # a time that is not well known counts as at most this many times the expected one
_MAX_PADDED_TIME = 0.98  # padded rows must take less than this fraction of the time
_KNOWN_STEPS = 3  # with a number of rows, before its time is used in comparisons
_SURE_STEPS = 10  # with a number of rows, before they change the level with full weight
_MAX_STALE = 0.4  # weight in the shape of a number of rows that was not measured for long
_STALE_PER_STEP = 1 / 80
_RETRY_STEPS = 64  # steps with a number of rows; then one with another number in turn, to update its time
_CHEAP_ROW_TOKENS = 0.5  # a row that costs less than this many prompt tokens is cheap
_FLAT_RATIO = 1.3  # if rows cost less than this times a quarter of them, padding cannot help
_GUESSED_TOKEN_S = 0.001
_BEST_LEVEL_RISE = 0.0002  # rise of the best level towards the current one per step: halfway in some minutes
_BEST_TOKEN_RISE = 0.002  # the same for prompt tokens

Groups = Sequence[int]
"""Numbers of decode rows that llama.cpp computes together. A single number, unless sequences have their own streams:
then only rows of consecutive seq_ids are computed together (docs/decisions/0001)."""


class StepCost:
    """Running means of step times.

    The time of a group of `n` rows is `level * shape[n]`. The level tracks effects on all steps: longer sequences,
    other programs. The shape is the cost of one number of rows relative to another, so times measured at different
    moments can be compared. A step with a number of rows that was not measured for long says more about its shape than
    about the level: while sequences join one after the other, it must not change what is known of the full batch.

    The time of prompt tokens is a running mean per size of prompt piece: 4-7 tokens, 8-15, 16-31 ...

    `bare` has the minimum costs of `llama_decode` alone: the best level and times of prompt tokens fall immediately and
    rise slowly.
    """

    def __init__(self) -> None:
        self._shape: dict[int, float] = {}
        self._counts: list[int] = []  # the first number of rows, and those seen often enough, ascending
        self._seen: Counter[int] = Counter()
        self._steps: Counter[int] = Counter()  # steps by number of rows to compute, padded or not
        self._level = self._decode_level = self._best_level = 1.0
        self._errors: list[float] = []  # of the last three steps
        self._n_observed = 0  # steps
        self._observed_at: dict[int, int] = {}  # ... until the last one with a number of rows
        self._token_s: dict[int, float] = {}
        self._nearest: dict[int, int] = {}  # the nearest known size, by requested size
        self._best_token_s: dict[int, float] = {}

    # --- rows ---------------------------------------------------------------------------------------------------------

    @property
    def knows_rows(self) -> bool:
        """Whether a step without prompt tokens has been measured."""
        return bool(self._shape)

    def knows_about(self, groups: Groups) -> bool:
        """Whether about this many rows have been measured for each group: 1, 2-3, 4-7, 8-15 ..."""
        sizes = {known.bit_length() for known in self._shape}
        return all(n.bit_length() in sizes for n in groups)

    def is_learning(self, groups: Groups) -> bool:
        """Whether one of these numbers of rows has been measured, but not often enough."""
        return any(n in self._shape and self._seen[n] < _KNOWN_STEPS for n in groups)

    def rows_s(self, groups: Groups) -> float:
        """Seconds of a step of these rows without prompt tokens; call it when `knows_rows`."""
        return self._level * self.relative(groups)

    def relative(self, groups: Groups) -> float:
        """The time of these rows without the level."""
        return sum(self._relative(n) for n in groups)

    def relative_up_to(self, n: int) -> list[float]:
        """The times of 0 to n rows in one group, without the level. Below the smallest measured number, half of the
        time is assumed to be proportional to the rows."""
        first = self._counts[0]
        below = [self._shape[first] * (1 + m / first) / 2 for m in range(1, min(first, n + 1))]
        return [0.0, *below, *(self._relative(m) for m in range(first, n + 1))]

    def _relative(self, n: int) -> float:
        """The time of one group. A number of rows with few measurements is limited by its neighbours."""
        own = self._shape.get(n)
        if own is None:
            return self._between(n)
        return own if self._seen[n] >= _KNOWN_STEPS else min(own, self._between(n))

    def _between(self, n: int) -> float:
        """Interpolates between known numbers of rows. Beyond the largest, additional rows cost as much as prompt
        tokens; for whole tiles, this bounds the cost relative to any smaller number of rows, whole tiles or not."""
        counts = self._counts
        at = bisect_left(counts, n)
        if at == 0:
            return self._shape[counts[0]]
        is_tile = self.knows_prompts and n % TILES[0] == 0
        smaller = counts[:at] if is_tile else counts[at - 1 : at]
        with_more = min(self._shape[known] + (n - known) * self.token_s(n - known) / self._level for known in smaller)
        if at == len(counts):
            return min(with_more, self._on_slope(n))
        low, high = counts[at - 1], counts[at]
        part = (n - low) / (high - low)
        on_line = self._shape[low] + part * (self._shape[high] - self._shape[low])
        return min(on_line, with_more) if is_tile else on_line

    def _on_slope(self, n: int) -> float:
        """Beyond the largest known number of rows: additional rows cost as much as those from half of it on, if that is
        much less than prompt tokens, as on a GPU; else infinity."""
        last = self._counts[-1]
        if not (n_half := bisect_right(self._counts, last // 2)):
            return inf
        few = self._counts[n_half - 1]
        row = (self._shape[last] - self._shape[few]) / (last - few)
        is_flat = self._level * row < _CHEAP_ROW_TOKENS * self.token_s(n - last)
        return self._shape[last] + (n - last) * max(0.0, row) if is_flat else inf

    def observe_rows(self, groups: Groups, seconds: float, decode_s: float | None = None) -> None:
        """Learns from a step without prompt tokens. `groups`: its rows, padding included. `decode_s`: the time in
        `llama_decode`; None: all of it."""
        decode_s = seconds if decode_s is None else decode_s
        if unknown := {n for n in groups if n not in self._shape}:
            if self._shape:
                seconds = min(seconds, MAX_TIME_RATIO * self.rows_s(groups))
            known = self._shape | {n: seconds / self._level * n / sum(groups) for n in unknown}
            self._shape, self._counts = known, self._counts or sorted(known)  # at once: Ctrl-C may interrupt a step
            return
        if new := {n for n in groups if self._seen[n] < _KNOWN_STEPS}:
            self._observe_new(new, groups, seconds)
            return
        relative = self.relative(groups)
        error = min(seconds / (self._level * relative) - 1, _MAX_OVERRUN)
        self._errors = [*self._errors[-2:], error]
        self._n_observed += 1
        stale = max(min(_MAX_STALE, (self._n_observed - self._observed_at.get(n, 0)) * _STALE_PER_STEP) for n in groups)
        weight = NEW_TIME_WEIGHT * min(1.0, min(self._seen[n] for n in groups) / _SURE_STEPS) * (1 - stale / _MAX_STALE)
        self._level *= 1 + weight * sorted(self._errors)[len(self._errors) // 2]
        self._decode_level *= 1 + NEW_TIME_WEIGHT * min(decode_s / (self._decode_level * relative) - 1, _MAX_OVERRUN)
        best = self._best_level + _BEST_LEVEL_RISE * (self._decode_level - self._best_level)
        self._best_level = min(self._decode_level, best)
        if len(groups) == 1:
            n = groups[0]
            self._seen[n] += 1
            self._shape[n] *= 1 + max(_SHAPE_WEIGHT, 0.5 / self._seen[n], stale) * error
            self._observed_at[n] = self._n_observed

    def _observe_new(self, new: set[int], groups: Groups, seconds: float) -> None:
        """Attributes the deviation of a step to the numbers of rows with few measurements. For steps with one group,
        the shortest counts: disturbances make steps longer, and rows that seem slow are not computed again."""
        expected_s = self.rows_s([n for n in groups if n in new])
        error = min(max((seconds - self.rows_s(groups)) / expected_s, 1 / MAX_TIME_RATIO - 1), MAX_TIME_RATIO - 1)
        for n in new:
            if len(groups) == 1:
                self._shape[n] = min(self._shape[n], seconds / self._level)
            else:
                self._shape[n] = self._relative(n) * (1 + 0.5 * error)
            self._seen[n] += 1
            if self._seen[n] == _KNOWN_STEPS:
                self._counts = sorted({*self._counts, n})

    def seed(self, rows_s: Iterable[tuple[int, float]]) -> None:
        """Starts with earlier measurements: numbers of rows with their seconds."""
        for n, seconds in rows_s:
            self._shape[n], self._seen[n] = seconds, _KNOWN_STEPS
        self._counts = sorted(self._shape)

    def rows_to_compute(self, n: int, most: int) -> int:
        """How many rows to compute for `n` rows, with at most `most` possible: more than `n` if that is faster.

        Occasionally returns a number other than the fastest, to measure its time: call this once per step.
        """
        tiles = [up for tile in TILES if n < (up := -(-n // tile) * tile) <= min(most, 2 * n)]
        if not tiles or self._is_flat(n):
            return n
        self._steps[n] += 1
        candidates = [n, *dict.fromkeys(tiles)]
        for candidate in candidates:
            if self._seen[candidate] < _KNOWN_STEPS:
                return candidate
        turn, rest = divmod(self._steps[n], _RETRY_STEPS)
        if rest == 0:
            return candidates[turn % len(candidates)]
        best = min(candidates, key=self._relative)
        return best if self._relative(best) < _MAX_PADDED_TIME * self._relative(n) else n

    def is_worth_joining(self, one: int, between: int, other: int) -> bool:
        """Whether two groups of rows, joined by padding rows, cost less as one group."""
        joined = one + between + other
        return joined not in self._seen or self._relative(joined) < _MAX_PADDED_TIME * self.relative((one, other))

    def _is_flat(self, n: int) -> bool:
        """Whether rows are almost free here, as on a GPU; known once a quarter of `n` rows has been measured."""
        few = [known for known in self._counts if 4 * known <= n and self._seen[known] >= _KNOWN_STEPS]
        return bool(few) and self._seen[n] >= _KNOWN_STEPS and self._relative(n) < _FLAT_RATIO * self._relative(few[-1])

    # --- prompt tokens ------------------------------------------------------------------------------------------------

    @property
    def knows_prompts(self) -> bool:
        """Whether prompt tokens have been measured."""
        return bool(self._token_s)

    def token_s(self, n: int) -> float:
        """Seconds that each token of a prompt piece of `n` tokens adds to a step; a guess before any measurement."""
        if not self._token_s:
            return _GUESSED_TOKEN_S
        size = n.bit_length()
        nearest = self._nearest.get(size)
        if nearest is None:
            nearest = self._nearest[size] = min(self._token_s, key=lambda known: abs(known - size))
        return self._token_s[nearest]

    def observe_prompt(self, n: int, seconds: float, *, decode_s: float | None = None) -> None:
        """Learns from a step to which a piece of `n` prompt tokens added `seconds`. `decode_s`: the time added to
        `llama_decode`, if it is reliable enough to be learned as the minimum."""
        size = n.bit_length()
        old = self._token_s.get(size)
        if old is None:
            self._nearest = {}
        now = self._token_s[size] = seconds / n if old is None else old + NEW_TIME_WEIGHT * (seconds / n - old)
        if decode_s is not None:
            best, now = self._best_token_s.get(size, decode_s / n), min(now, decode_s / n)
            self._best_token_s[size] = min(now, best + _BEST_TOKEN_RISE * (now - best))

    def bare(self) -> BareCosts:
        """The minimum cost of `llama_decode`, as far as known."""
        least = min(self._best_token_s.values(), default=0.0)
        tokens = {size: self._best_token_s.get(size, max(least, now)) for size, now in self._token_s.items()}
        return BareCosts.of(
            ((n, self._best_level * self._relative(n)) for n in self._counts),
            ((1 << (size - 1), seconds) for size, seconds in tokens.items()),
        )

    def prompt_tokens_in(self, seconds: float) -> int:
        """How many prompt tokens fit into this time, as one piece; a guess before any measurement."""
        if not self._token_s:
            return int(seconds / _GUESSED_TOKEN_S)
        for size in range(max(self._token_s), 0, -1):
            n = int(seconds / self.token_s(1 << (size - 1)))
            if n >> (size - 1):
                return n if size == max(self._token_s) else min(n, (1 << size) - 1)
        return 0


def whole_tiles(n: int) -> int:
    """The largest multiple of the tile size within `n` tokens; `n` itself if it is less than the smallest tile."""
    return next((n - n % tile for tile in sorted(TILES, reverse=True) if n >= tile), n)
