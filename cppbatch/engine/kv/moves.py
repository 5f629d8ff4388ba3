"""The queue of moves of keys and values in llama.cpp's memory, and the moves of preempted sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from cppbatch.engine.cells import Cells
from cppbatch.engine.kv.cached_prefix import Source
from cppbatch.engine.kv.memory import OUT_OF_MEMORY, Memory
from cppbatch.engine.kv.save_cost import SaveCost
from cppbatch.engine.sequence import SavedState, Seq
from cppbatch.errors import LlamaError

log = logging.getLogger("cppbatch.engine")


class MoveQueue:
    """Moves are planned first (`add`), then executed in that order (`apply`).

    If memory runs out in a move for a sequence, the sequence is recomputed. `save_cost`: learns from saves.
    `swap_bytes`: host memory for preempted sequences. `on_gpu`: streams are copied on the device. `uncount`: called for
    a sequence that cannot get its prefix. `keep_part`: called with the part that a sequence got from another one.
    """

    def __init__(
        self,
        memory: Memory,
        cells: Cells,
        save_cost: SaveCost,
        clock: Callable[[], float],
        *,
        swap_bytes: int,
        on_gpu: bool,
        uncount: Callable[[Seq], None],
        keep_part: Callable[[Seq, SavedState], None] | None,
    ) -> None:
        self._memory, self._cells = memory, cells
        self._save_cost, self._clock = save_cost, clock
        self.swap_bytes, self.on_gpu = swap_bytes, on_gpu
        self._uncount, self.keep_part = uncount, keep_part
        self.n_swaps = self.n_recomputes = 0
        """Preempted sequences so far: saved to host memory, and recomputed instead."""
        self.reset()

    def reset(self) -> None:
        """Forgets planned moves and swapped sequences."""
        self.swapped_bytes = 0
        """Host memory of the currently swapped sequences, in bytes."""
        self._moves: list[Callable[[], object]] = []
        self._moving: list[Seq] = []
        self.copied: dict[Source, SavedState] = {}
        """The states and parts that were saved to copy them, within one `apply`."""

    @property
    def is_empty(self) -> bool:
        """Whether all planned moves were executed."""
        return not self._moves

    def add(self, move: Callable[..., object], *args: object, **options: object) -> None:
        """Plans a move."""
        self._moves.append(partial(move, *args, **options))

    def add_reuse(self, sequence: Seq, move: Callable[..., object], *args: object) -> None:
        """Plans a move that gives a sequence the prefix of another one."""
        self._add_for(sequence, self._reuse_failed, move, *args)

    def _add_for(
        self, sequence: Seq, failed: Callable[[Seq, Exception], None], move: Callable[..., object], *args: object
    ) -> None:
        """Plans a move in which memory may run out. The sequence does not compute before it is executed."""

        def try_move() -> None:
            try:
                move(*args)
            except OUT_OF_MEMORY as error:
                failed(sequence, error)

        sequence.moving = True
        self._moving.append(sequence)
        self._moves.append(try_move)

    def apply(self) -> None:
        """Executes the planned moves."""
        for move in self._moves:
            move()
        self._moves.clear()
        for sequence in self._moving:
            sequence.moving = False
        self._moving.clear()
        self.copied.clear()

    def _reuse_failed(self, sequence: Seq, error: Exception) -> None:
        self._uncount(sequence)
        self._recompute(sequence, error)

    def recompute(self, sequence: Seq, error: Exception) -> None:
        """Empties a sequence whose memory is lost, and counts it: its tokens are computed again."""
        self.n_recomputes += 1
        self._recompute(sequence, error)

    def _recompute(self, sequence: Seq, error: Exception) -> None:
        log.warning("recomputing %s from its first token: %s", sequence.id, error)
        self._memory.remove(sequence.seq_id)
        self._cells.free(sequence.cells)
        sequence.cells = None
        sequence.will_recompute()

    def save(self, seq_id: int, n: int) -> SavedState | None:
        """The state of a seq_id that holds `n` tokens; None if memory runs out."""
        try:
            return self._save(seq_id, n)
        except OUT_OF_MEMORY as error:
            log.warning("cannot save the state of seq_id %d: %s", seq_id, error)
            return None

    def _save(self, seq_id: int, n: int) -> SavedState:
        began = self._clock()
        saved = self._memory.save_sequence(seq_id)
        self._save_cost.observe(n, self._clock() - began)
        return saved

    # --- preempted and moved sequences --------------------------------------------------------------------------

    def swap_out(self, sequence: Seq, seq_id: int, *, save: bool) -> None:
        """The move that empties the seq_id of a preempted sequence. `save`: to host memory, if there is room."""
        free_bytes = self.swap_bytes - self.swapped_bytes
        saved = self.save(seq_id, sequence.n_computed) if save and free_bytes > 0 else None
        self._memory.remove(seq_id)
        if saved and saved.n_bytes <= free_bytes:
            sequence.saved = saved
            self.swapped_bytes += saved.n_bytes
            self.n_swaps += 1
        else:
            sequence.will_recompute()
            self.n_recomputes += 1

    def add_swap_in(self, sequence: Seq, source: Source | None, n: int) -> None:
        """Plans to restore a swapped sequence, which then shares its first `n` cells with the source."""
        source_id = source.seq_id if source else -1
        self._add_for(sequence, self.recompute, self._swap_in, sequence, source, source_id, n)
        self.add(self.drop_saved, sequence)

    def _swap_in(self, sequence: Seq, source: Source | None, source_id: int, n: int) -> None:
        self._memory.restore_sequence(sequence.seq_id, sequence.saved)
        if source and source.n_computed < n:
            raise LlamaError("the sequence whose prefix it shares could not be restored")
        if source:
            self._memory.share_prefix(source_id, sequence.seq_id, sequence.span(n))

    def drop_saved(self, sequence: Seq) -> None:
        """Frees the host memory of a swapped sequence."""
        if sequence.saved:
            self.swapped_bytes -= sequence.saved.n_bytes
            sequence.saved = None

    def add_relocation(self, seq_id: int, sequence: Seq) -> None:
        """Plans to move a sequence's memory from `seq_id` to its current seq_id."""
        if self.on_gpu:
            self.add(self._memory.copy, seq_id, sequence.seq_id)
        else:
            self._add_for(sequence, self._recompute, self._relocate, seq_id, sequence)
        self.add(self._memory.remove, seq_id)

    def _relocate(self, seq_id: int, sequence: Seq) -> None:
        self._memory.restore_sequence(sequence.seq_id, self._save(seq_id, sequence.n_computed))
