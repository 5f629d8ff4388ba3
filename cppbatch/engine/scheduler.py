"""Policy: which sequences compute how many tokens in the next step. Touches nothing native."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from cppbatch.engine.kv_pool import KVPool
from cppbatch.engine.lora_scheduling import LoraRoundRobin
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.prefix_cache import Match
from cppbatch.engine.sequence import Seq, SeqStatus
from cppbatch.engine.step_budget import StepBudget

_MOST_HEADROOM = 32  # tokens a running sequence may grow before the next admission is judged too early
_FEW = 1000  # deadlines
_MOST_SCORED = 64  # tokens of a prompt whose every token gets logits: a row of 49,152 takes 192 KiB
_AGING_S = 10.0  # seconds of waiting that make up for one priority
_FAIRNESS_FACTOR = 4.0  # times what reading a prompt takes, that shorter ones may arrive later and be read earlier
_MAX_LOOKED_AT = 4  # `PoolingScheduler`: waiting sequences it looks at, in multiples of n_parallel

Chunk = tuple[Seq, int]


@dataclass(slots=True)
class StepPlan:
    """One step: which sequences compute how many of their pending tokens."""

    chunks: list[Chunk] = field(default_factory=list)
    """Sequences with the number of pending tokens to compute, in the order of the batch."""
    adapters: AdapterSet = ()
    """With which all of them compute."""
    is_switch: bool = False
    """Whether those are others than in the step before."""
    admitted: list[Seq] = field(default_factory=list)
    n_decode: int = 0
    """How many of the chunks are decoding; the others prefill."""
    n_tokens: int = 0

    def outputs(self) -> list[Seq]:
        """The sequences that get a token: those with nothing pending after this step, in the batch's order."""
        return [sequence for sequence, n in self.chunks if n == sequence.n_pending]

    def rows(self) -> list[int]:
        """Which of the step's rows of logits each of those has: its last one."""
        last = itertools.accumulate(sequence.n_logits(n) for sequence, n in self.chunks)
        return [end - 1 for (sequence, n), end in zip(self.chunks, last, strict=True) if n == sequence.n_pending]

    @property
    def scores(self) -> bool:
        """Whether log-probabilities of a prompt come of it."""
        return any(sequence.is_scored for sequence, _ in self.chunks)


class Scheduler:
    """Decode rows before prefill; admission, prefill and the right to stay by rank: priority, then order of arrival.

    Beside running streams every other step reads short prompts first, so that a long one holds up nobody. (Steps of
    both would cost more: with streams of their own each prompt is a computation of its own over all weights.)

    A sequence is admitted when the cells for its uncached tokens are free, with headroom for those that run to grow.
    When they have grown into each other all the same, the last in rank gives up its cells and resumes before anybody
    who ranks behind it. So the first always goes on, and as waiting improves a rank, nobody starves. The head of the
    queue waits for its cells, and those behind it wait with it, so a large request is not starved by small ones; only
    one that waits for its prefix, which another is computing just then, lets others pass.

    Running sequences compute when their set of LoRA adapters has its turn (`LoraRoundRobin`); others hold their cells.
    So do those in the background (`BACKGROUND`) while anybody else who ranks before them has no token yet.
    """

    def __init__(
        self,
        kv: KVPool,
        *,
        step_tokens: int,
        n_parallel: int,
        ubatch_tokens: int | None = None,
        target_step_s: float | None = None,
    ) -> None:
        """`step_tokens`: most of a step. `ubatch_tokens`: what llama.cpp computes at once; more prompt tokens in a step
        gain nothing, and would let the first of them wait for the last."""
        self._kv = kv
        self._n_parallel = n_parallel
        self._step_tokens = step_tokens
        self._turns = LoraRoundRobin(StepBudget(step_tokens, target_step_s, ubatch_tokens))
        self._headroom = max(1, min(_MOST_HEADROOM, kv.n_ctx // (4 * self._n_parallel)))
        # Both in order of rank.
        self.waiting: list[Seq] = []
        self.running: list[Seq] = []
        self._displaced: set[Seq] = set()  # in this step, in which they do not come back
        self._n_added = 0
        self._is_for_first = False
        self._timed: dict[int, Seq] = {}  # those with a timeout, by their number of arrival
        self._deadlines: list[tuple[float, int]] = []  # a heap of times and numbers

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Seq) -> None:
        """Queues a new sequence."""
        request = sequence.request
        # The longer ago it arrived, the better: a constant rank orders all as an ageing priority would.
        self._n_added += 1
        sequence.rank = (request.priority + sequence.arrived_at / _AGING_S, self._n_added)
        insort(self.waiting, sequence, key=_rank)
        for limit in (request.timeout, request.queue_timeout):
            if limit is not None:
                self._timed[self._n_added] = sequence
                heappush(self._deadlines, (sequence.arrived_at + limit, self._n_added))

    def remove(self, sequence: Seq) -> None:
        """Forgets a sequence that has ended, wherever it is."""
        waits = sequence.status in (SeqStatus.WAITING, SeqStatus.SWAPPED)
        _take(self.waiting if waits else self.running, sequence)
        self._timed.pop(sequence.rank[1], None)

    def restart(self, sequences: Iterable[Seq]) -> None:
        """All of these wait again, in the order they had."""
        self.running.clear()
        self.waiting = sorted(sequences, key=_rank)

    def expired(self, now: float) -> list[Seq]:
        """Sequences whose `timeout` has passed, or whose `queue_timeout` while they never ran."""
        expired = []
        if len(self._deadlines) > 2 * len(self._timed) + _FEW:  # most are of those that have ended
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
        """The next step. The caller applies it to the memory, then computes every chunk or removes its sequence."""
        plan = StepPlan()
        for sequence in self.running:
            sequence.pause_at = 0
        self._displaced.clear()
        self._preempt_until_free()
        plan.admitted = self._admit()
        self._choose(plan)
        plan.n_tokens = sum(n for _, n in plan.chunks)
        return plan

    def _choose(self, plan: StepPlan) -> None:
        """Who of those that run computes how much."""
        in_play = self._in_play()
        decoding = [s for s in in_play if s.status is SeqStatus.DECODE and not s.moving]
        prompts = [s for s in in_play if s.status is SeqStatus.PREFILL and not s.moving]
        self._kv.ensure_free(len(decoding))  # those admitted just now count too: they fit, once what is cached has gone
        for adapters in self._turns.order(in_play):
            rows = [(s, 1) for s in decoding if s.adapters == adapters]
            prefill = self._prefill([s for s in prompts if s.adapters == adapters], adapters, len(rows), decoding)
            plan.chunks = in_batch_order(rows, prefill)
            if plan.chunks:
                plan.adapters, plan.is_switch, plan.n_decode = adapters, self._turns.take(adapters), len(rows)
                break

    def _in_play(self) -> list[Seq]:
        """Those that run, but not background work behind somebody whose first token is still to come."""
        first = next((s for s in self.running if not s.is_background and not s.n_generated), None)
        return [s for s in self.running if first is None or not s.is_background or s.rank < first.rank]

    def computed(self, plan: StepPlan, seconds: float) -> None:
        """Takes note of how long a step took, unless planning the graph anew was part of it."""
        if not plan.is_switch:
            self._turns.computed(plan.adapters, plan.n_decode, plan.n_tokens - plan.n_decode, seconds)

    def _prefill(self, prefilling: list[Seq], adapters: AdapterSet, n_decode: int, streams: list[Seq]) -> list[Chunk]:
        """Pieces of these prompts for what decode rows leave of the step, and all streams' next tokens of the cells.

        Background work that stands still is no stream here: when its next tokens find no cells, it gives up its own.
        """
        if not prefilling:
            return []
        n_streams = len(streams)
        n_urgent = sum(not s.is_background for s in prefilling)
        # Others' streams are not held up for the sake of many prompts in the background.
        n_prompts = n_urgent or (len(prefilling) if all(s.is_background for s in streams) else 1)
        step_times = self._turns.budget(adapters)
        most = step_times.prefill_tokens(n_decode, n_prompts, n_streams - n_decode, background=not n_urgent)
        budget = min(most, sum(s.n_pending for s in prefilling))
        if self._kv.unified and not self._kv.ensure_free(n_streams + budget):
            budget = min(budget, self._kv.n_free - n_streams)
        if n_streams:  # a step has little room: every other one is for the first, those between for short ones
            first, others = prefilling[0], sorted(prefilling[1:], key=lambda s: _due(s, step_times.token_s))
            self._is_for_first = not self._is_for_first
            prefilling = [first, *others] if self._is_for_first else [*others, first]
        chunks = []
        for sequence in prefilling:
            until = sequence.pause_at if sequence.pause_at > sequence.n_computed else sequence.n_tokens
            n = min(budget, until - sequence.n_computed)
            n = min(n, _MOST_SCORED) if sequence.is_scored else n
            if n > 0:
                chunks.append((sequence, n))
                budget -= n
        return chunks

    def _preempt_until_free(self) -> None:
        """Preempts until every decoding sequence can grow, or, if none decodes, until the first one can go on."""
        while self.running:
            decoding = sum(s.status is SeqStatus.DECODE for s in self.running)
            if self._kv.ensure_free(max(1, decoding)):
                break
            self._preempt(self.running[-1])

    def _preempt(self, sequence: Seq) -> None:
        self.running.remove(sequence)
        self._kv.preempt(sequence)
        self._displaced.add(sequence)
        insort(self.waiting, sequence, key=_rank)

    def _admit(self) -> list[Seq]:
        """Takes in what fits, in order of rank."""
        admitted: list[Seq] = []
        at, n_seen = 0, 0
        while at < len(self.waiting) and n_seen < 2 * self._n_parallel:  # bounded, as many may wait for a prefix
            sequence = self.waiting[at]
            if sequence in self._displaced:
                break
            n_seen += 1
            lower = self._lower(sequence)
            if len(self.running) >= self._n_parallel and not lower:
                break
            match, wait = (None, False) if sequence.saved else self._kv.cache.find(sequence)
            if wait:
                at += 1
                continue
            if not self._fits(sequence, match) and not self._displace(lower, sequence, match):
                match = None  # its source would have to stay; without it there may be room
                if not self._displace(lower, sequence, match):
                    break
            del self.waiting[at]
            insort(self.running, sequence, key=_rank)
            self._kv.admit(sequence, match)
            admitted.append(sequence)
        return admitted

    def _fits(self, sequence: Seq, match: Match | None) -> bool:
        """Whether there is a place for it, and cells for its tokens and for everybody's growth."""
        if len(self.running) >= self._n_parallel:
            return False
        if not self.running:
            return True
        growth = sum(s.n_pending + self._growth(s) for s in self.running) + self._growth(sequence)
        return self._kv.can_admit(sequence, match, growth)

    def _lower(self, sequence: Seq) -> list[Seq]:
        """Running sequences that give way to this one: of lower priority, and behind it in rank."""
        priority = sequence.request.priority
        return [s for s in self.running if s.request.priority > priority and s.rank > sequence.rank]

    def _displace(self, lower: list[Seq], sequence: Seq, match: Match | None) -> bool:
        """Lets those of lower priority make room for it. False, and nothing has changed, when that is not enough."""
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
        """Cells to keep free for it, so that it is not preempted as soon as it runs."""
        return min(self._headroom, sequence.n_left)


class PoolingScheduler(Scheduler):
    """For models that return vectors: each sequence is computed whole, in one step, and leaves at once.

    A step is filled with whole prompts in order of rank. A prompt that does not fit into the rest of the step is passed
    over; the first waiting sequence always fits into the next step, so no request starves. Nothing is preempted,
    swapped or shared: no sequence holds cells between two steps.
    """

    def plan(self) -> StepPlan:
        """The next step; see `Scheduler.plan`."""
        plan = StepPlan()
        for sequence in self.waiting[: _MAX_LOOKED_AT * self._n_parallel]:
            if len(plan.admitted) == self._n_parallel:
                break
            if plan.n_tokens + sequence.n_tokens <= self._step_tokens:
                self._kv.admit(sequence)
                plan.admitted.append(sequence)
                plan.chunks.append((sequence, sequence.n_tokens))
                plan.n_tokens += sequence.n_tokens
        chosen = set(plan.admitted)
        self.waiting = [sequence for sequence in self.waiting if sequence not in chosen]
        self.running = list(plan.admitted)
        return plan


def in_batch_order(rows: list[Chunk], prefill: list[Chunk]) -> list[Chunk]:
    """Decode rows by rising seq_id, with prefill before or behind them, such that they do not touch.

    With streams of their own (per-sequence layout, recurrent models) llama.cpp computes consecutive rising seq_ids
    together, each as many tokens as the shortest has and over as many cells as the longest has. So the rows must be in
    order, and a prompt that joined them would cost every row its own length.
    """
    rows.sort(key=_seq_id)
    prefill.sort(key=_seq_id, reverse=True)
    if not rows or not prefill:
        return rows + prefill
    first = rows[0][0].seq_id
    for i, (sequence, _) in enumerate(prefill):
        if sequence.seq_id + 1 != first:
            return [*prefill[:i], *prefill[i + 1 :], prefill[i], *rows]
    return rows + prefill


def _take(ordered: list[Seq], sequence: Seq) -> None:
    at = bisect_left(ordered, sequence.rank, key=_rank)
    assert ordered[at] is sequence
    del ordered[at]


def _rank(sequence: Seq) -> tuple[float, int]:
    return sequence.rank


def _due(sequence: Seq, token_s: float) -> float:
    """Shorter prompts first, but none is overtaken for ever: arrival, with some times what reading it takes."""
    return sequence.rank[0] * _AGING_S + _FAIRNESS_FACTOR * sequence.n_pending * token_s


def _seq_id(chunk: Chunk) -> int:
    return chunk[0].seq_id
