"""The live state of an engine, for `GET /live`: sequences, queue, and which sequences share which KV cells."""

from __future__ import annotations

from time import perf_counter
from typing import Literal

import msgspec

from cppbatch.config import KvLayout
from cppbatch.engine.cells import Span, spans_of
from cppbatch.engine.kv.pool import KVPool
from cppbatch.engine.observe.metrics import EngineParts
from cppbatch.engine.scheduler import AGING_S
from cppbatch.engine.sequence import Seq, SeqStatus

MAX_QUEUE = 100
"""Maximum number of waiting sequences shown."""

ShownState = Literal["prefill", "decode", "swapped", "waiting"]
_STATES: dict[SeqStatus, ShownState] = {
    SeqStatus.WAITING: "waiting",
    SeqStatus.PREFILL: "prefill",
    SeqStatus.DECODE: "decode",
    SeqStatus.SWAPPED: "swapped",
}


class LiveSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A running or waiting sequence. It contains no text and no names chosen by clients."""

    number: int
    """Sequence number, unique within this worker process."""
    state: ShownState
    """`swapped`: preempted, keys and values are in host memory. `waiting`: has no cells."""
    seq_id: int | None
    """None: not running."""
    priority: int | None
    """None: hidden, because the server's API keys may have their own priorities."""
    rank: float | None
    """Place in the queue, the lowest first: `priority - age / 10`, later for a client's further requests. The
    difference between two sequences never changes. None: as for `priority`."""
    age: float
    """Seconds since arrival; for a queued sequence, its waiting time."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens taken from the prefix cache."""
    computed_tokens: int
    """Prompt and generated tokens in KV cells; in prefill, the progress up to `prompt_tokens + generated_tokens`."""
    generated_tokens: int
    max_tokens: int
    """Maximum tokens to generate."""
    drafted_tokens: int
    """Verified draft tokens."""
    accepted_tokens: int


class LiveSegment(msgspec.Struct, frozen=True, kw_only=True):
    """KV cells of consecutive positions with the same holders. 16 sequences that share a prompt of 200 tokens: one
    segment of 200 tokens with 16 sequences, and 16 segments with one each."""

    start: int
    """Position of the first token. The cells of a sequence are its segments in order of `start`, from 0."""
    tokens: int
    sequences: list[int]
    """The seq_ids of the running sequences that hold it, in ascending order."""
    prefixes: int
    """Number of cached prefixes holding it."""
    cached: bool
    """Whether it is held only by cached prefixes, so that its cells are freed when needed."""


class LiveCells(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cells. `used + cached + free = total`; the segments without `cached` have `used` tokens, the others
    `cached`."""

    layout: KvLayout
    """`unified`: all sequences share all cells. `per-sequence`: each seq_id has its own `per_sequence` cells, and each
    segment has one holder."""
    total: int
    per_sequence: int
    """Maximum cells of one sequence."""
    used: int
    """Held by running sequences; shared cells count once."""
    cached: int
    """Held by cached prefixes only."""
    free: int
    segments: list[LiveSegment]
    """The segments of each sequence in order of `start`; shared segments are listed with the first sequence that holds
    them."""
    host_prefixes: int
    """Cached prefixes in host memory."""
    window: int
    """Tokens of the sliding window, whose cells are not included; 0: no window."""
    states: bool
    """Whether sequences have recurrent states, whose size does not depend on the number of tokens."""
    checkpoints: int
    """Checkpoints of windows and recurrent states in host memory."""
    checkpoint_bytes: int
    """Bytes of windows and states per sequence, as stored in a checkpoint: the size of the last checkpoint; 0 if there
    was none."""
    host_bytes: int
    swapped_bytes: int
    """Host memory used by swapped sequences."""


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
    """Seconds since an arbitrary start; use only differences."""
    n_parallel: int
    """Maximum concurrent sequences."""
    counters: LiveCounters
    of_ideal: float | None
    """Minimum cost of the last minute's work, as a fraction of the busy time: 0 to 1. None: no work."""
    rows: list[LiveSequence]
    """The running sequences by rank, followed by swapped ones among the first 100 of the queue."""
    waiting: int
    """Length of the queue, excluding the swapped sequences in `rows`."""
    queue: list[LiveSequence]
    """The first sequences of the queue by rank, at most 100."""
    cells: LiveCells


def live_engine(parts: EngineParts) -> LiveEngine:
    """The state between two steps. Its time depends on the running sequences, segments, and shown queue entries."""
    now, scheduler = perf_counter(), parts.scheduler
    first = scheduler.waiting[:MAX_QUEUE]
    queue = [_live_sequence(sequence, now) for sequence in first if sequence.status is not SeqStatus.SWAPPED]
    swapped = [_live_sequence(sequence, now) for sequence in first if sequence.status is SeqStatus.SWAPPED]
    return LiveEngine(
        clock=now,
        n_parallel=scheduler.n_parallel,
        counters=LiveCounters(**parts.read(LiveCounters.__struct_fields__)),
        of_ideal=None if (of_ideal := parts.metrics.of_ideal()) is None else round(of_ideal, 3),
        rows=[*(_live_sequence(sequence, now) for sequence in scheduler.running), *swapped],
        waiting=len(scheduler.waiting) - len(swapped),
        queue=queue,
        cells=live_cells(parts.kv),
    )


def _live_sequence(sequence: Seq, now: float) -> LiveSequence:
    request, age = sequence.request, now - sequence.arrived_at
    return LiveSequence(
        number=sequence.rank[1],
        state=_STATES[sequence.status],
        seq_id=sequence.seq_id if sequence.seq_id >= 0 else None,
        priority=request.priority,
        rank=round(sequence.rank[0] - now / AGING_S, 4),
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
    """The ownership of cells."""
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
    return LiveCells(
        layout=kv.layout,
        total=kv.n_cells,
        per_sequence=kv.n_ctx_seq,
        used=kv.n_used,
        cached=kv.n_cached,
        free=kv.n_free,
        segments=segments,
        host_prefixes=len(kv.cache.in_host),
        window=kv.n_window,
        states=kv.has_states,
        checkpoints=kv.cache.n_checkpoints,
        checkpoint_bytes=kv.cache.checkpoint_bytes,
        host_bytes=kv.cache.used_host_bytes,
        swapped_bytes=kv.moves.swapped_bytes,
    )
