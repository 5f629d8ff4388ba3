"""What the engine counts about itself."""

from __future__ import annotations

from collections import Counter
from time import perf_counter

import msgspec

from cppbatch.engine.kv_pool import KVPool
from cppbatch.engine.request import FinishReason

PHASES = ("schedule", "fill", "decode", "sample", "advance")


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and the state now."""

    steps: int
    decode_steps: int
    """Steps in which at least one sequence was decoding."""
    decode_rows: int
    """Decoding sequences, summed over those steps."""
    mean_decode_batch: float
    """decode_rows / decode_steps."""
    prompt_tokens: int
    """Prompt tokens computed."""
    generated_tokens: int
    forced_tokens: int
    """Of those, tokens that a grammar gave without a decode for each."""
    finished: dict[str, int]
    """Finished requests by finish reason."""
    running: int
    waiting: int
    kv_cells: int
    kv_cells_used: int
    """Cells of running sequences; shared ones count once."""
    kv_cells_cached: int
    """Cells of prefixes that are only kept for others; free as soon as they are needed."""
    prefixes_in_cells: int
    """Cached prefixes in cells; each has a seq_id."""
    prefixes_in_host: int
    """Cached prefixes that had to leave their cells for host memory."""
    prefix_queries: int
    """Requests that looked for their beginning in the prefix cache."""
    prefix_hits: int
    prefix_hit_tokens: int
    """Prompt tokens that were not computed because others had."""
    prefix_cache_bytes: int
    """Host memory of the prefixes there."""
    swaps: int
    """Sequences that gave up their cells to host memory."""
    recomputes: int
    """Sequences that gave up their cells to be computed again."""
    swapped_bytes: int
    """Host memory that swapped-out sequences take now."""
    seq_ids: int
    seq_ids_free: int
    """Those that neither a running sequence nor a cached prefix has."""
    step_seconds: dict[str, float]
    """Time of all steps, split into schedule, fill, decode, sample, advance."""


class Metrics:
    """Counts steps, tokens and time. Cheap: a few additions a step."""

    def __init__(self) -> None:
        self.steps = self.decode_steps = self.decode_rows = 0
        self.prompt_tokens = self.generated_tokens = self.forced_tokens = 0
        self.finished: Counter[FinishReason] = Counter()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._mark = 0.0

    def begin_step(self) -> None:
        """Starts the clock of a step."""
        self._mark = perf_counter()

    def lap(self, phase: str) -> None:
        """Books the time since the last call to a phase."""
        now = perf_counter()
        self.seconds[phase] += now - self._mark
        self._mark = now

    def seconds_per_request(self) -> float:
        """Time of all steps for each finished request, from 1 to 60 s: how soon the next one ends, roughly."""
        return min(60.0, max(1.0, sum(self.seconds.values()) / max(1, self.finished.total())))

    def count_step(self, *, decode_rows: int, prompt_tokens: int) -> None:
        """Notes a computed step."""
        self.steps += 1
        self.prompt_tokens += prompt_tokens
        if decode_rows:
            self.decode_steps += 1
            self.decode_rows += decode_rows

    def stats(self, kv: KVPool, *, running: int, waiting: int) -> EngineStats:
        """The counters together with the state of the pool and of the queues."""
        return EngineStats(
            steps=self.steps,
            decode_steps=self.decode_steps,
            decode_rows=self.decode_rows,
            mean_decode_batch=self.decode_rows / self.decode_steps if self.decode_steps else 0.0,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            forced_tokens=self.forced_tokens,
            finished={reason.value: n for reason, n in self.finished.items()},
            running=running,
            waiting=waiting,
            kv_cells=kv.n_ctx,
            kv_cells_used=kv.n_used,
            kv_cells_cached=kv.n_cached,
            prefixes_in_cells=len(kv.cache.in_cells),
            prefixes_in_host=len(kv.cache.in_host),
            prefix_queries=kv.cache.queries,
            prefix_hits=kv.cache.hits,
            prefix_hit_tokens=kv.cache.hit_tokens,
            prefix_cache_bytes=kv.cache.used_host_bytes,
            swaps=kv.n_swaps,
            recomputes=kv.n_recomputes,
            swapped_bytes=kv.swapped_bytes,
            seq_ids=kv.n_seq_ids,
            seq_ids_free=kv.n_free_ids,
            step_seconds=dict(self.seconds),
        )
