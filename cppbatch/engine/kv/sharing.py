"""How a sequence reuses the prefix of another one: a class for each kind of memory (`cppbatch.config.Sharing`)."""

from __future__ import annotations

from collections.abc import Sequence

from cppbatch.config import Sharing
from cppbatch.engine.kv.cached_prefix import Checkpoint, Match, Source
from cppbatch.engine.kv.memory import Memory
from cppbatch.engine.kv.moves import MoveQueue
from cppbatch.engine.sequence import SavedState, Seq
from cppbatch.errors import LlamaError


class PrefixSharing:
    """The rules and moves that most kinds have in common: a sequence gets a copy of the source's whole state."""

    reuses = True
    """Whether sequences reuse prefixes."""
    shares_prefixes = False
    """Whether a sequence can reuse any prefix of another one, not only up to checkpoints and ends."""
    shares_any_cells = False
    """Whether it does so without a copy: both hold the same cells."""
    shares_cells = False
    """Whether sequences can hold the same cells."""
    has_parts = False
    """Whether checkpoints are parts of states, which the cells of others complete."""
    only_whole = False
    """Whether a prefix can only be reused whole, so that cached prefixes are the checkpoints."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def usable(self, source: Source, n: int, checkpoints: Sequence[Checkpoint]) -> tuple[int, Checkpoint | None]:
        """How many of the first `n` tokens can be reused from a source that has computed more, and the required
        checkpoint. `checkpoints`: those of these tokens, longest first."""
        checkpoint = next((each for each in checkpoints if len(each.tokens) <= n), None)
        return (len(checkpoint.tokens), checkpoint) if checkpoint else (0, None)

    def continues_in_place(self, n: int, n_computed: int, *, of_slot: bool = False) -> bool:
        """Whether a sequence that reuses `n` tokens of a cached prefix takes over its cells, and truncates them: not if
        sequences can share them, or if most of the prefix would be lost. (Taking it over whole loses nothing, and a
        state in addition to its cells need not be copied.) `of_slot`: the request names the prefix's slot."""
        return False

    def save_checkpoint(self, seq_id: int) -> SavedState:
        """Saves what a checkpoint of the computed tokens consists of. Raises `OUT_OF_MEMORY`."""
        return self._memory.save_part(seq_id)

    def plan_truncation(self, moves: MoveQueue, sequence: Seq, checkpoint: Checkpoint | None) -> None:
        """Plans to truncate the cells that a sequence has taken over to its computed tokens."""
        moves.add(self._memory.remove, sequence.seq_id, sequence.n_positions)

    def plan_reuse(self, moves: MoveQueue, sequence: Seq, match: Match) -> None:
        """Plans to give a sequence the prefix of `match`."""
        moves.add_reuse(sequence, self._copy, moves, match, match.source.seq_id, match.source.saved, sequence)

    def _copy(self, moves: MoveQueue, match: Match, seq_id: int, saved: SavedState | None, sequence: Seq) -> None:
        """Copies the whole state of the source, through host memory or on the GPU, then truncates it to the prefix.

        `seq_id`, `saved`: the source's memory at planning time.
        """
        memory, source, checkpoint = self._memory, match.source, match.checkpoint
        if moves.on_gpu and seq_id >= 0 and not checkpoint:  # streams are copied in the next decode, over the part
            memory.copy(seq_id, sequence.seq_id)
        else:
            state = saved or source.saved or moves.copied.get(source)
            if state is None:
                if seq_id < 0:
                    raise LlamaError("its prefix did not fit into host memory")
                state = moves.copied[source] = memory.save_sequence(seq_id)
            memory.restore_sequence(sequence.seq_id, state)
        if checkpoint:
            memory.restore_part(sequence.seq_id, checkpoint.saved)
        else:
            memory.remove(sequence.seq_id, sequence.n_positions)


class NoSharing(PrefixSharing):
    """Each sequence computes its whole prompt."""

    reuses = False


class CopySharing(PrefixSharing):
    """Streams that can be truncated anywhere: any prefix is copied, or taken over if that loses little."""

    shares_prefixes = True

    def continues_in_place(self, n: int, n_computed: int, *, of_slot: bool = False) -> bool:
        return of_slot or 2 * n >= n_computed


class CellSharing(PrefixSharing):
    """Unified cells that can be truncated anywhere: sequences hold the same cells of any prefix."""

    shares_prefixes = shares_any_cells = shares_cells = True

    def plan_reuse(self, moves: MoveQueue, sequence: Seq, match: Match) -> None:
        if match.source.seq_id < 0:
            super().plan_reuse(moves, sequence, match)
        else:
            moves.add(self._memory.copy, match.source.seq_id, sequence.seq_id, 0, sequence.span(match.n))


class CheckpointSharing(PrefixSharing):
    """Cells beside windows or recurrent states, which checkpoints save: a part, with the cells of any sequence."""

    has_parts = True

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.shares_cells = memory.shares_cells

    def usable(self, source: Source, n: int, checkpoints: Sequence[Checkpoint]) -> tuple[int, Checkpoint | None]:
        if source.seq_id >= 0 and self._memory.first_cut(source.seq_id) <= n:
            return n, None
        return super().usable(source, n, checkpoints)

    def continues_in_place(self, n: int, n_computed: int, *, of_slot: bool = False) -> bool:
        return n == n_computed

    def plan_truncation(self, moves: MoveQueue, sequence: Seq, checkpoint: Checkpoint | None) -> None:
        if checkpoint:
            moves.add_reuse(sequence, self._memory.restore_part, sequence.seq_id, checkpoint.saved)
        else:
            moves.add_reuse(sequence, self._memory.cut, sequence.seq_id, sequence.n_positions)

    def plan_reuse(self, moves: MoveQueue, sequence: Seq, match: Match) -> None:
        source = match.source
        if source.seq_id >= 0 and match.is_cut:
            moves.add_reuse(sequence, self._copy_cut, moves, source.seq_id, sequence)
        elif source.seq_id >= 0 and self.shares_cells:
            moves.add_reuse(sequence, self._share, moves, match, source.seq_id, sequence)
        else:
            super().plan_reuse(moves, sequence, match)

    def _copy_cut(self, moves: MoveQueue, seq_id: int, sequence: Seq) -> None:
        """Lets a sequence reuse the first tokens of `seq_id`, as far as its window allows."""
        part = self._memory.copy_cut(seq_id, sequence.seq_id, sequence.n_positions)
        if part and moves.keep_part:
            moves.keep_part(sequence, part)

    def _share(self, moves: MoveQueue, match: Match, seq_id: int, sequence: Seq) -> None:
        """Lets a sequence hold cells of the source, with the state at the checkpoint, or its current one.

        `seq_id`: the source's at planning time.
        """
        part = match.checkpoint.saved if match.checkpoint else moves.copied.get(match.source)
        if part is None:
            part = moves.copied[match.source] = self._memory.save_part(seq_id)
        self._memory.share_cells(seq_id, sequence.seq_id, part)


class WholeSharing(PrefixSharing):
    """States without cells: a copy of all tokens that another sequence has computed, or that a prefix has."""

    only_whole = True

    def save_checkpoint(self, seq_id: int) -> SavedState:
        return self._memory.save_sequence(seq_id)


SHARING: dict[Sharing, type[PrefixSharing]] = {
    "cells": CellSharing,
    "copy": CopySharing,
    "checkpoints": CheckpointSharing,
    "whole": WholeSharing,
    "none": NoSharing,
}
