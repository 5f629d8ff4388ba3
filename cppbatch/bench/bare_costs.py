"""What `llama_decode` costs at best on this machine now: a table that takes seconds to measure, for `ideal_seconds`."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from cppbatch.bench.prompts import random_prompt
from cppbatch.config import EngineConfig
from cppbatch.engine.ideal import BareCosts
from cppbatch.engine.runtime import Computation, Runtime, load_runtime
from cppbatch.llama import Batch

_SHORT = 16  # tokens of a sequence whose rows are measured
_ROUNDS = 4  # steps of each number of rows; the fastest counts
_PIECES = (16, 64, 256, 512)
_LONG = (256, 64, 16)  # half of a long sequence: the first one that fits
_N_LONG = 4  # sequences
_MAX_PIECE_S, _MAX_LONG_PIECE_S = 5.0, 1.0


def measure_bare_costs(runtime: Runtime, most_rows: int) -> BareCosts:
    """Measures pieces of prompts of 16, 64, 256 and 512 tokens, and steps of 1, 4, 8, 16 ... `most_rows` rows, on short
    sequences and on four long ones, from which the cost of a cell follows.

    About 4,500 prompt tokens; fewer where the context is small, or a piece would take seconds. The context
    must be empty, have room for two tokens of each sequence, and is empty again afterwards. Raises `LlamaError`.
    """
    return _Measurement(runtime, most_rows).run()


def bare_costs_of_model(model_path: str, most_rows: int) -> BareCosts:
    """The same of a model that is loaded for it, with the engine's default settings. Raises what loading raises."""
    n_ctx = most_rows * max(2 * _LONG[0] + 2 * _SHORT, _PIECES[-1])
    config = EngineConfig(model_path=model_path, n_parallel=most_rows, n_ctx=n_ctx, spec="off", prefix_cache=False)
    runtime = load_runtime(config)
    try:
        return measure_bare_costs(runtime, most_rows)
    finally:
        runtime.close()


class _Measurement:
    def __init__(self, runtime: Runtime, most_rows: int) -> None:
        self._context: Computation = runtime.context
        self._batch = Batch(self._context.n_batch)
        self._tokens = random_prompt(np.random.default_rng(0), max(_PIECES), runtime.info.n_vocab)
        self._ends = [0] * most_rows  # of each sequence
        self._most_rows = most_rows
        context = runtime.context
        self._room = (
            context.n_ctx // most_rows if context.kv_unified else context.n_ctx_seq
        )  # of each, with all of them
        self._short = min(_SHORT, self._room // 2, context.n_batch)
        self._piece_s: dict[int, float] = {}

    def run(self) -> BareCosts:
        most = self._most_rows
        rows_s = {}
        for n in sorted({1, *(n for n in (4, *range(8, most, 8)) if n < most), most}):
            for seq_id in range(n):
                self._compute_piece(seq_id, self._short)
            rows_s[n] = self._compute_rows(n, min(_ROUNDS, self._room - self._short))
            self._empty()
        n_long, row_cell_s, token_cell_s = max(n for n in rows_s if n <= _N_LONG), 0.0, 0.0
        if piece := next((n for n in _LONG if self._is_possible(n, 2 * n + _ROUNDS, n_long, _MAX_LONG_PIECE_S)), 0):
            times = [[self._compute_piece(seq_id, piece) for _ in range(2)] for seq_id in range(n_long)]
            first_s, second_s = (min(each) for each in zip(*times, strict=True))
            token_cell_s = max(0.0, second_s - first_s) / piece**2
            long_s = self._compute_rows(n_long, _ROUNDS)
            row_cell_s = max(0.0, long_s - rows_s[n_long]) / n_long / (2 * piece)
            self._empty()
        for n in _PIECES:
            if self._is_possible(n, n, 1, _MAX_PIECE_S):
                for _ in range(2):
                    self._compute_piece(0, n)
                    self._empty()
        return BareCosts.of(
            ((n, max(0.5 * s, s - n * row_cell_s * self._short)) for n, s in rows_s.items()),
            ((n, max(0.5 * s, s - n * token_cell_s * n / 2) / n) for n, s in self._piece_s.items()),
            row_cell_s=row_cell_s,
            token_cell_s=token_cell_s,
        )

    def _is_possible(self, piece: int, length: int, n_sequences: int, most_s: float) -> bool:
        """Whether a piece is computed at once, in time, and these sequences have the cells for this length."""
        context = self._context
        has_cells = length <= context.n_ctx_seq and (not context.kv_unified or n_sequences * length <= context.n_ctx)
        return has_cells and piece <= min(context.n_ubatch, context.n_batch) and self._seconds(piece) <= most_s

    def _seconds(self, n: int) -> float:
        """That a piece takes at most, as far as is known."""
        return n * self._piece_s[self._short] / self._short

    def _compute_piece(self, seq_id: int, n: int) -> float:
        """Appends `n` tokens to a sequence. Returns the seconds; the least of new sequences are kept."""
        self._batch.clear()
        self._batch.add_run(self._tokens[:n], self._ends[seq_id], seq_id, n_logits=1)
        seconds = self._decode()
        if not self._ends[seq_id]:
            self._piece_s[n] = min(seconds, self._piece_s.get(n, seconds))
        self._ends[seq_id] += n
        return seconds

    def _compute_rows(self, n: int, n_steps: int) -> float:
        """Appends tokens to the first `n` sequences. Returns the seconds of the fastest step."""
        rows, token, times = list(range(n)), int(self._tokens[0]), []
        for _ in range(n_steps):
            self._batch.clear()
            self._batch.add_rows([token] * n, self._ends[:n], rows)
            times.append(self._decode())
            self._ends[:n] = [end + 1 for end in self._ends[:n]]
        return min(times)

    def _decode(self) -> float:
        began = perf_counter()
        self._context.decode(self._batch)
        return perf_counter() - began

    def _empty(self) -> None:
        for seq_id in range(self._most_rows):
            self._context.remove(seq_id)
        self._ends = [0] * self._most_rows
