"""The step budget: how many prompt tokens a step may compute while other sequences wait for their next token."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from itertools import accumulate, takewhile

from cppbatch.config import Preference
from cppbatch.engine.ideal import BareCosts
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.step_cost import NEW_TIME_WEIGHT, Groups, StepCost, whole_tiles

MIN_PIECE_TOKENS = 4  # a prompt always makes progress
_SLOWDOWN: dict[Preference, float] = {"latency": 1.5, "balanced": 6.0, "throughput": 1e9}
"""Time that prompts may add to a step, in multiples of a step without prefill. Guarantee for `latency`: at most twice
that time is added to 95% of the steps."""
_REFRESH_STEPS = 16  # steps with prefill; then one without measures the current time of decoding alone
_PROMPT_WEIGHT = 8  # decoding sequences that an additional prompt outweighs: many prompts mean many late first tokens
_BACKGROUND_S = 0.2  # time of background prompts in a step, since a new request waits for the end of the step
_QUIET_WEIGHT_IN_PREFILL = 0.02  # of a new time without prefill, while prompts are being computed


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
        self._may_exceed = prefer == "balanced" and target_s is None  # the target, for whole prompts and tiles
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
            # background pieces have at least ubatch / 16 tokens: smaller ones would cost throughput
            piece = max(MIN_PIECE_TOKENS, self._max_alone // 16, cost.prompt_tokens_in(_BACKGROUND_S))
            most = min(most, piece)
        n_decoding = n_decode + n_others
        if n_decoding == 0 or not cost.knows_prompts:
            return min(most, self._max_alone)
        if n_decode and (self._since_refresh >= _REFRESH_STEPS or not cost.knows_about(groups)):
            return 0  # measure this number of rows without prefill
        if not self._quiet_level:
            return most
        slowdown = 1 + self._slowdown * max(1, _PROMPT_WEIGHT * (n_prefill - 1) / n_decoding)
        quiet_s = self._quiet_level * cost.relative((*groups, n_others) if n_others else groups)
        target_s = self._target_s or max(0.025, slowdown * quiet_s)
        rows_s = cost.rows_s(groups) if groups else 0.0
        wanted = cost.prompt_tokens_in(max(0.0, target_s - rows_s))
        return min(most, max(MIN_PIECE_TOKENS, whole_tiles(wanted)))

    def whole_tokens(self, groups: Groups) -> int:
        """The prompt tokens that a step of these decode rows may compute as one whole, although it then takes longer
        than its target: up to 2 s. 0 where the target is strict."""
        if not self._may_exceed or not (self._quiet_level and self.cost.knows_prompts):
            return 0
        rows_s = self.cost.rows_s(groups) if groups else 0.0
        return min(self._max_tokens - sum(groups), self.cost.prompt_tokens_in(max(0.0, 2.0 - rows_s)))

    def observe(self, groups: Groups, n_prefill: int, seconds: float, decode_s: float | None = None) -> None:
        """Learns from the duration of a step. `groups`: its decode rows, including padding. `decode_s`: the time in
        `llama_decode`; None: all of it."""
        decode_s = seconds if decode_s is None else decode_s
        cost = self.cost
        if n_prefill == 0:
            weight = _QUIET_WEIGHT_IN_PREFILL if self._since_refresh else NEW_TIME_WEIGHT
            cost.observe_rows(groups, seconds, decode_s)
            level = seconds / cost.relative(groups)
            self._quiet_level += (weight if self._quiet_level else 1.0) * (level - self._quiet_level)
            self._since_refresh = 0
            return
        self._since_refresh = self._since_refresh + 1 if groups else 0
        if n_prefill >= MIN_PIECE_TOKENS or not cost.knows_prompts:  # fewer are too noisy
            rows_s = cost.rows_s(groups) if groups and cost.knows_rows else 0.0
            # A noisy clock must not make it 0: at least 5% of the step is the prompt tokens' time.
            prompt_s = max(seconds - rows_s, 0.05 * seconds)
            is_certain = rows_s <= 0.5 * decode_s
            cost.observe_prompt(n_prefill, prompt_s, decode_s=decode_s - rows_s if is_certain else None)


def with_whole_prompts(budget: int, most_whole: int, pending: Iterable[int]) -> int:
    """The prompt tokens that a step may compute. `most_whole`: as `StepBudget.whole_tokens`. `pending`: those of its
    prompts, in order.

    Prompts that have up to twice the budget are computed whole: streams wait once for them, not twice for halves.
    """
    most = min(2 * budget, most_whole)
    return max(budget, *takewhile(lambda n: n <= most, accumulate(pending, initial=0)))


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
        """`max_tokens` to `prefer`: for each `StepBudget`. `rows_s`: earlier measurements: decode rows with seconds per
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
            if len(self._budgets) > 64:  # sets of adapters
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
        """Learns from a step with these adapters (`StepBudget.observe`), except the first one after a switch."""
        self._last = self.of(adapters)
        self._last.observe(groups, n_prefill, seconds, decode_s)

    def use_layout(self, *, unified: bool) -> None:
        """Switches the layout. Step times are learned per layout."""
        self._by_layout[self._unified] = self._last, self._budgets
        self._unified = unified
        self._last, self._budgets = self._by_layout.get(unified) or (self._new_budget(), {})
