"""What a step costs on this device, learned from the steps: seconds by decode rows, and by prompt tokens beside them.

Example, Q4_0 weights on two AVX-512 cores: 12 rows take 13.6 ms, 15 rows 18.1 ms, 16 rows 14.2 ms, because the kernels
compute rows in tiles of 4 and 16 and the rest row by row. So 15 rows are computed as 16, with a padding row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from cppbatch.engine.ideal import BareCosts

TILES = (4, 16)
"""Rows that llama.cpp's CPU kernels compute at once (ggml-cpu `repack.cpp`, `llamafile/sgemm.cpp`)."""

_NEW_LEVEL = 0.3  # weight of a new measurement in the level
_NEW_SHAPE = 0.1  # the same in the shape, once a number of rows has been seen ten times
_MAX_ERROR = 0.25  # a step that takes longer than expected counts as at most so much longer: the machine was disturbed
_MAX_RATIO = 2.0  # the same for a number of rows that is hardly known
_WORTH = 0.98  # padded rows must take less than this part of the time
_MIN_SEEN = 3  # steps before the time of a number of rows is compared
_TRY_EVERY = 64  # steps with a number of rows; then one step with the next other number, to keep its time up to date
_FLAT = 1.3  # where rows cost less than this times what a quarter of them cost, padding cannot gain
_GUESSED_TOKEN_S = 0.001
_NEW_TOKEN_S = 0.3
_FORGET_LEVEL = 0.0002  # how fast the best level rises towards the present one, a step: halfway in some minutes
_FORGET_TOKEN_S = 0.002  # the same for prompt tokens
_BARE_EVERY = 64  # steps; then `bare` is made again, after every one of the first `2 * _BARE_EVERY`

Groups = Sequence[int]
"""Numbers of decode rows that llama.cpp computes together. One number, except where sequences have streams of their
own: there only rows of consecutive seq_ids are computed together (docs/decisions/0001)."""


class StepCost:
    """Running means of step times.

    The time of a group of `n` rows is `level * shape[n]`. The level follows what changes the time of all steps: longer
    sequences, other programs. The shape is what one number of rows costs relative to another, so times of numbers
    of rows that were seen at different moments can be compared.

    The time of prompt tokens is a running mean for each size of a prompt piece: 4-7 tokens, 8-15, 16-31 ...

    `bare` has the costs at best, of `llama_decode` alone: the best level and times of prompt tokens fall at once and
    rise slowly.
    """

    def __init__(self) -> None:
        self._shape: dict[int, float] = {}
        self._counts: list[int] = []  # the first number of rows, and those that were seen often enough, rising
        self._seen: Counter[int] = Counter()
        self._steps: Counter[int] = Counter()  # steps with so many rows to compute, padded or not
        self._level = self._decode_level = self._best_level = 1.0
        self._token_s: dict[int, float] = {}
        self._best_token_s: dict[int, float] = {}
        self._bare: BareCosts | None = None
        self._n_bare = 0

    # --- rows ---------------------------------------------------------------------------------------------------------

    @property
    def knows_rows(self) -> bool:
        """Whether a step without prompt tokens has been measured."""
        return bool(self._shape)

    def knows_about(self, groups: Groups) -> bool:
        """Whether about so many rows have been measured for each group: 1, 2-3, 4-7, 8-15 ..."""
        sizes = {known.bit_length() for known in self._shape}
        return all(n.bit_length() in sizes for n in groups)

    def has_seen(self, groups: Groups) -> bool:
        """Whether exactly these numbers of rows have been measured often enough."""
        return all(self._seen[n] >= _MIN_SEEN for n in groups)

    def rows_s(self, groups: Groups) -> float:
        """Seconds of a step of these rows without prompt tokens; call it when `knows_rows`."""
        return self._level * self.relative(groups)

    def relative(self, groups: Groups) -> float:
        """The same without the level."""
        return sum(self._relative(n) for n in groups)

    def _relative(self, n: int) -> float:
        """Of one group. A number of rows that is hardly known costs at most what its neighbours say."""
        own = self._shape.get(n)
        if own is None:
            return self._between(n)
        return own if self._seen[n] >= _MIN_SEEN else min(own, self._between(n))

    def _between(self, n: int) -> float:
        """On the line through the next known numbers of rows. More rows than any known number cost as much more as
        prompt tokens; whole tiles at most that much more than any smaller number of rows, whole tiles or not."""
        counts = self._counts
        at = bisect_left(counts, n)
        if at == 0:
            return self._shape[counts[0]]
        is_tile = self.knows_prompts and n % TILES[0] == 0
        smaller = counts[:at] if is_tile else counts[at - 1 : at]
        with_more = min(self._shape[known] + (n - known) * self.token_s(n - known) / self._level for known in smaller)
        if at == len(counts):
            return with_more
        low, high = counts[at - 1], counts[at]
        part = (n - low) / (high - low)
        on_line = self._shape[low] + part * (self._shape[high] - self._shape[low])
        return min(on_line, with_more) if is_tile else on_line

    def observe_rows(self, groups: Groups, seconds: float, decode_s: float | None = None) -> None:
        """Learns from a step without prompt tokens. `groups`: its rows, padding included. `decode_s`: the time in
        `llama_decode`; None: all of it."""
        decode_s = seconds if decode_s is None else decode_s
        if unknown := {n for n in groups if n not in self._shape}:
            if self._shape:
                seconds = min(seconds, _MAX_RATIO * self.rows_s(groups))
            known = self._shape | {n: seconds / self._level * n / sum(groups) for n in unknown}
            self._shape, self._counts = known, self._counts or sorted(known)  # at once: Ctrl-C may interrupt a step
            return
        if new := {n for n in groups if self._seen[n] < _MIN_SEEN}:
            self._observe_new(new, groups, seconds)
            return
        relative = self.relative(groups)
        error = min(seconds / (self._level * relative) - 1, _MAX_ERROR)
        self._level *= 1 + _NEW_LEVEL * error
        self._decode_level *= 1 + _NEW_LEVEL * min(decode_s / (self._decode_level * relative) - 1, _MAX_ERROR)
        best = self._best_level + _FORGET_LEVEL * (self._decode_level - self._best_level)
        self._best_level = min(self._decode_level, best)
        if len(groups) == 1:
            n = groups[0]
            self._seen[n] += 1
            self._shape[n] *= 1 + max(_NEW_SHAPE, 0.5 / self._seen[n]) * error

    def _observe_new(self, new: set[int], groups: Groups, seconds: float) -> None:
        """What a step takes more, or less, is due to the numbers of rows that are hardly known. Of the steps of one
        group the shortest counts: a disturbance makes a step longer, and rows that seem slow are not computed again."""
        expected_s = self.rows_s([n for n in groups if n in new])
        error = min(max((seconds - self.rows_s(groups)) / expected_s, 1 / _MAX_RATIO - 1), _MAX_RATIO - 1)
        for n in new:
            if len(groups) == 1:
                self._shape[n] = min(self._shape[n], seconds / self._level)
            else:
                self._shape[n] = self._relative(n) * (1 + 0.5 * error)
            self._seen[n] += 1
            if self._seen[n] == _MIN_SEEN:
                self._counts = sorted({*self._counts, n})

    def seed(self, rows_s: Iterable[tuple[int, float]]) -> None:
        """Begins with times that were measured before: numbers of rows with their seconds."""
        for n, seconds in rows_s:
            self._shape[n], self._seen[n] = seconds, _MIN_SEEN
        self._counts = sorted(self._shape)

    def rows_to_compute(self, n: int, most: int) -> int:
        """How many rows to compute where `n` are wanted and at most `most` are possible: more than `n` if that is
        faster.

        Now and then the answer is another number than the fastest, so that its time becomes known: call this once a
        step.
        """
        tiles = [up for tile in TILES if n < (up := -(-n // tile) * tile) <= min(most, 2 * n)]
        if not tiles or self._is_flat(n):
            return n
        self._steps[n] += 1
        candidates = [n, *dict.fromkeys(tiles)]
        for candidate in candidates:
            if self._seen[candidate] < _MIN_SEEN:
                return candidate
        turn, rest = divmod(self._steps[n], _TRY_EVERY)
        if rest == 0:
            return candidates[turn % len(candidates)]
        best = min(candidates, key=self._relative)
        return best if self._relative(best) < _WORTH * self._relative(n) else n

    def is_worth_joining(self, one: int, between: int, other: int) -> bool:
        """Whether two groups of rows, with padding rows between them, cost less as one group."""
        joined = one + between + other
        return joined not in self._seen or self._relative(joined) < _WORTH * self.relative((one, other))

    def _is_flat(self, n: int) -> bool:
        """Whether rows cost next to nothing here, as on a GPU: known once a quarter of `n` rows has been measured."""
        few = [known for known in self._counts if 4 * known <= n and self._seen[known] >= _MIN_SEEN]
        return bool(few) and self._seen[n] >= _MIN_SEEN and self._relative(n) < _FLAT * self._relative(few[-1])

    # --- prompt tokens ------------------------------------------------------------------------------------------------

    @property
    def knows_prompts(self) -> bool:
        """Whether prompt tokens have been measured."""
        return bool(self._token_s)

    def token_s(self, n: int) -> float:
        """Seconds that each token of a prompt piece of `n` tokens adds to a step; a guess before any is known."""
        if not self._token_s:
            return _GUESSED_TOKEN_S
        return self._token_s[min(self._token_s, key=lambda size: abs(size - n.bit_length()))]

    def observe_prompt(self, n: int, seconds: float, *, decode_s: float | None = None) -> None:
        """Learns from a step to which a piece of `n` prompt tokens added `seconds`. `decode_s`: what it added to
        `llama_decode`, where that is certain enough to be learned as the best."""
        size = n.bit_length()
        old = self._token_s.get(size)
        now = self._token_s[size] = seconds / n if old is None else old + _NEW_TOKEN_S * (seconds / n - old)
        if decode_s is not None:
            best, now = self._best_token_s.get(size, decode_s / n), min(now, decode_s / n)
            self._best_token_s[size] = min(now, best + _FORGET_TOKEN_S * (now - best))

    def bare(self) -> BareCosts:
        """What `llama_decode` costs at best, as far as is known. Call it once a step."""
        self._n_bare += 1
        if self._bare is None or self._n_bare < 2 * _BARE_EVERY or self._n_bare % _BARE_EVERY == 0:
            least = min(self._best_token_s.values(), default=0.0)
            tokens = {size: self._best_token_s.get(size, max(least, now)) for size, now in self._token_s.items()}
            self._bare = BareCosts.of(
                ((n, self._best_level * self._relative(n)) for n in self._counts),
                ((1 << (size - 1), seconds) for size, seconds in tokens.items()),
            )
        return self._bare

    def prompt_tokens_in(self, seconds: float) -> int:
        """How many prompt tokens fit into this time, as one piece; a guess before any is known."""
        if not self._token_s:
            return int(seconds / _GUESSED_TOKEN_S)
        for size in range(max(self._token_s), 0, -1):
            n = int(seconds / self.token_s(1 << (size - 1)))
            if n >> (size - 1):
                return n if size == max(self._token_s) else min(n, (1 << size) - 1)
        return 0


def whole_tiles(n: int) -> int:
    """The largest whole number of tiles within `n` tokens; `n` itself if that is less than the smallest tile."""
    return next((n - n % tile for tile in sorted(TILES, reverse=True) if n >= tile), n)
