"""What an engine does now, for `GET /live`: its sequences, its queue, and which sequences share which KV cells."""

from __future__ import annotations

from time import perf_counter
from typing import Literal

import msgspec

from cppbatch.config import KvLayout
from cppbatch.engine.cells import Span, spans_of
from cppbatch.engine.kv_pool import KVPool
from cppbatch.engine.metrics import Metrics
from cppbatch.engine.scheduler import Scheduler
from cppbatch.engine.sequence import Seq, SeqStatus

MAX_QUEUE = 100
"""Waiting sequences that are shown."""

ShownState = Literal["prefill", "decode", "swapped", "waiting"]
_STATES: dict[SeqStatus, ShownState] = {
    SeqStatus.WAITING: "waiting",
    SeqStatus.PREFILL: "prefill",
    SeqStatus.DECODE: "decode",
    SeqStatus.SWAPPED: "swapped",
}


class LiveSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A running or waiting sequence. It has no text, and no name that a client chose."""

    number: int
    """Counts the sequences of this worker process: another sequence has another number."""
    state: ShownState
    """swapped: preempted, its keys and values are in host memory. waiting: it has no cells."""
    seq_id: int | None
    """None: it does not run."""
    priority: int | None
    """None: the server requires API keys, which may have priorities of their own."""
    rank: float | None
    """The order of the queue: `priority - age / 10`, so the difference between two sequences never changes. None as
    `priority`."""
    age: float
    """Seconds since it arrived. In the queue: its waiting time."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens taken from the prefix cache."""
    computed_tokens: int
    """Tokens of prompt and text in KV cells. In prefill: the progress, up to `prompt_tokens + generated_tokens`."""
    generated_tokens: int
    max_tokens: int
    """The most that it may generate."""
    drafted_tokens: int
    """Draft tokens that were verified."""
    accepted_tokens: int


class LiveSegment(msgspec.Struct, frozen=True, kw_only=True):
    """KV cells of consecutive positions with the same holders. 16 sequences that share a prompt of 200 tokens: one
    segment of 200 tokens with 16 sequences, and 16 segments with one each."""

    start: int
    """The position of its first token. The cells of a sequence are its segments in order of `start`, from 0 on."""
    tokens: int
    sequences: list[int]
    """The seq_ids of the running sequences that hold it, rising."""
    prefixes: int
    """How many cached prefixes hold it."""
    cached: bool
    """Only cached prefixes hold it: its cells are freed when others need them."""


class LiveCells(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cells. `used + cached + free = total`; the segments without `cached` have `used` tokens, the others
    `cached`."""

    layout: KvLayout
    """unified: all sequences share all cells. per-sequence: each seq_id has `per_sequence` cells of its own, and no
    segment has two holders."""
    total: int
    per_sequence: int
    """The most that one sequence can have."""
    used: int
    """Held by running sequences; shared ones count once."""
    cached: int
    """Held by cached prefixes only."""
    free: int
    segments: list[LiveSegment]
    """The segments of each sequence in order of `start`; those that it shares with an earlier one are there."""
    host_prefixes: int
    """Cached prefixes in host memory."""
    window: int
    """Tokens of the sliding window, whose cells are not counted here; 0: there is none."""
    states: bool
    """Whether a sequence has recurrent states, whose size does not depend on its tokens."""
    checkpoints: int
    """Checkpoints of windows and recurrent states in host memory."""
    checkpoint_bytes: int
    """What a sequence has of windows and states, and a checkpoint keeps: the size of the last one, 0 before it."""
    host_bytes: int
    swapped_bytes: int
    """Host memory of swapped sequences."""


class LiveCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Counted since the start of the worker process, as in `EngineStats`."""

    steps: int
    decode_steps: int
    decode_rows: int
    prompt_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    swaps: int
    recomputes: int
    step_seconds: dict[str, float]
    """Time of all steps, split into `PHASES`."""


class LiveEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine between two steps."""

    clock: float
    """Seconds, from an unknown start: for differences."""
    n_parallel: int
    """The most sequences that run at once."""
    counters: LiveCounters
    of_ideal: float | None
    """Of the time with work in the last minute, the part that its work costs at best: 0 to 1. None: there was none."""
    rows: list[LiveSequence]
    """The running sequences in order of rank, then the swapped ones among the first 100 of the queue."""
    waiting: int
    """The length of the queue, without the swapped sequences in `rows`."""
    queue: list[LiveSequence]
    """The first ones of the queue, at most 100, in order of rank."""
    cells: LiveCells


def live_engine(scheduler: Scheduler, kv: KVPool, metrics: Metrics) -> LiveEngine:
    """The state between two steps. Takes time for each running sequence, segment, and shown sequence of the queue."""
    now = perf_counter()
    first = scheduler.waiting[:MAX_QUEUE]
    queue = [_shown(sequence, now) for sequence in first if sequence.status is not SeqStatus.SWAPPED]
    swapped = [_shown(sequence, now) for sequence in first if sequence.status is SeqStatus.SWAPPED]
    return LiveEngine(
        clock=now,
        n_parallel=scheduler.n_parallel,
        counters=LiveCounters(
            steps=metrics.steps,
            decode_steps=metrics.decode_steps,
            decode_rows=metrics.decode_rows,
            prompt_tokens=metrics.prompt_tokens,
            generated_tokens=metrics.generated_tokens,
            drafted_tokens=metrics.drafted_tokens,
            accepted_tokens=metrics.accepted_tokens,
            swaps=kv.n_swaps,
            recomputes=kv.n_recomputes,
            step_seconds=dict(metrics.seconds),
        ),
        of_ideal=None if (of_ideal := metrics.of_ideal()) is None else round(of_ideal, 3),
        rows=[*(_shown(sequence, now) for sequence in scheduler.running), *swapped],
        waiting=len(scheduler.waiting) - len(swapped),
        queue=queue,
        cells=live_cells(kv),
    )


def _shown(sequence: Seq, now: float) -> LiveSequence:
    request, age = sequence.request, now - sequence.arrived_at
    return LiveSequence(
        number=sequence.rank[1],
        state=_STATES[sequence.status],
        seq_id=sequence.seq_id if sequence.seq_id >= 0 else None,
        priority=request.priority,
        rank=round(request.priority - age / 10, 4),
        age=round(age, 3),
        prompt_tokens=sequence.n_prompt,
        cached_tokens=sequence.n_cached,
        computed_tokens=sequence.n_computed,
        generated_tokens=sequence.n_generated,
        max_tokens=sequence.max_new,
        drafted_tokens=sequence.n_drafted,
        accepted_tokens=sequence.n_accepted,
    )


def live_cells(kv: KVPool) -> LiveCells:
    """Who holds which cells."""
    holders: dict[Span, list[int]] = {}
    n_prefixes: dict[Span, int] = {}
    for seq_id, sequence in sorted(kv.running.items()):
        for span in spans_of(sequence.cells):
            holders.setdefault(span, []).append(seq_id)
    for prefix in kv.cache.in_cells:
        for span in spans_of(prefix.cells):
            holders.setdefault(span, [])
            n_prefixes[span] = n_prefixes.get(span, 0) + 1
    segments = [
        LiveSegment(
            start=span.start,
            tokens=span.stop - span.start,
            sequences=sequences,
            prefixes=n_prefixes.get(span, 0),
            cached=not sequences,
        )
        for span, sequences in holders.items()
    ]
    cached = sum(segment.tokens for segment in segments if segment.cached)
    return LiveCells(
        layout=kv.layout,
        total=kv.n_cells,
        per_sequence=kv.n_ctx_seq,
        used=kv.n_cells - kv.n_free - cached,
        cached=cached,
        free=kv.n_free,
        segments=segments,
        host_prefixes=len(kv.cache.in_host),
        window=kv.n_window,
        states=kv.has_states,
        checkpoints=kv.cache.n_checkpoints,
        checkpoint_bytes=kv.cache.checkpoint_bytes,
        host_bytes=kv.cache.used_host_bytes,
        swapped_bytes=kv.swapped_bytes,
    )
