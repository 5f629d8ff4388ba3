"""Scheduling: which sequences compute how many tokens in the next step. Independent of llama.cpp.

| rule | method |
|---|---|
| order of the queue | `Scheduler.add` (rank) |
| which sequence is admitted | `Scheduler._admit`, `_fits` |
| which sequence is preempted when cells run out | `Scheduler._preempt_until_free` |
| which sequence is preempted for one of higher priority | `Scheduler._preempt_for` |
| which prompt is computed first | `Scheduler._in_turn` |
| when background work pauses | `Scheduler._may_compute` |
| which padding rows make a step faster | `Scheduler._pad`, `_join_rows` |
| which sequence moves so that decode rows are adjacent | `Scheduler._close_gaps` |
| which padding rows prevent ubatches that are too small | `batch_order.with_min_rows` |
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter

import msgspec

from cppbatch.engine.ideal import StepWork
from cppbatch.engine.kv.batch_order import (
    BatchEntry,
    PaddingRow,
    PromptPart,
    in_batch_order,
    padded_size,
    tokens_before_padding,
    with_min_rows,
)
from cppbatch.engine.kv.cached_prefix import Match
from cppbatch.engine.kv.pool import KVPool
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.sequence import Seq, SeqStatus
from cppbatch.engine.speculation.speculator import DraftLimits, Speculator
from cppbatch.engine.steps import Groups, LoraRoundRobin, StepBudgets, StepCost, whole_tiles

_MAX_HEADROOM = 32  # cells reserved for the growth of each running sequence when another one is admitted
_MAX_STALE_DEADLINES = 1000
_GAP_STEPS = 4  # steps that a gap between decode rows must last before it is closed
_GAP_AHEAD = 64  # maximum number of steps for which closing a gap is expected to pay off
_MIN_PIECE = 4  # minimum prompt tokens after rounding down to whole tiles
_LONG = 512  # tokens: after that many, a tile of the attention takes about as long as three quarters of it
_MAX_SCORED = 64  # prompt tokens per step if each gets a row of logits (192 KiB with a vocabulary of 49,152)
_AGING_S = 10.0  # seconds of waiting that count as much as one level of priority
_FAIRNESS_FACTOR = 4.0  # how long shorter prompts may overtake a prompt, in multiples of its own prefill time
_GUESSED_TURN_S, _NEW_TURN = 0.5, 0.1  # seconds; weight of a new measurement
_MAX_CLIENTS = 1000  # whose next turns are remembered
_MAX_LOOKED_AT = 4  # `PoolingScheduler`: waiting sequences to consider, in multiples of n_parallel

Chunk = tuple[Seq, int]


class StepPlan(msgspec.Struct):
    """One step: which sequences compute how many of their pending tokens."""

    chunks: list[Chunk] = msgspec.field(default_factory=list)
    """Sequences with the number of tokens to compute, pending ones before draft tokens, in batch order."""
    media: list[Chunk] = msgspec.field(default_factory=list)
    """Sequences with the number of image or audio vectors to compute, in a separate batch before that of `chunks`."""
    padding: list[PaddingRow] = msgspec.field(default_factory=list)
    entries: list[BatchEntry] = msgspec.field(default_factory=list)
    """If the batch has more than the chunks: chunks, parts of them and padding rows in batch order."""
    row_groups: Groups = ()
    """Decode rows that llama.cpp computes together, including padding rows and prompt tokens among them."""
    adapters: AdapterSet = ()
    """The LoRA adapters shared by all these sequences."""
    is_switch: bool = False
    """Whether the previous step had other adapters."""
    admitted: list[Seq] = msgspec.field(default_factory=list)
    n_decode: int = 0
    """The number of chunks that are decode rows; the others are prefill."""
    n_beside: int = 0
    """The number of prompts with a token computed among the decode rows, as part of `row_groups`."""
    n_tokens: int = 0
    """Tokens of the chunks and vectors of the media, without drafts."""
    n_drafted: int = 0
    """Draft tokens, including filling tokens. 0: every decode row has one token."""

    @property
    def pieces(self) -> list[Chunk]:
        """Chunks and media: all sequences that the step computes."""
        return self.chunks + self.media if self.media else self.chunks

    @property
    def batch(self) -> Sequence[BatchEntry]:
        """The entries of the step, in order: chunks, parts of them and padding rows."""
        return self.entries or self.chunks

    @property
    def n_rows(self) -> int:
        """The number of batch entries of a single token with logits: decode rows, including padding rows."""
        return 0 if self.n_drafted else self.n_decode + len(self.padding)

    def outputs(self) -> list[Seq]:
        """The sequences that get a token, because none is pending after this step. In batch order."""
        return [sequence for sequence, n in self.chunks if n >= sequence.n_pending]

    def rows(self) -> list[int]:
        """For each sequence of `outputs`, the index of its last pending token's row among the step's rows of logits.
        The rows of its draft follow."""
        batch = self.batch
        last = itertools.accumulate(entry.n_logits(n) for entry, n in batch)
        return [
            end - 1 - (n - entry.n_pending)
            for (entry, n), end in zip(batch, last, strict=True)
            if not isinstance(entry, PaddingRow) and n >= entry.n_pending
        ]

    @property
    def scores(self) -> bool:
        """Whether the step computes log-probabilities of a prompt."""
        return any(sequence.is_scored for sequence, _ in self.chunks)


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
        step_tokens: int,
        n_parallel: int,
        ubatch_tokens: int | None = None,
        may_pad: bool = False,
        on_gpu: bool = False,
        min_rows: int = 1,
        speculator: Speculator | None = None,
        max_draft_rows: int = 256,
    ) -> None:
        """`budgets`: the costs of steps, updated by the scheduler. `step_tokens`: maximum tokens per step.
        `ubatch_tokens`: tokens that llama.cpp computes at once. More prompt tokens in a step gain nothing, and delay
        the first token of the prompts that end in it. `may_pad`: whether to add padding rows to steps. `on_gpu`: see
        `in_batch_order`. `min_rows`: minimum tokens, and rows of logits if any, of a ubatch. `speculator`: chooses
        drafts; None: no drafts. `max_draft_rows`: maximum rows of a step with drafts, all of which have logits.
        """
        self._kv = kv
        self._speculator = speculator
        self._max_draft_rows = min(step_tokens, ubatch_tokens or step_tokens, max_draft_rows)
        self.n_parallel = n_parallel
        self._step_tokens = step_tokens
        self._budgets = budgets
        self._lora = LoraRoundRobin()
        self._lora_by_layout = {kv.unified: self._lora}
        self._may_pad = may_pad or min_rows > 1
        self._on_gpu = on_gpu
        self._min_rows = min_rows
        self._ubatch_tokens = ubatch_tokens or step_tokens
        self._headroom = max(1, min(_MAX_HEADROOM, kv.n_ctx // (4 * self.n_parallel)))
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
        self._n_gap_steps = 0  # consecutive steps with a gap between the rows
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
        sequence.rank = (request.priority + self._due_at(sequence) / _AGING_S, self._n_added)
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
        if len(self._next_due) >= _MAX_CLIENTS:
            self._next_due = {each: at for each, at in self._next_due.items() if at > sequence.arrived_at}
        self._next_due[client] = due + self._turn_s
        return due

    def finished(self, sequence: Seq, now: float) -> None:
        """Removes a finished sequence, and learns how long one takes."""
        self.remove(sequence)
        if sequence.admitted_at:
            turn_s = (now - sequence.admitted_at) / self.n_parallel
            self._turn_s += _NEW_TURN * (turn_s - self._turn_s)

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
        if len(self._deadlines) > 2 * len(self._timed) + _MAX_STALE_DEADLINES:  # most belong to finished sequences
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
        """The next step. The caller applies it (`KVPool.apply`), then computes every chunk or removes its sequence."""
        plan = StepPlan()
        self._just_preempted.clear()
        self.blocked = None
        self._preempt_until_free()
        plan.admitted = self._admit()
        self._choose(plan)
        plan.n_tokens = sum(n for _, n in plan.pieces) - plan.n_drafted
        return plan

    def _choose(self, plan: StepPlan) -> None:
        """Fills `plan.chunks`: which running sequences compute how many tokens."""
        computing = self._may_compute()
        decoding = [s for s in computing if s.status is SeqStatus.DECODE and not s.moving]
        prompts = [s for s in computing if s.status is SeqStatus.PREFILL and not s.moving]
        # Includes sequences admitted in this step. Their cells are free once cached prefixes are evicted.
        self._kv.ensure_free(len(decoding))
        for adapters in self._lora.order(computing):
            rows = [(s, 1) for s in decoding if s.adapters == adapters]
            prompts_now = [s for s in prompts if s.adapters == adapters]
            if not (rows or prompts_now):
                continue
            plan.row_groups, n_padding = (len(rows),) if rows else (), 0
            may_pad = bool(self._may_pad and rows)
            cost = self._budgets.of(adapters).cost
            if may_pad and not self._kv.unified:
                self._close_gaps(rows, cost)
                rows = [row for row in rows if not row[0].moving]
            # Not for recurrent models in a unified layout: there these tokens take cells that others may need.
            with_rows = [s for s in prompts_now if not s.next_run] if self._min_rows == 1 else []
            beside = self._join_rows(plan, rows, with_rows, cost) if may_pad and not self._kv.unified else []
            groups = tuple(padded_size(n, self._min_rows) for n in plan.row_groups)
            prefill = self._prefill(prompts_now, adapters, groups, len(rows), decoding)
            if may_pad and not (self._on_gpu or prefill or self._kv.has_streams):  # else prompts fill the tiles
                self._pad(plan, len(rows), cost)
            has_prefill = bool(prefill)
            if any(sequence.next_run for sequence, _ in prefill):
                plan.media = [(sequence, n) for sequence, n in prefill if sequence.next_run]
                prefill = [(sequence, n) for sequence, n in prefill if not sequence.next_run]
            if rows and self._speculator and not has_prefill:
                rows, n_padding = self._add_drafts(plan, rows, beside, cost, self._speculator)
            if not plan.n_drafted and self._min_rows > 1:
                plan.row_groups = groups
            if rows or has_prefill:
                self._fill(plan, rows, prefill, beside, n_padding)
                plan.adapters, plan.is_switch, plan.n_decode = adapters, self._lora.take(adapters), len(rows)
                plan.n_beside = len(beside)
                break

    def _add_drafts(
        self, plan: StepPlan, rows: list[Chunk], beside: list[Seq], cost: StepCost, speculator: Speculator
    ) -> tuple[list[Chunk], int]:
        """The rows with the draft tokens that speed up generation, and the draft tokens of each padding row.

        Drafts only use free cells: nothing is evicted or preempted for them.
        """
        kv, sequences = self._kv, sorted((sequence for sequence, _ in rows), key=attrgetter("seq_id"))
        n_rows = (len(rows) + len(plan.padding)) * self._min_rows  # maximum, including the padding that they need
        most = self._max_draft_rows - n_rows
        most = min(most, kv.n_free - n_rows) if kv.unified else most
        if most <= 0:
            return rows, 0
        span = sequences[-1].seq_id + 1 - sequences[0].seq_id
        is_one_group = len(plan.row_groups) == 1 and not beside and (kv.unified or span <= n_rows)
        each = [min(kv.n_ctx_seq, s.n_ctx) - s.n_tokens for s in sequences]
        limits = DraftLimits(
            most, each, kv.has_streams, is_one_group, on_gpu=self._on_gpu, is_queue_empty=not self.waiting
        )
        drafted = speculator.plan(sequences, plan.row_groups, cost, limits)
        if drafted is None:
            return rows, 0
        plan.row_groups = drafted.groups
        plan.n_drafted = sum(drafted.lengths)
        return [(s, 1 + n) for s, n in zip(sequences, drafted.lengths, strict=True)], drafted.n_padding

    def _fill(self, plan: StepPlan, rows: list[Chunk], prefill: list[Chunk], beside: list[Seq], n_padding: int) -> None:
        """Sets the chunks, and the batch's entries. `beside`: prompts with a token among the rows. `n_padding`: draft
        tokens per padding row."""
        n_of = dict(prefill)
        together: list[BatchEntry] = [*rows, *((padding, 1 + n_padding) for padding in plan.padding)]
        others: list[BatchEntry] = []
        for sequence in beside:
            n = n_of.pop(sequence, 1)
            if n == 1 or sequence.n_logits(1):
                together.append((sequence, n))
            else:
                together.append((PromptPart(sequence, 0), 1))
                others.append((PromptPart(sequence, 1), n - 1))
        if self._min_rows == 1:
            batch = in_batch_order(
                together, [*others, *n_of.items()], gpu_ubatch=self._ubatch_tokens if self._on_gpu else 0
            )
        else:
            batch = with_min_rows(together, prefill, ubatch_tokens=self._ubatch_tokens, min_rows=self._min_rows)
            plan.padding = [entry for entry, _ in batch if isinstance(entry, PaddingRow)]
        plan.chunks = [chunk for entry, n in batch if (chunk := _chunk(entry, n))]
        plan.entries = batch if len(plan.chunks) < len(batch) else []

    def _pad(self, plan: StepPlan, n_rows: int, cost: StepCost) -> None:
        """Adds padding rows that speed up a step without prompts, and sets `row_groups`."""
        spare = self._kv.spare_ids()
        n_more = min(len(spare), self._step_tokens - n_rows, self._kv.n_free - n_rows)
        n = cost.rows_to_compute(n_rows, n_rows + max(0, n_more))
        plan.padding, plan.row_groups = [PaddingRow(seq_id) for seq_id in spare[: n - n_rows]], (n,)

    def _close_gaps(self, rows: list[Chunk], cost: StepCost) -> None:
        """Moves sequences so that all rows are adjacent, if that saves more time in the next steps than the moves take.
        Only after gaps have lasted for some steps: usually a new sequence soon fills them. On a CPU, a moving sequence
        computes nothing in this step."""
        by_id = {sequence.seq_id: sequence for sequence, _ in rows}
        if self.waiting or len(self.running) > len(rows) or max(by_id) - min(by_id) + 1 == len(by_id):
            self._n_gap_steps = 0
            return
        self._n_gap_steps += 1
        if self._n_gap_steps % _GAP_STEPS or not cost.knows_rows:
            return
        free = {*self._kv.spare_ids(), *self._kv.cached_ids()}
        start = _best_start(sorted(by_id), free)
        if start is None:
            return
        block = range(start, start + len(by_id))
        moving = [sequence for seq_id, sequence in by_id.items() if seq_id not in block]
        staying = [sequence for seq_id, sequence in by_id.items() if seq_id in block]
        moves = list(zip([seq_id for seq_id in block if seq_id not in by_id], moving, strict=True))
        if not all(self._kv.can_move(sequence) for sequence in moving):
            return
        # The gap ends with the last sequence of either side.
        n_steps = min(_GAP_AHEAD, *(max(s.n_left for s in side) for side in (moving, staying) if side))
        gain = cost.rows_s(_sizes(_join_groups(sorted(by_id), free, cost))) - cost.rows_s([len(by_id)])
        lost = sum(self._kv.move_s(seq_id, sequence) for seq_id, sequence in moves)
        if staying and not self._on_gpu:
            lost += cost.rows_s(_sizes(_groups(sorted(s.seq_id for s in staying))))
        if n_steps * gain <= lost:
            return
        for seq_id, sequence in moves:
            self._kv.move_to(seq_id, sequence)

    def _join_rows(self, plan: StepPlan, rows: list[Chunk], prompts: list[Seq], cost: StepCost) -> list[Seq]:
        """If sequences have streams: fills the gaps between rows, and the last tile, if that makes the step faster.

        With streams, llama.cpp only computes rows of consecutive seq_ids together. A gap is filled with a token of the
        prompt with that seq_id, or with a padding row. Sets `row_groups` and `padding`, and returns the prompts.
        """
        spare = [*self._kv.spare_ids(), *self._kv.cached_ids()]
        by_id = {sequence.seq_id: sequence for sequence in prompts}
        free = {*by_id, *spare[: self._step_tokens - len(rows) - len(prompts)]}
        joined = _join_groups(sorted(sequence.seq_id for sequence, _ in rows), free, cost)
        plan.row_groups = _sizes(joined)
        ids = {sequence.seq_id for sequence, _ in rows}
        more = [seq_id for start, stop in joined for seq_id in range(start, stop) if seq_id not in ids]
        plan.padding = self._kv.padding_rows([seq_id for seq_id in more if seq_id not in by_id])
        return [by_id[seq_id] for seq_id in more if seq_id in by_id]

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
        if not (plan.is_switch or (self._on_gpu and changes_for_drafts)):
            self._budgets.observe(plan.adapters, plan.row_groups, n_prefill, seconds, decode_s)

    def work(self, plan: StepPlan) -> StepWork:
        """The work of a step, for `TimeSplit`. Call it before its sequences are updated."""
        n_rows = plan.n_decode + plan.n_beside
        n_prompt, again = plan.n_tokens - n_rows, 0
        if n_prompt:
            again = sum(s.n_recomputed(n) for s, n in plan.chunks if s.n_computed_before)
        n_unfinished = min(self.n_parallel, len(self.running) + len(self.waiting))
        return StepWork(n_rows, plan.row_groups, plan.n_drafted, 0, n_prompt, min(again, n_prompt), n_unfinished)

    def _prefill(
        self, prefilling: list[Seq], adapters: AdapterSet, groups: Groups, n_decode: int, decoding: list[Seq]
    ) -> list[Chunk]:
        """Pieces of these prompts, as many as the step budget and the free cells allow alongside decode rows.

        `prefilling`: in order of rank, with these `adapters`. `groups`: decode rows of this step, including padding.
        `n_decode`: the same without padding. `decoding`: all decoding sequences that may compute, including those of
        other adapter sets. Cells for their next tokens stay free, but not those for paused background sequences, which
        are preempted if cells run out.
        """
        if not prefilling:
            return []
        n_decoding = len(decoding)
        prefilling, long, budget = self._prompt_budget(prefilling, adapters, groups, n_decode, decoding)
        chunks: list[Chunk] = []
        room = self._step_tokens - sum(groups)
        for sequence in prefilling:
            if chunks and sequence in long:
                continue
            end = sequence.piece_end
            until = min(end, sequence.stops[0]) if sequence.stops else end
            n = min(budget, until - sequence.n_computed)
            n = min(n, _MAX_SCORED) if sequence.is_scored else n
            if (run := sequence.next_run) and run.is_whole:
                # Waits for others to end if they have grown into its cells. They are computing, or they would not grow.
                n = end - sequence.n_computed
                has_cells = not self._kv.unified or self._kv.ensure_free(n_decoding + n)
                if budget <= 0 or (chunks and n > budget) or not has_cells:
                    continue
            elif n < until - sequence.n_computed and self._kv.has_streams:
                n_among_rows = int(n_decode > 0 and n > 1 and self._min_rows == 1)  # its first token
                n = n_among_rows + self._whole_ubatches(n - n_among_rows)
                if sequence.n_computed >= _LONG and not sequence.is_scored:
                    left = room - sum(n for _, n in chunks)
                    most = min(left, until - sequence.n_computed) - n_among_rows
                    n = n_among_rows + self._whole_attention_tile(n - n_among_rows, most)
            if self._min_rows > 1:
                n = min(n, room - self._min_rows + 1)
                if n == sequence.n_pending:
                    n = tokens_before_padding(n, ubatch_tokens=self._ubatch_tokens, min_rows=self._min_rows)
                room -= n + self._min_rows - 1
            if n > 0:
                chunks.append((sequence, n))
                budget -= n
        return chunks

    def _prompt_budget(
        self, prefilling: list[Seq], adapters: AdapterSet, groups: Groups, n_decode: int, decoding: list[Seq]
    ) -> tuple[list[Seq], list[Seq], int]:
        """The result of `_in_turn`, and the prompt tokens that the step may compute. Arguments as in `_prefill`."""
        n_decoding = len(decoding)
        n_urgent = sum(not s.is_background for s in prefilling)
        # Many background prompts count as one, so that they do not delay other requests' tokens.
        n_prompts = n_urgent or (len(prefilling) if all(s.is_background for s in decoding) else 1)
        step_budget = self._budgets.of(adapters)
        budget = step_budget.prefill_tokens(groups, n_prompts, n_decoding - n_decode, background=not n_urgent)
        n_pending = sum(s.n_pending for s in prefilling)
        if budget < n_pending and not self._kv.has_streams:  # rows and prompts are computed together: whole tiles
            budget = max(min(budget, _MIN_PIECE), self._whole_ubatches(budget + n_decode) - n_decode)
        budget = min(budget, n_pending)
        prefilling, long = self._in_turn(prefilling, budget, n_decoding, step_budget.cost)
        if n_decoding and n_urgent:
            budget = step_budget.with_whole_prompts(budget, groups, [s.n_pending for s in prefilling])
        if self._kv.unified and not self._kv.ensure_free(n_decoding + budget):
            budget = min(budget, self._kv.n_free - n_decoding)
        return prefilling, long, budget

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

    def _whole_ubatches(self, n: int) -> int:
        """The largest multiple of the ubatch size within `n` tokens: on a GPU, a small remainder costs as much as many
        tokens. Below one ubatch, whole tiles."""
        return n - n % self._ubatch_tokens if n > self._ubatch_tokens else whole_tiles(n)

    def _whole_attention_tile(self, n: int, most: int) -> int:
        """`n` tokens of a long prompt, or a tile of the attention (at most `most` tokens), if `n` are most of it."""
        tile = self._kv.attention_tile
        return tile if 0.75 * tile <= n < tile <= min(most, self._ubatch_tokens) else n

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
        for sequence in self.waiting[: _MAX_LOOKED_AT * self.n_parallel]:
            if len(plan.admitted) == self.n_parallel:
                break
            is_alike = not plan.admitted or sequence.adapters == plan.adapters
            if is_alike and plan.n_tokens + sequence.n_tokens <= self._step_tokens:
                self._kv.admit(sequence)
                plan.adapters = sequence.adapters
                plan.admitted.append(sequence)
                plan.chunks.append((sequence, sequence.n_tokens))
                plan.n_tokens += sequence.n_tokens
        chosen = set(plan.admitted)
        self.waiting = [sequence for sequence in self.waiting if sequence not in chosen]
        self.running = list(plan.admitted)
        return plan


def _groups(seq_ids: list[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers as (first, last + 1). `seq_ids`: ascending."""
    if seq_ids[-1] - seq_ids[0] + 1 == len(seq_ids):
        return [(seq_ids[0], seq_ids[-1] + 1)]
    starts = [n for n, before in zip(seq_ids, [-2, *seq_ids], strict=False) if n != before + 1]
    stops = [n + 1 for n, after in zip(seq_ids, [*seq_ids[1:], -1], strict=True) if after != n + 1]
    return list(zip(starts, stops, strict=True))


def _sizes(groups: list[tuple[int, int]]) -> Groups:
    return tuple(stop - start for start, stop in groups)


def _best_start(seq_ids: list[int], free: set[int]) -> int | None:
    """The start of the block of as many seq_ids as rows that needs the fewest moves: its other seq_ids are `free`.
    `seq_ids`: of the rows, ascending."""
    n, held = len(seq_ids), set(seq_ids)
    starts = [start for first in seq_ids for start in (first, first - n + 1) if start >= 0]
    possible = [start for start in starts if all(i in held or i in free for i in range(start, start + n))]
    return max(possible, key=lambda start: len(held.intersection(range(start, start + n))), default=None)


def _join_groups(seq_ids: list[int], free: set[int], cost: StepCost) -> list[tuple[int, int]]:
    """The groups of rows that a step computes, as (first, last + 1): gaps of free seq_ids, and the last tile, are
    filled where that is faster."""
    groups = _groups(seq_ids)
    joined = groups[:1]
    for start, stop in groups[1:]:
        last_start, last_stop = joined[-1]
        gap = range(last_stop, start)
        if free.issuperset(gap) and cost.is_worth_joining(last_stop - last_start, len(gap), stop - start):
            joined[-1] = (last_start, stop)
        else:
            joined.append((start, stop))
    if len(joined) == 1:
        start, stop = joined[0]
        end = stop
        while end in free:
            end += 1
        joined[0] = (start, start + cost.rows_to_compute(stop - start, end - start))
    return joined


def _chunk(entry: Seq | PaddingRow | PromptPart, n: int) -> Chunk | None:
    """All tokens that a sequence computes, at the place of its last ones."""
    if isinstance(entry, Seq):
        return entry, n
    return (entry.sequence, 1 + n) if isinstance(entry, PromptPart) and entry.n_before else None


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
    return sequence.rank[0] * _AGING_S + _FAIRNESS_FACTOR * sequence.n_pending * cost.token_s(sequence.n_pending)
