"""The shape of steps: which rows and pieces of prompts llama.cpp computes fast for the sequences that a step serves."""

from __future__ import annotations

from typing import Any

from cppbatch.engine.kv.batch_order import (
    BatchEntry,
    PaddingRow,
    PromptPart,
    in_batch_order,
    padded_size,
    tokens_before_padding,
    with_min_rows,
)
from cppbatch.engine.kv.pool import KVPool
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.speculator import DraftLimits
from cppbatch.engine.step_budget import MIN_PIECE_TOKENS
from cppbatch.engine.step_cost import Groups, StepCost, whole_tiles
from cppbatch.engine.step_plan import Scheduled, StepPlan

_GAP_STEPS = 4  # steps that a gap between decode rows must last before it is closed
_MAX_GAIN_STEPS = 64  # steps for which closing a gap is expected to pay off, at most
_TILED_FROM_TOKENS = 512  # of a prompt; after that many, a tile of the attention takes about as long as ...
_TILE_PART, _DEEP_TILE_PART = 0.75, 0.5  # ... this part of it row by row; the second one after thousands (0031)


class StepShape:
    """The shape of steps on a CPU, whose kernels compute rows in tiles.

    With streams (`KVPool.has_streams`), llama.cpp only computes rows of consecutive seq_ids together, and prompts apart
    from them. In the unified layout, it computes all tokens of a step together.
    """

    on_gpu = False
    """Whether rows are almost free, but ubatches, and numbers of rows that the last step did not have, are not."""
    piece_padding = 0
    """Tokens of padding that may follow a piece of a prompt."""
    _joins_prompts = True  # whether a prompt may have a token among the rows

    def __init__(
        self, kv: KVPool, *, step_tokens: int, ubatch_tokens: int = 0, may_pad: bool = False, max_draft_rows: int = 256
    ) -> None:
        """`step_tokens`: maximum tokens per step. `ubatch_tokens`: tokens that llama.cpp computes at once; 0: the
        same. `may_pad`: whether to add padding rows to steps. `max_draft_rows`: maximum rows of a step with drafts, all
        of which have logits.
        """
        self._kv = kv
        self.step_tokens = step_tokens
        self._ubatch_tokens = ubatch_tokens or step_tokens
        self._may_pad = may_pad
        self._max_draft_rows = min(step_tokens, self._ubatch_tokens, max_draft_rows)
        self._n_gap_steps = 0  # consecutive steps with a gap between the rows

    # --- decode rows ------------------------------------------------------------------------------------------------

    def choose_rows(
        self, plan: StepPlan, decoding: list[Seq], prompts: list[Seq], cost: StepCost, *, is_alone: bool
    ) -> tuple[list[Seq], list[Seq]]:
        """The sequences of `decoding` that compute a row in this step, and those of `prompts` that have a token among
        these rows. Sets `row_groups` and `padding` of the plan.

        `is_alone`: whether no other sequence waits or runs, so that a gap between the rows may last.
        """
        plan.row_groups = (len(decoding),) if decoding else ()
        if not (decoding and self._may_pad) or self._kv.unified:
            return decoding, []
        self._close_gaps(decoding, cost, is_alone=is_alone)
        rows = [sequence for sequence in decoding if not sequence.moving]
        texts = [sequence for sequence in prompts if not sequence.next_run] if self._joins_prompts else []
        return rows, self._join_rows(plan, rows, texts, cost)

    def _close_gaps(self, rows: list[Seq], cost: StepCost, *, is_alone: bool) -> None:
        """Moves sequences so that all rows are adjacent, if that saves more time in the next steps than the moves take.
        Only after gaps have lasted for some steps: usually a new sequence soon fills them. On a CPU, a moving sequence
        computes nothing in this step."""
        by_id = {sequence.seq_id: sequence for sequence in rows}
        if not is_alone or max(by_id) - min(by_id) + 1 == len(by_id):
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
        n_steps = min(_MAX_GAIN_STEPS, *(max(s.n_left for s in side) for side in (moving, staying)))
        gain = cost.rows_s(_sizes(_join_groups(sorted(by_id), free, cost))) - cost.rows_s([len(by_id)])
        lost = sum(self._kv.move_s(seq_id, sequence) for seq_id, sequence in moves) + self._pause_s(staying, cost)
        if n_steps * gain <= lost:
            return
        for seq_id, sequence in moves:
            self._kv.move_to(seq_id, sequence)

    def _pause_s(self, staying: list[Seq], cost: StepCost) -> float:
        """Seconds of a step of these sequences, for which the moving ones pause."""
        return cost.rows_s(_sizes(_groups(sorted(s.seq_id for s in staying))))

    def _join_rows(self, plan: StepPlan, rows: list[Seq], prompts: list[Seq], cost: StepCost) -> list[Seq]:
        """Fills the gaps between rows, and the last tile, if that makes the step faster: with a token of the prompt of
        this seq_id, or with a padding row. Sets `row_groups` and `padding`, and returns the prompts."""
        spare = [*self._kv.spare_ids(), *self._kv.cached_ids()]
        by_id = {sequence.seq_id: sequence for sequence in prompts}
        free = {*by_id, *spare[: self.step_tokens - len(rows) - len(prompts)]}
        ids = {sequence.seq_id for sequence in rows}
        joined = _join_groups(sorted(ids), free, cost)
        plan.row_groups = _sizes(joined)
        more = [seq_id for start, stop in joined for seq_id in range(start, stop) if seq_id not in ids]
        plan.padding = self._kv.padding_rows([seq_id for seq_id in more if seq_id not in by_id])
        return [by_id[seq_id] for seq_id in more if seq_id in by_id]

    def pad(self, plan: StepPlan, n_rows: int, cost: StepCost) -> None:
        """Adds padding rows that speed up a step without prompts, which would fill the tiles, and sets `row_groups`.

        With streams, `choose_rows` has done it; recurrent models in a unified layout get none, because they would take
        cells that others may need."""
        if not self._may_pad or self._kv.has_streams:
            return
        spare = self._kv.spare_ids()
        n_more = min(len(spare), self.step_tokens - n_rows, self._kv.n_free - n_rows)
        n = cost.rows_to_compute(n_rows, n_rows + max(0, n_more))
        plan.padding, plan.row_groups = [PaddingRow(seq_id) for seq_id in spare[: n - n_rows]], (n,)

    def padded(self, groups: Groups) -> Groups:
        """The sizes of these groups of rows with the padding that `fill` adds."""
        return groups

    def draft_limits(
        self, plan: StepPlan, rows: list[Seq], beside: list[Seq], *, is_queue_empty: bool
    ) -> DraftLimits | None:
        """What the drafts of these rows may take; None: nothing. Only free cells: nothing is evicted or preempted for
        them. `rows`: by ascending seq_id."""
        kv, (most_each,) = self._kv, self.padded((1,))  # a row without neighbours gets the most padding
        n_rows = (len(rows) + len(plan.padding)) * most_each
        most = self._max_draft_rows - n_rows
        most = min(most, kv.n_free - n_rows) if kv.unified else most
        if most <= 0:
            return None
        span = rows[-1].seq_id + 1 - rows[0].seq_id
        is_one_group = len(plan.row_groups) == 1 and not beside and (kv.unified or span <= n_rows)
        each = [min(kv.n_ctx_seq, s.n_ctx) - s.n_tokens for s in rows]
        return DraftLimits(most, each, kv.has_streams, is_one_group, on_gpu=self.on_gpu, is_queue_empty=is_queue_empty)

    # --- prompts ----------------------------------------------------------------------------------------------------

    def whole_budget(self, n: int, n_decode: int) -> int:
        """The prompt tokens, of a budget of `n`, that are whole tiles together with the decode rows. With streams, they
        are computed apart, in pieces that are whole tiles (`piece`)."""
        if self._kv.has_streams:
            return n
        return max(min(n, MIN_PIECE_TOKENS), self._whole_ubatches(n + n_decode) - n_decode)

    def piece(self, sequence: Seq, n: int, n_left: int, room: int, *, has_rows: bool, most_whole: int) -> int:
        """The size of a piece of a prompt of about `n` tokens that is computed fast.

        `n_left`: tokens until the piece must end. `room`: tokens left in the step. `has_rows`: whether the step has
        decode rows, with which the first token of the piece may be computed. `most_whole`: as
        `StepBudget.whole_tokens`.
        """
        if not 0 < n < n_left or not self._kv.has_streams:
            return n
        n_among_rows = int(has_rows and n > 1)
        return n_among_rows + self._in_tiles(sequence, n - n_among_rows, min(room, n_left) - n_among_rows, most_whole)

    def _in_tiles(self, sequence: Seq, n: int, most: int, most_whole: int) -> int:
        """About `n` tokens of a prompt, at most `most`, as whole tiles of its matrix products, or of its attention
        where that decides."""
        tile = self._kv.attention_tile
        if tile == 1 or n > self._ubatch_tokens or sequence.n_computed < _TILED_FROM_TOKENS or sequence.is_scored:
            return self._whole_ubatches(n)
        n_tiles, rest = divmod(n, tile)
        fills = rest >= _TILE_PART * tile
        if tile <= most_whole:  # the step may take longer than its target
            fills = n_tiles == 0 or rest >= _DEEP_TILE_PART * tile
        if fills and (n_tiles + 1) * tile <= min(most, self._ubatch_tokens):
            n_tiles += 1
        return n_tiles * tile or whole_tiles(n)

    def _whole_ubatches(self, n: int) -> int:
        """The largest multiple of the ubatch size within `n` tokens: on a GPU, a small remainder costs as much as many
        tokens. Below one ubatch, whole tiles."""
        return n - n % self._ubatch_tokens if n > self._ubatch_tokens else whole_tiles(n)

    # --- the batch --------------------------------------------------------------------------------------------------

    def fill(
        self, plan: StepPlan, rows: list[Scheduled], prefill: list[Scheduled], beside: list[Seq], n_padding: int
    ) -> None:
        """Sets `scheduled`, and the batch's entries. `beside`: prompts with a token among the rows. `n_padding`: draft
        tokens per padding row."""
        together: list[BatchEntry] = [*rows, *((padding, 1 + n_padding) for padding in plan.padding)]
        batch = self._batch(plan, together, prefill, beside)
        plan.scheduled = [scheduled for entry, n in batch if (scheduled := _scheduled(entry, n))]
        plan.entries = batch if len(plan.scheduled) < len(batch) else []
        plan.n_decode, plan.n_beside = len(rows), len(beside)

    def _batch(
        self, plan: StepPlan, rows: list[BatchEntry], prefill: list[Scheduled], beside: list[Seq]
    ) -> list[BatchEntry]:
        """The entries of the batch, in its order. `rows`: with padding rows."""
        n_of = dict(prefill)
        others: list[BatchEntry] = []
        for sequence in beside:
            n = n_of.pop(sequence, 1)
            if n == 1 or sequence.n_logits(1):
                rows.append((sequence, n))
            else:
                rows.append((PromptPart(sequence, 0), 1))
                others.append((PromptPart(sequence, 1), n - 1))
        return in_batch_order(rows, [*others, *n_of.items()], gpu_ubatch=self._ubatch_tokens if self.on_gpu else 0)


class GpuShape(StepShape):
    """The shape of steps on a GPU: rows are almost free, and cells are copied in the decode that computes them."""

    on_gpu = True

    def _pause_s(self, staying: list[Seq], cost: StepCost) -> float:
        return 0.0

    def pad(self, plan: StepPlan, n_rows: int, cost: StepCost) -> None:
        """Adds nothing: without streams, no padding row speeds a step up."""


class FixedRows(StepShape):
    """The shape of steps with `deterministic`: every ubatch has at least `min_rows` tokens, and rows of logits if any.

    Such an engine has streams, on a CPU. Padding rows follow the rows and the pieces that are too small
    (`with_min_rows`), so no prompt has a token among the rows.
    """

    _joins_prompts = False

    def __init__(self, kv: KVPool, min_rows: int, **sizes: Any) -> None:
        super().__init__(kv, may_pad=True, **sizes)
        self._min_rows = min_rows
        self.piece_padding = min_rows - 1

    def padded(self, groups: Groups) -> Groups:
        """The sizes of these groups of rows with the padding that `fill` adds."""
        return tuple(padded_size(n, self._min_rows) for n in groups)

    def piece(self, sequence: Seq, n: int, n_left: int, room: int, *, has_rows: bool, most_whole: int) -> int:
        """The size of a piece of a prompt (`StepShape.piece`) that fits into the step with its padding."""
        n = super().piece(sequence, n, n_left, room, has_rows=False, most_whole=most_whole)
        n = min(n, room - self.piece_padding)
        if n < sequence.n_pending:
            return n
        return tokens_before_padding(n, ubatch_tokens=self._ubatch_tokens, min_rows=self._min_rows)

    def _batch(
        self, plan: StepPlan, rows: list[BatchEntry], prefill: list[Scheduled], beside: list[Seq]
    ) -> list[BatchEntry]:
        batch = with_min_rows(rows, prefill, ubatch_tokens=self._ubatch_tokens, min_rows=self._min_rows)
        plan.padding = [entry for entry, _ in batch if isinstance(entry, PaddingRow)]
        if not plan.n_drafted:
            plan.row_groups = self.padded(plan.row_groups)
        return batch


def step_shape(
    kv: KVPool, *, on_gpu: bool = False, min_rows: int = 1, may_pad: bool = False, **sizes: Any
) -> StepShape:
    """The shape for this case. `min_rows`: above 1 with `deterministic`. `may_pad`: whether to add padding
    rows. `sizes`: those of `StepShape`."""
    if min_rows > 1:
        return FixedRows(kv, min_rows, **sizes)
    return (GpuShape if on_gpu else StepShape)(kv, may_pad=may_pad, **sizes)


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


def _scheduled(entry: Seq | PaddingRow | PromptPart, n: int) -> Scheduled | None:
    """All tokens that a sequence computes, at the place of its last ones."""
    if isinstance(entry, Seq):
        return entry, n
    return (entry.sequence, 1 + n) if isinstance(entry, PromptPart) and entry.n_before else None
