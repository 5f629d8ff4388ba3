"""Scheduling: which sequences compute how many tokens in the next step. Independent of llama.cpp.

| rule | method |
|---|---|
| order of the queue | `Scheduler.add` (rank) |
| which sequence is admitted | `Scheduler._admit`, `_fits` |
| which sequence is preempted when cells run out | `Scheduler._preempt_until_free` |
| which sequence is preempted for one of higher priority | `Scheduler._preempt_for` |
| which prompt is computed first | `Scheduler._in_turn` |
| when background work pauses | `Scheduler._may_compute` |
| which padding rows make a step faster | `StepShape.pad`, `_join_rows` |
| which sequence moves so that decode rows are adjacent | `StepShape._close_gaps` |
| which sizes of prompt pieces are computed fast | `StepShape.piece`, `whole_budget` |
| which rest of a step is too small for a piece of another prompt | `_prefill` (`_LEAST_REST`) |
| which padding rows prevent ubatches that are too small | `FixedRows._batch` |
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from operator import attrgetter

from cppbatch.engine.ideal import StepWork
from cppbatch.engine.kv.cached_prefix import Match
from cppbatch.engine.kv.pool import KVPool
from cppbatch.engine.lora_turns import LoraRoundRobin
from cppbatch.engine.sequence import Seq, SeqStatus
from cppbatch.engine.speculation.speculator import Speculator
from cppbatch.engine.step_budget import StepBudget, StepBudgets, with_whole_prompts
from cppbatch.engine.step_cost import Groups, StepCost
from cppbatch.engine.step_plan import Scheduled, StepPlan
from cppbatch.engine.step_shape import StepShape

_MAX_HEADROOM_CELLS = 32  # reserved for the growth of each running sequence when another one is admitted
_LEAST_REST = 4  # a second prompt gets at least this part (1/4) of the step, or its own end: small ubatches cost most
_MAX_SCORED_TOKENS = 64  # of a prompt per step if each gets a row of logits (192 KiB with a vocabulary of 49,152)
AGING_S = 10.0  # seconds of waiting that count as much as one level of priority
_FAIRNESS_FACTOR = 4.0  # how long shorter prompts may overtake a prompt, in multiples of its own prefill time
_GUESSED_TURN_S, _TURN_WEIGHT = 0.5, 0.1  # seconds; weight of a new measurement


class Scheduler:
    """First come, first served within a priority; decode rows before prefill.

    Every rule uses the rank: `priority + arrival / 10 s`. A sequence's rank never changes. It has the effect of an
    ageing priority: ten seconds of waiting outweigh one level of priority.

    - Admission: in order of rank, if the cells for the sequence's uncached tokens are free, with headroom for running
      sequences to grow. If the first waiting sequence does not fit, later ones wait too, so small requests cannot
      starve a large one. A sequence that waits for its prefix, while another one computes it, is skipped.
    - Preemption: if cells run out, the running sequence last in rank loses its cells. It resumes before all sequences
      of later rank. So the first sequence in rank always continues, and no sequence starves.
    - Prefill alongside decode rows, and where the first prompt takes several steps: every other step serves the first
      prompt in rank. The steps in between serve the others, short ones first. A step that computes whole prompts has no
      piece of a long one beside them: that piece may take seconds. (Both in one step would also cost more: in the
      per-sequence layout llama.cpp reads all weights once per prompt.)
    - Clients: each request of a client counts as having arrived after the time that its earlier ones take, so that
      requests of several clients take turns.
    - LoRA: running sequences compute when their adapter set has its turn (`LoraRoundRobin`); others keep their cells.
    - Background: sequences with priority 100 (`BACKGROUND`) pause while a running sequence of another priority and
      earlier rank has no token yet.
    """

    def __init__(
        self,
        kv: KVPool,
        *,
        budgets: StepBudgets,
        shape: StepShape,
        n_parallel: int,
        speculator: Speculator | None = None,
    ) -> None:
        """`budgets`: the costs of steps, updated by the scheduler. `shape`: makes rows of the chosen sequences.
        `speculator`: chooses drafts; None: no drafts."""
        self._kv = kv
        self._shape = shape
        self._step_tokens = shape.step_tokens
        self._speculator = speculator
        self.n_parallel = n_parallel
        self._budgets = budgets
        self._lora = LoraRoundRobin()
        self._lora_by_layout = {kv.unified: self._lora}
        self._headroom = max(1, min(_MAX_HEADROOM_CELLS, kv.n_ctx // (4 * self.n_parallel)))
        # Both lists are in order of rank.
        self.waiting: list[Seq] = []
        self.running: list[Seq] = []
        self.blocked: Seq | None = None
        """The next sequence to admit, if it has more tokens than the maximum cells of a sequence."""
        self._just_preempted: set[Seq] = set()  # in this step, which must not readmit them
        self._n_added = 0
        self._turn_s = _GUESSED_TURN_S  # of a sequence, with all others running beside it
        self._next_due: dict[str, float] = {}  # by client
        self._serves_first_prompt = True  # the last step
        self._last_groups: Groups = ()  # of the last step
        self._had_drafts = False  # the last step
        self._timed: dict[int, Seq] = {}  # sequences with a timeout, by their number (`rank[1]`)
        self._deadlines: list[tuple[float, int]] = []  # a heap of (time, number of the sequence)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Seq) -> None:
        """Queues a new sequence."""
        request = sequence.request
        # Lower ranks run first. The sum has the effect of an ageing priority, but never changes.
        self._n_added += 1
        sequence.rank = (request.priority + self._due_at(sequence) / AGING_S, self._n_added)
        insort(self.waiting, sequence, key=_rank)
        for limit in (request.timeout, request.queue_timeout):
            if limit is not None:
                self._timed[self._n_added] = sequence
                heappush(self._deadlines, (sequence.arrived_at + limit, self._n_added))

    def _due_at(self, sequence: Seq) -> float:
        """When the sequence would start if its client had the engine alone: many requests of one client do not keep
        those of another waiting."""
        client = sequence.request.client
        if not client:
            return sequence.arrived_at
        due = max(sequence.arrived_at, self._next_due.get(client, 0.0))
        if len(self._next_due) >= 1000:  # clients
            self._next_due = {each: at for each, at in self._next_due.items() if at > sequence.arrived_at}
        self._next_due[client] = due + self._turn_s
        return due

    def finished(self, sequence: Seq, now: float) -> None:
        """Removes a finished sequence, and learns how long one takes."""
        self.remove(sequence)
        if sequence.admitted_at:
            turn_s = (now - sequence.admitted_at) / self.n_parallel
            self._turn_s += _TURN_WEIGHT * (turn_s - self._turn_s)

    def remove(self, sequence: Seq) -> None:
        """Removes a finished sequence from the queue or from the running sequences."""
        waits = sequence.status in (SeqStatus.WAITING, SeqStatus.SWAPPED)
        _remove(self.waiting if waits else self.running, sequence)
        self._timed.pop(sequence.rank[1], None)

    def restart(self, sequences: Iterable[Seq]) -> None:
        """Called after the KV cache was emptied: all of these wait again, in order of rank."""
        self.running.clear()
        self.waiting = sorted(sequences, key=_rank)

    def preempt_all(self) -> None:
        """Makes all running sequences wait, with their states in host memory as far as they fit."""
        for sequence in self.running:
            self._kv.preempt(sequence, save=True)
        self.waiting = sorted([*self.running, *self.waiting], key=_rank)
        self.running.clear()

    def layout_changed(self) -> None:
        """Called when the KV pool has switched layouts. Step times are learned per layout."""
        self._budgets.use_layout(unified=self._kv.unified)
        self._lora = self._lora_by_layout.setdefault(self._kv.unified, LoraRoundRobin())

    def pop_expired(self, now: float) -> list[Seq]:
        """Sequences whose `timeout` has expired, and never admitted ones whose `queue_timeout` has expired."""
        expired = []
        if len(self._deadlines) > 2 * len(self._timed) + 1000:  # most belong to finished sequences
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._timed]
            heapify(self._deadlines)
        while self._deadlines and self._deadlines[0][0] <= now:
            number = heappop(self._deadlines)[1]
            sequence = self._timed.get(number)
            if sequence is None:
                continue
            limit = sequence.request.timeout
            if not sequence.admitted_at or (limit is not None and now >= sequence.arrived_at + limit):
                expired.append(sequence)
                del self._timed[number]
        return expired

    def plan(self) -> StepPlan:
        """The next step. The caller applies it (`KVPool.apply`), then computes what is scheduled or removes its
        sequence."""
        plan = StepPlan()
        self._just_preempted.clear()
        self.blocked = None
        self._preempt_until_free()
        plan.admitted = self._admit()
        self._choose(plan)
        plan.n_tokens = sum(n for _, n in plan.all_scheduled) - plan.n_drafted
        return plan

    def _choose(self, plan: StepPlan) -> None:
        """Fills `plan.scheduled`: which running sequences compute how many tokens."""
        computing = self._may_compute()
        decoding = [s for s in computing if s.status is SeqStatus.DECODE and not s.moving]
        prompts = [s for s in computing if s.status is SeqStatus.PREFILL and not s.moving]
        # Includes sequences admitted in this step. Their cells are free once cached prefixes are evicted.
        self._kv.ensure_free(len(decoding))
        for adapters in self._lora.order(computing):
            rows = [s for s in decoding if s.adapters == adapters]
            prompts_now = [s for s in prompts if s.adapters == adapters]
            if (rows or prompts_now) and self._serve(plan, rows, prompts_now, self._budgets.of(adapters), decoding):
                plan.adapters, plan.is_switch = adapters, self._lora.take(adapters)
                break

    def _serve(
        self, plan: StepPlan, rows: list[Seq], prompts: list[Seq], step_budget: StepBudget, decoding: list[Seq]
    ) -> bool:
        """Fills the plan with these rows and pieces of these prompts, all with the same adapters. Returns whether there
        is anything to compute. `decoding`: all that may compute, whatever their adapters."""
        shape, cost = self._shape, step_budget.cost
        is_alone = not self.waiting and len(self.running) == len(rows)
        rows, beside = shape.choose_rows(plan, rows, prompts, cost, is_alone=is_alone)
        prefill = self._prefill(prompts, step_budget, plan.row_groups, len(rows), decoding)
        if not (rows or prefill):
            return False
        scheduled, n_padding = [(s, 1) for s in rows], 0
        if rows and not prefill:
            shape.pad(plan, len(rows), cost)
            if self._speculator:
                scheduled, n_padding = self._add_drafts(plan, scheduled, beside, cost, self._speculator)
        if any(sequence.next_run for sequence, _ in prefill):
            plan.media = [(sequence, n) for sequence, n in prefill if sequence.next_run]
            prefill = [(sequence, n) for sequence, n in prefill if not sequence.next_run]
        shape.fill(plan, scheduled, prefill, beside, n_padding)
        return True

    def _add_drafts(
        self, plan: StepPlan, rows: list[Scheduled], beside: list[Seq], cost: StepCost, speculator: Speculator
    ) -> tuple[list[Scheduled], int]:
        """The rows with the draft tokens that speed up generation, and the draft tokens of each padding row."""
        sequences = sorted((sequence for sequence, _ in rows), key=attrgetter("seq_id"))
        limits = self._shape.draft_limits(plan, sequences, beside, is_queue_empty=not self.waiting)
        drafted = speculator.plan(sequences, plan.row_groups, cost, limits) if limits else None
        if drafted is None:
            return rows, 0
        plan.row_groups = drafted.groups
        plan.n_drafted = sum(drafted.lengths)
        return [(s, 1 + n) for s, n in zip(sequences, drafted.lengths, strict=True)], drafted.n_padding

    def _may_compute(self) -> list[Seq]:
        """The running sequences, except paused background sequences: those ranked after a sequence of another priority
        that has no token yet."""
        first = next((s for s in self.running if not s.is_background and not s.n_generated), None)
        return [s for s in self.running if first is None or not s.is_background or s.rank < first.rank]

    def computed(self, plan: StepPlan, seconds: float, decode_s: float | None = None) -> None:
        """Learns from the duration of a step, and its time in `llama_decode` (None: all of it); but not if it switched
        adapters, because llama.cpp then replans its graph. On a GPU it does so for each new number of rows, which takes
        as long as the computation of a small model: drafts, and the step after them, count if the number is repeated.
        """
        n_prefill = plan.n_tokens - plan.n_decode - plan.n_beside
        changes_for_drafts = plan.row_groups != self._last_groups and (plan.n_drafted or self._had_drafts)
        self._last_groups, self._had_drafts = plan.row_groups, plan.n_drafted > 0
        if not (plan.is_switch or (self._shape.on_gpu and changes_for_drafts)):
            self._budgets.observe(plan.adapters, plan.row_groups, n_prefill, seconds, decode_s)

    def work(self, plan: StepPlan) -> StepWork:
        """The work of a step, for `TimeSplit`. Call it before its sequences are updated."""
        n_rows = plan.n_decode + plan.n_beside
        n_prompt, again = plan.n_tokens - n_rows, 0
        if n_prompt:
            again = sum(s.n_recomputed(n) for s, n in plan.scheduled if s.n_computed_before)
        n_unfinished = min(self.n_parallel, len(self.running) + len(self.waiting))
        return StepWork(n_rows, plan.row_groups, plan.n_drafted, 0, n_prompt, min(again, n_prompt), n_unfinished)

    def _prefill(
        self, prefilling: list[Seq], step_budget: StepBudget, groups: Groups, n_decode: int, decoding: list[Seq]
    ) -> list[Scheduled]:
        """Pieces of these prompts, as many as the step budget and the free cells allow alongside decode rows.

        `prefilling`: in order of rank, with the same adapters. `groups`: as `StepPlan.row_groups`. `n_decode`: decode
        rows of this step, without padding. `decoding`: all decoding sequences that may compute, including those of
        other adapter sets. Cells for their next tokens stay free, but not those for paused background sequences, which
        are preempted if cells run out.
        """
        if not prefilling:
            return []
        n_decoding, shape = len(decoding), self._shape
        groups = shape.padded(groups)
        prompts, long, budget, most_whole = self._prompt_budget(prefilling, step_budget, groups, n_decode, decoding)
        prefill: list[Scheduled] = []
        room, least_rest = self._step_tokens - sum(groups), budget // _LEAST_REST if self._kv.has_streams else 0
        for sequence in prompts:
            if prefill and sequence in long:
                continue
            end = sequence.piece_end
            if (run := sequence.next_run) and run.is_whole:
                # Waits for others to end if they have grown into its cells. They are computing, or they would not grow.
                n = end - sequence.n_computed
                has_cells = not self._kv.unified or self._kv.ensure_free(n_decoding + n)
                if budget <= 0 or (prefill and n > budget) or not has_cells:
                    continue
            else:
                n_left = (min(end, sequence.prefill_stops[0]) if sequence.prefill_stops else end) - sequence.n_computed
                n = min(budget, n_left, _MAX_SCORED_TOKENS if sequence.is_scored else n_left)
                if prefill and budget < min(n_left, least_rest):
                    continue
                n = shape.piece(sequence, n, n_left, room, has_rows=n_decode > 0, most_whole=most_whole)
            if n > 0:
                prefill.append((sequence, n))
                budget -= n
                room -= n + shape.piece_padding
        return prefill

    def _prompt_budget(
        self, prefilling: list[Seq], step_budget: StepBudget, groups: Groups, n_decode: int, decoding: list[Seq]
    ) -> tuple[list[Seq], list[Seq], int, int]:
        """The result of `_in_turn`, the prompt tokens that the step may compute, and those that it may compute as one
        whole. The arguments are those of `_prefill`."""
        n_decoding = len(decoding)
        n_urgent = sum(not s.is_background for s in prefilling)
        # Many background prompts count as one, so that they do not delay other requests' tokens.
        n_prompts = n_urgent or (len(prefilling) if all(s.is_background for s in decoding) else 1)
        budget = step_budget.prefill_tokens(groups, n_prompts, n_decoding - n_decode, background=not n_urgent)
        n_pending = sum(s.n_pending for s in prefilling)
        budget = self._shape.whole_budget(budget, n_decode) if budget < n_pending else n_pending
        prefilling, long = self._in_turn(prefilling, budget, n_decoding, step_budget.cost)
        most_whole = step_budget.whole_tokens(groups) if n_decoding and n_urgent else 0
        budget = with_whole_prompts(budget, most_whole, [s.n_pending for s in prefilling])
        if self._kv.unified and not self._kv.ensure_free(n_decoding + budget):
            budget = min(budget, self._kv.n_free - n_decoding)
        return prefilling, long, budget, most_whole

    def _in_turn(
        self, prefilling: list[Seq], budget: int, n_decoding: int, cost: StepCost
    ) -> tuple[list[Seq], list[Seq]]:
        """The prompts in the order in which this step computes them, and those that get no piece after another prompt:
        a piece of a long one may take seconds, for which no first token should wait."""
        first, *others = prefilling
        takes_turns = bool(others and (n_decoding or first.n_pending > budget))
        self._serves_first_prompt = not (takes_turns and self._serves_first_prompt)
        if takes_turns:
            others.sort(key=lambda s: _due(s, cost))
            prefilling = [first, *others] if self._serves_first_prompt else [*others, first]
        return prefilling, [s for s in ([first] if n_decoding else prefilling) if s.n_pending > budget]

    def _preempt_until_free(self) -> None:
        """Preempts the last sequences in rank until every decoding sequence can grow by a cell.

        If none is decoding, until a cell is free for the first prompt.
        """
        while self.running:
            decoding = sum(s.status is SeqStatus.DECODE for s in self.running)
            if self._kv.ensure_free(max(1, decoding)):
                break
            self._preempt(self.running[-1])

    def _preempt(self, sequence: Seq) -> None:
        self.running.remove(sequence)
        self._kv.preempt(sequence)
        self._just_preempted.add(sequence)
        insort(self.waiting, sequence, key=_rank)

    def _admit(self) -> list[Seq]:
        """Admits waiting sequences that fit, in order of rank."""
        admitted: list[Seq] = []
        at, n_seen = 0, 0
        while at < len(self.waiting) and n_seen < 2 * self.n_parallel:  # bounded: many may wait for a prefix
            sequence = self.waiting[at]
            if sequence in self._just_preempted:
                break
            n_seen += 1
            lower = self._lower_priority(sequence)
            if len(self.running) >= self.n_parallel and not lower:
                break
            if sequence.n_tokens > self._kv.n_ctx_seq:
                self.blocked = sequence
                break
            match, wait = (None, False) if sequence.saved else self._kv.cache.find(sequence)
            if wait:
                at += 1
                continue
            if not self._fits(sequence, match) and not self._preempt_for(sequence, lower, match):
                match = None  # reusing the prefix keeps its source in cells; without a prefix the sequence may fit
                if not self._preempt_for(sequence, lower, match):
                    break
            del self.waiting[at]
            insort(self.running, sequence, key=_rank)
            self._kv.admit(sequence, match)
            admitted.append(sequence)
        return admitted

    def _fits(self, sequence: Seq, match: Match | None) -> bool:
        """Whether fewer than n_parallel are running, and the cells for its tokens and for everyone's growth are
        free."""
        if len(self.running) >= self.n_parallel:
            return False
        if not self.running:
            return True
        growth = sum(s.n_pending + self._growth(s) for s in self.running) + self._growth(sequence)
        return self._kv.can_admit(sequence, match, growth)

    def _lower_priority(self, sequence: Seq) -> list[Seq]:
        """Running sequences of lower priority and later rank, which may be preempted for this one."""
        priority = sequence.request.priority
        return [s for s in self.running if s.request.priority > priority and s.rank > sequence.rank]

    def _preempt_for(self, sequence: Seq, lower: list[Seq], match: Match | None) -> bool:
        """Preempts sequences of `lower`, last in rank first, until `sequence` fits. The source of `match` stays.

        Returns False without preempting any, if preempting all of them would not suffice.
        """
        victims = [s for s in lower if not (match and match.source is s)]
        others = [s for s in self.running if s not in victims]
        if not victims:
            return False
        growth = sum(s.n_pending + self._growth(s) for s in others) + self._growth(sequence)
        if others and not self._kv.can_admit(sequence, match, growth, without=victims):
            return False
        while not self._fits(sequence, match):
            self._preempt(victims.pop())
        return True

    def _growth(self, sequence: Seq) -> int:
        """Cells to reserve for the growth of a sequence, so that it is not preempted as soon as it runs."""
        return min(self._headroom, sequence.n_left)


class PoolingScheduler(Scheduler):
    """For models that return vectors: each sequence is computed whole, in one step, and leaves immediately.

    A step is filled with whole prompts in order of rank. A prompt that does not fit into the rest of the step, or has
    other control vectors, is skipped; the first waiting sequence always fits into the next step, so no request starves.
    Nothing is preempted, swapped or shared: sequences hold no cells between steps.
    """

    def plan(self) -> StepPlan:
        """The next step; see `Scheduler.plan`."""
        plan = StepPlan()
        for sequence in self.waiting[: 4 * self.n_parallel]:
            if len(plan.admitted) == self.n_parallel:
                break
            is_alike = not plan.admitted or sequence.adapters == plan.adapters
            if is_alike and plan.n_tokens + sequence.n_tokens <= self._step_tokens:
                self._kv.admit(sequence)
                plan.adapters = sequence.adapters
                plan.admitted.append(sequence)
                plan.scheduled.append((sequence, sequence.n_tokens))
                plan.n_tokens += sequence.n_tokens
        chosen = set(plan.admitted)
        self.waiting = [sequence for sequence in self.waiting if sequence not in chosen]
        self.running = list(plan.admitted)
        return plan


def _remove(ordered: list[Seq], sequence: Seq) -> None:
    """Removes a sequence from a list in order of rank."""
    at = bisect_left(ordered, sequence.rank, key=_rank)
    assert ordered[at] is sequence
    del ordered[at]


def _rank(sequence: Seq) -> tuple[float, int]:
    return sequence.rank


def _due(sequence: Seq, cost: StepCost) -> float:
    """The sort key of prompts: rank in seconds, plus four times the prefill time. Short prompts overtake long ones, but
    not indefinitely."""
    return sequence.rank[0] * AGING_S + _FAIRNESS_FACTOR * sequence.n_pending * cost.token_s(sequence.n_pending)
