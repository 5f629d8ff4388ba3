"""Random schedules of drafts in a context; wrong draft tokens are removed if `Context.remove` allows it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cppbatch.llama import Batch, Context, Model

N_SEQ, N_TOKENS, MOST = 4, 200, 6
LONG = 40

_N_BATCH, _N_UBATCH = 256, 32

Row = npt.NDArray[np.float32]
Piece = tuple[int, int, list[int]]
"""seq_id, position, tokens."""


@dataclass
class Outcome:
    """What came of a schedule."""

    difference: float = 0.0
    """The largest one from the logits without drafts, in parts of their range."""
    removed: int = 0
    """Tokens that were removed."""
    refused: int = 0
    """Times that a sequence was computed again, because its last tokens could not be removed."""


def run_schedule(model: Model, *, unified: bool, seed: int) -> Outcome | None:
    """Reads `N_SEQ` texts with right and wrong drafts; None where no tokens can be removed."""
    return _Schedule(model, unified, seed).run()


class _Schedule:
    def __init__(self, model: Model, unified: bool, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._texts: list[list[int]] = self._random.integers(1, 100, (N_SEQ, N_TOKENS)).tolist()
        self._model, self._unified = model, unified
        self._at = [0] * N_SEQ
        self._outcome = Outcome()

    def run(self) -> Outcome | None:
        with self._open(n_rollback=0) as plain:
            columns = [decode(plain, [(s, i, [self._texts[s][i]]) for s in range(N_SEQ)]) for i in range(N_TOKENS)]
        self._expected = [[column[s][0] for column in columns] for s in range(N_SEQ)]
        with self._open(n_rollback=MOST) as context:
            if not context.n_rollback:
                return None
            for seq_id in self._random.permutation(N_SEQ).tolist():  # the states are in another order than the seq_ids
                self._step(context, [(seq_id, 4 + seq_id, 0)])
            while max(self._at) < N_TOKENS - 2 * MOST:
                self._step(context, self._choose())
                if self._random.random() < 0.1:
                    self._move(context)
        return self._outcome

    def _open(self, n_rollback: int) -> Context:
        return Context(
            self._model, n_ctx=N_SEQ * 256, n_batch=_N_BATCH, n_ubatch=_N_UBATCH, n_seq_max=N_SEQ, n_threads=1,
            flash_attn="off", kv_unified=self._unified, type_k="f32", type_v="f32", n_rollback=n_rollback,
        )  # fmt: skip

    def _choose(self) -> list[tuple[int, int, int]]:
        """For some sequences how many right and wrong tokens the next step computes."""
        random = self._random
        first = int(random.integers(0, N_SEQ))
        chosen = range(first, int(random.integers(first, N_SEQ)) + 1)
        if random.random() < 0.5:
            chosen = range(N_SEQ)
        n = int(random.integers(1, MOST + 2))
        lengths = [n if random.random() < 0.9 else int(random.integers(1, MOST + 2)) for _ in chosen]
        if random.random() < 0.1:  # a prompt beside them, of several ubatches
            lengths[-1] = LONG
        right = [int(random.integers(1, n + 1)) for n in lengths]
        return [(s, r, n - r) for s, r, n in zip(chosen, right, lengths, strict=True)]

    def _step(self, context: Context, chosen: list[tuple[int, int, int]]) -> None:
        at, texts = self._at, self._texts
        chosen = [(s, min(r, N_TOKENS - at[s]), w) for s, r, w in chosen if at[s] < N_TOKENS - 41]
        if not chosen:
            at[:] = [max(at)] * N_SEQ  # all are near their ends
            at[0] = N_TOKENS
            return
        pieces: list[Piece] = []
        for seq_id, n_right, n_wrong in chosen:
            following = texts[seq_id][at[seq_id] : at[seq_id] + n_right + n_wrong]
            wrong = [(token + 7) % 90 + 1 for token in following[n_right:]]
            pieces.append((seq_id, at[seq_id], following[:n_right] + wrong))
        rows = decode(context, pieces)
        for (seq_id, n_right, n_wrong), logits in zip(chosen, rows, strict=True):
            self._compare(seq_id, logits[:n_right])
            at[seq_id] += n_right
            if not n_wrong:
                continue
            if context.remove(seq_id, at[seq_id]):
                self._outcome.removed += n_wrong
            else:
                self._outcome.refused += 1
                context.remove(seq_id)
                decode(context, [(seq_id, 0, texts[seq_id][: at[seq_id]])])
            assert context.last_position(seq_id) == at[seq_id] - 1

    def _compare(self, seq_id: int, logits: Row) -> None:
        start = self._at[seq_id]
        for i, row in enumerate(logits, start):
            expected = self._expected[seq_id][i]
            difference = float(np.abs(row - expected).max() / np.ptp(expected))
            self._outcome.difference = max(self._outcome.difference, difference)

    def _move(self, context: Context) -> None:
        """One sequence becomes a copy of another for a step, and then has its own state again, from host memory."""
        a, b = self._random.choice(N_SEQ, 2, replace=False).tolist()
        saved = context.save_sequence(a)
        if self._random.random() < 0.5 and self._at[b] < N_TOKENS - 41:
            context.remove(a)
            context.copy(b, a)
            self._step(context, [(b, 2, 1)])
        context.restore_sequence(a, saved)


def decode(context: Context, pieces: list[Piece]) -> list[Row]:
    """The logits of all tokens: float32[n, n_vocab] of each piece."""
    batch = Batch(context.n_batch)
    for seq_id, position, tokens in pieces:
        batch.add_run(np.array(tokens, np.int32), position, seq_id, n_logits=len(tokens))
    context.decode(batch)
    logits = context.logits(batch.n_outputs).copy()
    return np.split(logits, np.cumsum([len(tokens) for _, _, tokens in pieces])[:-1])
