"""The cost of a step on this device, learned from steps: seconds by decode rows, and by additional prompt tokens.

Example, Q4_0 weights on two AVX-512 cores: 12 rows take 13.6 ms, 15 rows 18.1 ms, 16 rows 14.2 ms, because the kernels
compute rows in tiles of 4 and 16, and the rest row by row. So 15 rows are computed as 16, with a padding row.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import partial
from itertools import accumulate, takewhile
from math import inf

from cppbatch.config import Preference
from cppbatch.engine.ideal import BareCosts
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.sequence import Seq

TILES = (4, 16)
"""Rows that llama.cpp's CPU kernels compute at once (ggml-cpu `repack.cpp`, `llamafile/sgemm.cpp`)."""

_NEW_LEVEL = 0.3  # weight of a new measurement in the level
_NEW_SHAPE = 0.1  # the same for the shape, once a number of rows has been seen ten times
_MAX_ERROR = 0.25  # a step that takes longer than expected counts as at most this much longer: probably a disturbance
_MAX_RATIO = 2.0  # the same for a number of rows with few measurements
_WORTH = 0.98  # padded rows must take less than this fraction of the time
_MIN_SEEN = 3  # steps before the time of a number of rows is used in comparisons
_WELL_SEEN = 10  # steps with a number of rows before they change the level with full weight
_STALE = 0.4  # maximum weight in the shape of a number of rows that was not measured for long: each step adds 1/80
_STALE_STEP = 1 / 80
_TRY_EVERY = 64  # steps with a number of rows; then one with another number in turn, to update its time
_FLAT_ROW = 0.5  # a row that costs less than this, relative to a prompt token, is cheap
_FLAT = 1.3  # if rows cost less than this times a quarter of them, padding cannot help
_GUESSED_TOKEN_S = 0.001
_NEW_TOKEN_S = 0.3
_FORGET_LEVEL = 0.0002  # rise of the best level towards the current one per step: halfway in some minutes
_FORGET_TOKEN_S = 0.002  # the same for prompt tokens

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
        return any(n in self._shape and self._seen[n] < _MIN_SEEN for n in groups)

    def rows_s(self, groups: Groups) -> float:
        """Seconds of a step of these rows without prompt tokens; call it when `knows_rows`."""
        return self._level * self.relative(groups)

    def relative(self, groups: Groups) -> float:
        """The time of these rows without the level."""
        return sum(self._relative(n) for n in groups)

    def relative_up_to(self, n: int) -> list[float]:
        """The same for 0 to n rows in one group. Below the smallest measured number, half of the time is assumed to be
        proportional to the rows."""
        first = self._counts[0]
        below = [self._shape[first] * (1 + m / first) / 2 for m in range(1, min(first, n + 1))]
        return [0.0, *below, *(self._relative(m) for m in range(first, n + 1))]

    def _relative(self, n: int) -> float:
        """The time of one group. A number of rows with few measurements is limited by its neighbours."""
        own = self._shape.get(n)
        if own is None:
            return self._between(n)
        return own if self._seen[n] >= _MIN_SEEN else min(own, self._between(n))

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
        is_flat = self._level * row < _FLAT_ROW * self.token_s(n - last)
        return self._shape[last] + (n - last) * max(0.0, row) if is_flat else inf

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
        self._errors = [*self._errors[-2:], error]
        self._n_observed += 1
        stale = max(min(_STALE, (self._n_observed - self._observed_at.get(n, 0)) * _STALE_STEP) for n in groups)
        weight = _NEW_LEVEL * min(1.0, min(self._seen[n] for n in groups) / _WELL_SEEN) * (1 - stale / _STALE)
        self._level *= 1 + weight * sorted(self._errors)[len(self._errors) // 2]
        self._decode_level *= 1 + _NEW_LEVEL * min(decode_s / (self._decode_level * relative) - 1, _MAX_ERROR)
        best = self._best_level + _FORGET_LEVEL * (self._decode_level - self._best_level)
        self._best_level = min(self._decode_level, best)
        if len(groups) == 1:
            n = groups[0]
            self._seen[n] += 1
            self._shape[n] *= 1 + max(_NEW_SHAPE, 0.5 / self._seen[n], stale) * error
            self._observed_at[n] = self._n_observed

    def _observe_new(self, new: set[int], groups: Groups, seconds: float) -> None:
        """Attributes the deviation of a step to the numbers of rows with few measurements. For steps with one group,
        the shortest counts: disturbances make steps longer, and rows that seem slow are not computed again."""
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
        """Starts with earlier measurements: numbers of rows with their seconds."""
        for n, seconds in rows_s:
            self._shape[n], self._seen[n] = seconds, _MIN_SEEN
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
            if self._seen[candidate] < _MIN_SEEN:
                return candidate
        turn, rest = divmod(self._steps[n], _TRY_EVERY)
        if rest == 0:
            return candidates[turn % len(candidates)]
        best = min(candidates, key=self._relative)
        return best if self._relative(best) < _WORTH * self._relative(n) else n

    def is_worth_joining(self, one: int, between: int, other: int) -> bool:
        """Whether two groups of rows, joined by padding rows, cost less as one group."""
        joined = one + between + other
        return joined not in self._seen or self._relative(joined) < _WORTH * self.relative((one, other))

    def _is_flat(self, n: int) -> bool:
        """Whether rows are almost free here, as on a GPU; known once a quarter of `n` rows has been measured."""
        few = [known for known in self._counts if 4 * known <= n and self._seen[known] >= _MIN_SEEN]
        return bool(few) and self._seen[n] >= _MIN_SEEN and self._relative(n) < _FLAT * self._relative(few[-1])

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
        now = self._token_s[size] = seconds / n if old is None else old + _NEW_TOKEN_S * (seconds / n - old)
        if decode_s is not None:
            best, now = self._best_token_s.get(size, decode_s / n), min(now, decode_s / n)
            self._best_token_s[size] = min(now, best + _FORGET_TOKEN_S * (now - best))

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


# --- step budget -----------------------------------------------------------------------------------------------------
# The number of prompt tokens that a step may compute while other sequences wait for their next token.


_MIN_CHUNK = 4  # tokens: a prompt always makes progress
_MIN_TARGET_S = 0.025  # shorter steps cost throughput without a noticeable benefit
_SLOWDOWN: dict[Preference, float] = {"latency": 1.5, "balanced": 6.0, "throughput": 1e9}
"""Time that prompts may add to a step, in multiples of a step without prefill. Guarantee for `latency`: at most twice
that time is added to 95% of the steps."""
_WHOLE = 2  # budgets that whole prompts may take in one step, with `balanced` ...
_WHOLE_S = 2.0  # ... if it is not longer than this pause of a text
_REFRESH_EVERY = 16  # steps with prefill; then one without measures the current time of decoding alone
_PROMPT_WEIGHT = 8  # weight of each additional prompt, in decoding sequences: many prompts mean many late first tokens
_BACKGROUND_S = 0.2  # time of background prompts in a step, since a new request waits for the end of the step
_BACKGROUND_PART = 16  # background pieces have at least ubatch / 16 tokens: smaller ones would cost throughput
_NEW_QUIET = 0.3  # weight of a new measurement in the level of steps without prefill
_NEW_QUIET_READING = 0.02  # the same while prompts are being computed
_MAX_BUDGETS = 64  # adapter sets whose step times are stored


class StepBudget:
    """Keeps steps short while a sequence decodes, and large otherwise.

    A step takes the time of its decode rows plus a time per prompt token: in measurements, mixing costs the sum of
    both, never more (docs/decisions/0002). `StepCost` learns both from the steps. Example: 8 rows take 50 ms, a prompt
    token 1 ms; a step may take 125 ms, so it gets 64 prompt tokens, a multiple of the tile size.

    `target_s`: maximum seconds of a step. None: 7 times a step without prefill (`prefer` "balanced"; 2.5 times for
    "latency", no limit for "throughput"), at least 25 ms; longer with several prompts, so that a few decoding sequences
    do not delay many first tokens.
    """

    def __init__(
        self,
        max_tokens: int,
        target_s: float | None = None,
        max_alone: int | None = None,
        *,
        prefer: Preference = "balanced",
        cost: StepCost | None = None,
    ) -> None:
        """`max_tokens`: tokens per step. `max_alone`: prompt tokens of a step without decoding sequences; None: the
        same. `cost`: the known step times."""
        self.cost = cost or StepCost()
        self._max_tokens = max_tokens
        self._max_alone = min(max_tokens, max_alone or max_tokens)
        self._target_s = target_s
        self._slowdown = _SLOWDOWN[prefer]
        self._whole = _WHOLE if prefer == "balanced" and target_s is None else 1
        self._quiet_level = 0.0
        """Like the level of `cost`, but hardly changes while prompts are being computed. Their cells slow decoding
        down, which must not be a reason to slow it down further. 0: not known yet."""
        self._since_refresh = 0

    def prefill_tokens(self, groups: Groups, n_prefill: int, n_others: int = 0, *, background: bool = False) -> int:
        """How many prompt tokens of `n_prefill` sequences the next step may compute with these groups of decode rows.

        `n_others`: sequences that decode in other steps (with other LoRA adapters) and wait for the end of this one.
        `background`: all these prompts are background work, so the step stays short in case requests arrive.
        """
        cost, n_decode = self.cost, sum(groups)
        most = self._max_tokens - n_decode
        if background:
            piece = max(_MIN_CHUNK, self._max_alone // _BACKGROUND_PART, cost.prompt_tokens_in(_BACKGROUND_S))
            most = min(most, piece)
        n_decoding = n_decode + n_others
        if n_decoding == 0 or not cost.knows_prompts:
            return min(most, self._max_alone)
        if n_decode and (self._since_refresh >= _REFRESH_EVERY or not cost.knows_about(groups)):
            return 0  # measure this number of rows without prefill
        if not self._quiet_level:
            return most
        slowdown = 1 + self._slowdown * max(1, _PROMPT_WEIGHT * (n_prefill - 1) / n_decoding)
        quiet_s = self._quiet_level * cost.relative((*groups, n_others) if n_others else groups)
        target_s = self._target_s or max(_MIN_TARGET_S, slowdown * quiet_s)
        rows_s = cost.rows_s(groups) if groups else 0.0
        wanted = cost.prompt_tokens_in(max(0.0, target_s - rows_s))
        return min(most, max(_MIN_CHUNK, whole_tiles(wanted)))

    def with_whole_prompts(self, budget: int, groups: Groups, pending: Iterable[int]) -> int:
        """The prompt tokens that a step of these decode rows may compute. `pending`: those of its prompts, in order.

        Prompts that have up to twice the budget are computed whole, if the step takes at most 2 s: streams wait once
        for them, not twice for halves.
        """
        if self._whole == 1 or not (self._quiet_level and self.cost.knows_prompts):
            return budget
        rows_s = self.cost.rows_s(groups) if groups else 0.0
        in_time = self.cost.prompt_tokens_in(max(0.0, _WHOLE_S - rows_s))
        most = min(self._whole * budget, self._max_tokens - sum(groups), in_time)
        return max(budget, *takewhile(lambda n: n <= most, accumulate(pending, initial=0)))

    def observe(self, groups: Groups, n_prefill: int, seconds: float, decode_s: float | None = None) -> None:
        """Learns from the duration of a step. `groups`: its decode rows, including padding. `decode_s`: the time in
        `llama_decode`; None: all of it."""
        decode_s = seconds if decode_s is None else decode_s
        cost = self.cost
        if n_prefill == 0:
            weight = _NEW_QUIET_READING if self._since_refresh else _NEW_QUIET
            cost.observe_rows(groups, seconds, decode_s)
            level = seconds / cost.relative(groups)
            self._quiet_level += (weight if self._quiet_level else 1.0) * (level - self._quiet_level)
            self._since_refresh = 0
            return
        self._since_refresh = self._since_refresh + 1 if groups else 0
        if n_prefill >= _MIN_CHUNK or not cost.knows_prompts:  # fewer are too noisy
            rows_s = cost.rows_s(groups) if groups and cost.knows_rows else 0.0
            # A noisy clock must not make it 0: at least 5% of the step is the prompt tokens' time.
            prompt_s = max(seconds - rows_s, 0.05 * seconds)
            is_certain = rows_s <= 0.5 * decode_s
            cost.observe_prompt(n_prefill, prompt_s, decode_s=decode_s - rows_s if is_certain else None)


class StepBudgets:
    """The step budgets of an engine: one per LoRA adapter set and KV layout."""

    def __init__(
        self,
        max_tokens: int,
        target_s: float | None = None,
        max_alone: int | None = None,
        *,
        prefer: Preference = "balanced",
        rows_s: Iterable[tuple[int, float]] = (),
        unified: bool = True,
    ) -> None:
        """`max_tokens` to `prefer`: as in `StepBudget`. `rows_s`: earlier measurements: decode rows with seconds per
        step. `unified`: the initial layout."""
        self._new_budget = partial(StepBudget, max_tokens, target_s, max_alone, prefer=prefer)
        self._prompt_piece = max_alone or max_tokens
        self._unified = unified
        self._last = self._new_budget()
        self._last.cost.seed(rows_s)
        self._budgets: dict[AdapterSet, StepBudget] = {}
        self._by_layout: dict[bool, tuple[StepBudget, dict[AdapterSet, StepBudget]]] = {}

    def of(self, adapters: AdapterSet) -> StepBudget:
        """The budget of a set; a new set starts with that of the previous step's set."""
        budget = self._budgets.get(adapters)
        if budget is None or not budget.cost.knows_rows:
            budget = self._budgets[adapters] = deepcopy(self._last)
            if len(self._budgets) > _MAX_BUDGETS:
                del self._budgets[next(iter(self._budgets))]
        return budget

    def bare_costs(self) -> BareCosts:
        """The minimum costs of steps, with the adapters of the last step."""
        return self._last.cost.bare()

    def prompt_token_s(self) -> float:
        """Seconds to compute a token of a long prompt; 0 before any measurement."""
        cost = self._last.cost
        return cost.token_s(self._prompt_piece) if cost.knows_prompts else 0.0

    def observe(
        self, adapters: AdapterSet, groups: Groups, n_prefill: int, seconds: float, decode_s: float | None = None
    ) -> None:
        """As `StepBudget.observe`, for a step with these adapters, except the first one after a switch."""
        self._last = self.of(adapters)
        self._last.observe(groups, n_prefill, seconds, decode_s)

    def use_layout(self, *, unified: bool) -> None:
        """Switches the layout. Step times are learned per layout."""
        self._by_layout[self._unified] = self._last, self._budgets
        self._unified = unified
        self._last, self._budgets = self._by_layout.get(unified) or (self._new_budget(), {})


# --- lora scheduling -------------------------------------------------------------------------------------------------
# The LoRA adapter set of the next step: llama.cpp applies one set to a whole batch.


_TURN = 4  # steps: a switch makes llama.cpp replan its graph, but other sets should not wait long


class LoraRoundRobin:
    """Adapter sets of running sequences take turns of four steps.

    A new set joins the round after the sets of earlier rank: at the end, unless its requests have a higher priority. So
    a set waits for one turn of each running set. Later sets can only overtake it by priority, and ageing limits for how
    long. A single set always has the turn.
    """

    def __init__(self) -> None:
        self._round: list[AdapterSet] = []  # the set with the turn, the next one ...
        self._now: AdapterSet = ()
        self._steps = 0  # of the current turn

    def order(self, running: Iterable[Seq]) -> list[AdapterSet]:
        """The sets of these sequences, in the order in which they may compute.

        `running`: in order of rank. The first set has the turn; the next one computes if the first has no work in this
        step, and so on.
        """
        best: dict[AdapterSet, tuple[float, int]] = {}
        for sequence in running:
            best.setdefault(sequence.adapters, sequence.rank)
        self._round = [its for its in self._round if its in best]
        start = int(self._steps > 0)  # a turn in progress is not cut short
        for its, rank in best.items():
            if its not in self._round:
                behind = (i for i, other in enumerate(self._round) if i >= start and best[other] > rank)
                self._round.insert(next(behind, len(self._round)), its)
        return self._round.copy()

    def take(self, adapters: AdapterSet) -> bool:
        """Selects the set for the next step. Returns whether that is a switch from another set."""
        is_switch = adapters != self._now
        if is_switch or adapters != self._round[0]:
            self._round.remove(adapters)
            self._round.insert(0, adapters)
            self._now, self._steps = adapters, 0
        self._steps += 1
        if self._steps >= _TURN:
            self._round.append(self._round.pop(0))
            self._steps = 0
        return is_switch
