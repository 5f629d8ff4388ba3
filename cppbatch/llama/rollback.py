"""Which of the last tokens of a sequence can be removed where memory is not all cells: those of wrong drafts.

- Recurrent states: llama.cpp keeps a snapshot of the state before each of the last tokens (`n_rs_seq`), beside the
  states that a ubatch moves. A later ubatch may move such a state again, without its snapshots.
- Sliding windows: a ubatch overwrites only cells that its first token of their sequence no longer sees. A later ubatch
  overwrites more.

`llama_memory_seq_rm` notices neither: it returns True, and the logits are wrong. So tokens are removed only after a
decode that was a single ubatch (docs/decisions/0033).
"""

from __future__ import annotations

from itertools import groupby, pairwise

from cppbatch.llama.llama_batch import Batch

_FEW, _MANY = 4, 64
SNAPSHOTS = {
    **dict.fromkeys(("lfm2", "lfm2moe"), _MANY),  # a short convolution: 2 * n_embd numbers in a layer
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen4exp"), _FEW),
    **dict.fromkeys(("bailingmoe3", "deepseek4", "glm5-next", "kimi-k3"), _FEW),
}
"""Architectures whose recurrent states are set back, with the snapshots of each sequence at most: each takes the memory
of a whole state, mostly tens of MB. They are those of llama.cpp's `llm_arch_supports_rs_rollback`, each tested
(`./scripts/test archs`)."""


class Rollback:
    """What the last decode of a context allows to remove: up to `n` tokens of each sequence."""

    def __init__(self, n: int, *, any_lengths: bool, any_seq_ids: bool) -> None:
        """How llama.cpp splits a batch into ubatches. `any_lengths`: one ubatch may have more tokens of one sequence
        than of another. `any_seq_ids`: it may have seq_ids that are not consecutive.
        """
        self.n = n
        self._any_lengths, self._any_seq_ids = any_lengths, any_seq_ids
        self._removable: dict[int, int] = {}
        self._pending: set[int] = set()

    def decoded(self, batch: Batch, n_ubatch: int) -> None:
        """The last decode is that of `batch`."""
        if not self.n:
            return
        runs = [(seq_id, len(list(run))) for seq_id, run in groupby(batch.seq_ids[: batch.n_tokens].tolist())]
        self._removable = {seq_id: min(n - 1, self.n) for seq_id, n in runs}
        self._pending.difference_update(self._removable)
        is_equal = self._any_lengths or len({n for _, n in runs}) == 1
        is_consecutive = self._any_seq_ids or all(b == a + 1 for (a, _), (b, _) in pairwise(runs))
        if batch.n_tokens > n_ubatch or len(self._removable) < len(runs) or not (is_equal and is_consecutive):
            self._removable.clear()

    def removable(self, seq_id: int) -> int:
        """How many of the last tokens of a sequence can be removed."""
        return self._removable.get(seq_id, 0)

    def removed_part(self, seq_id: int) -> None:
        """The last tokens of a sequence were removed; llama.cpp removes no more until it has decoded some."""
        del self._removable[seq_id]
        self._pending.add(seq_id)

    def removed(self, seq_id: int) -> None:
        """A whole sequence was removed."""
        self._removable.pop(seq_id, None)
        self._pending.discard(seq_id)

    def moved(self) -> None:
        """States were copied or restored: they may be shared now, or have other places."""
        self._removable.clear()

    def is_pending(self, seq_id: int) -> bool:
        """Whether the state of a sequence is still a snapshot, which `llama_memory_seq_cp` would not copy."""
        return seq_id in self._pending
