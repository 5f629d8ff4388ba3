"""The current minimum cost of `llama_decode` on this machine, for `ideal_seconds`. The measurement takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter

import numpy as np

from cppbatch.bench.prompts import random_prompt
from cppbatch.config import EngineConfig, available_threads
from cppbatch.engine.ideal import BareCosts
from cppbatch.engine.runtime import Computation, Runtime, load_runtime
from cppbatch.llama import Batch

_SHORT = 16  # tokens of a sequence for measuring rows
_ROUNDS = 5  # steps per number of rows; medians count
_PIECES = (16, 64, 256, 512)
_LONG = (256, 64, 16)  # half of a long sequence: the first one that fits
_MAX_PIECE_S, _MAX_LONG_PIECE_S = 5.0, 1.0


def measure_bare_costs(runtime: Runtime, most_rows: int) -> BareCosts:
    """Measures prompt pieces of 16, 64, 256 and 512 tokens, and steps of 1, 4, 8, 16 ... `most_rows` rows, on short
    sequences and on four long ones, which give the cost of a cell: medians of some times each, because the fastest
    time of a shared machine is one that a load does not have for long.

    Computes about 5,000 prompt tokens; fewer if the context is small, or a piece would take seconds. The context must
    be empty and have cells for two tokens of each sequence; it is empty again afterwards. Raises `LlamaError`.
    """
    return _Measurement(runtime, most_rows).run()


@contextmanager
def bare_costs_of_model(model_path: str, most_rows: int) -> Iterator[Callable[[], BareCosts]]:
    """Loads a model with the engine's default settings. Yields `measure_bare_costs` for it. Raises the errors of
    loading."""
    n_ctx = most_rows * max(2 * _LONG[0] + 2 * _SHORT, _PIECES[-1])
    config = EngineConfig(model_path=model_path, n_parallel=most_rows, n_ctx=n_ctx, spec="off", prefix_cache=False)
    runtime = load_runtime(config)
    runtime.context.use_threads(available_threads())  # a program that was busy while loading may be idle now
    try:
        yield lambda: measure_bare_costs(runtime, most_rows)
    finally:
        runtime.close()


class _Measurement:
    def __init__(self, runtime: Runtime, most_rows: int) -> None:
        self._context: Computation = runtime.context
        self._batch = Batch(self._context.n_batch)
        self._tokens = random_prompt(np.random.default_rng(0), max(_PIECES), runtime.info.n_vocab)
        self._ends = [0] * most_rows  # per sequence
        self._most_rows = most_rows
        context = runtime.context
        self._room = (
            context.n_ctx // most_rows if context.kv_unified else context.n_ctx_seq
        )  # per sequence, if all are in use
        self._short = min(_SHORT, self._room // 2, context.n_batch)
        self._piece_s: dict[int, list[float]] = {}

    def run(self) -> BareCosts:
        most = self._most_rows
        rows_s = {}
        for n in sorted({1, *(n for n in (4, *range(8, most, 8)) if n < most), most}):
            for seq_id in range(n):
                self._compute_piece(seq_id, self._short)
            rows_s[n] = median(self._compute_rows(range(n)) for _ in range(min(_ROUNDS, self._room - self._short)))
            self._empty()
        row_cell_s, token_cell_s = self._measure_cells(rows_s[1])
        for n in _PIECES:
            if self._is_possible(n, n, 1, _MAX_PIECE_S):
                for _ in range(3):
                    self._compute_piece(0, n)
                    self._empty()
        piece_s = {n: median(times) for n, times in self._piece_s.items()}
        return BareCosts.of(
            ((n, max(0.5 * s, s - n * row_cell_s * self._short)) for n, s in rows_s.items()),
            ((n, max(0.5 * s, s - n * token_cell_s * n / 2) / n) for n, s in piece_s.items()),
            row_cell_s=row_cell_s,
            token_cell_s=token_cell_s,
        )

    def _measure_cells(self, one_row_s: float) -> tuple[float, float]:
        """Returns the additional seconds per cell of a row and of a prompt token. Steps of long and of short sequences
        alternate, because the speed of a shared machine changes by more than the cells cost."""
        n_long = max(1, min(4, self._most_rows // 2))
        long, short = range(n_long), range(n_long, min(2 * n_long, self._most_rows))
        piece = next((n for n in _LONG if self._is_possible(n, 2 * n + _ROUNDS, n_long, _MAX_LONG_PIECE_S)), 0)
        if not piece:
            return 0.0, 0.0
        pairs = [[self._compute_piece(seq_id, piece) for _ in range(2)] for seq_id in long]
        for seq_id in short:
            self._compute_piece(seq_id, self._short)
        more_s = [
            self._compute_rows(long) - (self._compute_rows(short) if short else one_row_s) for _ in range(_ROUNDS)
        ]
        self._empty()
        token_more_s = median(second_s - first_s for first_s, second_s in pairs)
        return max(0.0, median(more_s)) / n_long / (2 * piece), max(0.0, token_more_s) / piece**2

    def _is_possible(self, piece: int, length: int, n_sequences: int, most_s: float) -> bool:
        """Whether a piece fits into a ubatch and the time, and these sequences have cells for this length."""
        context = self._context
        has_cells = length <= context.n_ctx_seq and (not context.kv_unified or n_sequences * length <= context.n_ctx)
        return has_cells and piece <= min(context.n_ubatch, context.n_batch) and self._seconds(piece) <= most_s

    def _seconds(self, n: int) -> float:
        """The maximum time of a piece, extrapolated from a short one."""
        return n * median(self._piece_s[self._short]) / self._short

    def _compute_piece(self, seq_id: int, n: int) -> float:
        """Appends `n` tokens to a sequence. Returns the seconds; keeps those of new sequences."""
        self._batch.clear()
        self._batch.add_run(self._tokens[:n], self._ends[seq_id], seq_id, n_logits=1)
        seconds = self._decode()
        if not self._ends[seq_id]:
            self._piece_s.setdefault(n, []).append(seconds)
        self._ends[seq_id] += n
        return seconds

    def _compute_rows(self, seq_ids: range) -> float:
        """Appends a token to each of these sequences. Returns the seconds."""
        self._batch.clear()
        self._batch.add_rows([int(self._tokens[0])] * len(seq_ids), [self._ends[i] for i in seq_ids], list(seq_ids))
        for seq_id in seq_ids:
            self._ends[seq_id] += 1
        return self._decode()

    def _decode(self) -> float:
        began = perf_counter()
        self._context.decode(self._batch)
        return perf_counter() - began

    def _empty(self) -> None:
        for seq_id in range(self._most_rows):
            self._context.remove(seq_id)
        self._ends = [0] * self._most_rows
