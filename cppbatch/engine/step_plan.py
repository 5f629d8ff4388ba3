"""The plan of a step: the scheduler and the shape of steps fill it, the batch and the sampler read it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from cppbatch.engine.kv.batch_order import BatchEntry, PaddingRow
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.sequence import Seq
from cppbatch.engine.step_cost import Groups

Scheduled = tuple[Seq, int]


class StepPlan(msgspec.Struct):
    """One step: which sequences compute how many of their pending tokens."""

    scheduled: list[Scheduled] = msgspec.field(default_factory=list)
    """Sequences with the number of tokens to compute, pending ones before draft tokens, in batch order."""
    media: list[Scheduled] = msgspec.field(default_factory=list)
    """Sequences with the number of image or audio vectors to compute, in a separate batch before the other."""
    padding: list[PaddingRow] = msgspec.field(default_factory=list)
    entries: list[BatchEntry] = msgspec.field(default_factory=list)
    """If the batch has more than `scheduled`: its sequences, parts of them and padding rows in batch order."""
    row_groups: Groups = ()
    """Decode rows that llama.cpp computes together, including padding rows and prompt tokens among them."""
    adapters: AdapterSet = ()
    """The LoRA adapters shared by all these sequences."""
    is_switch: bool = False
    """Whether the previous step had other adapters."""
    admitted: list[Seq] = msgspec.field(default_factory=list)
    n_decode: int = 0
    """The number of scheduled sequences that are decode rows; the others are prefill."""
    n_beside: int = 0
    """The number of prompts with a token computed among the decode rows, as part of `row_groups`."""
    n_tokens: int = 0
    """Scheduled tokens and vectors of the media, without drafts."""
    n_drafted: int = 0
    """Draft tokens, including filling tokens. 0: every decode row has one token."""

    @property
    def all_scheduled(self) -> list[Scheduled]:
        """With the media: all sequences that the step computes."""
        return self.scheduled + self.media if self.media else self.scheduled

    @property
    def batch(self) -> Sequence[BatchEntry]:
        """The entries of the step, in order: sequences, parts of them and padding rows."""
        return self.entries or self.scheduled

    @property
    def n_rows(self) -> int:
        """The number of batch entries of a single token with logits: decode rows, including padding rows."""
        return 0 if self.n_drafted else self.n_decode + len(self.padding)

    def outputs(self) -> list[Seq]:
        """The sequences that get a token, because none is pending after this step. In batch order."""
        return [sequence for sequence, n in self.scheduled if n >= sequence.n_pending]

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
        return any(sequence.is_scored for sequence, _ in self.scheduled)
