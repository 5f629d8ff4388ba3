"""What a step takes on a device, as measured curves: the only part of a simulated replica that is not real code."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from cppbatch.engine.sequence import SeqStatus
from cppbatch.engine.step_plan import StepPlan

Curve = list[tuple[int, float]]
"""Numbers of tokens, rising, with milliseconds."""


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured times of one model on one device, in the per-sequence layout."""

    name: str
    source: str
    """Where the figures come from."""
    rows_ms: Curve
    """A step of this number of decode rows, computed together, of short sequences."""
    prompt_ms: Curve
    """A ubatch of this number of tokens of a new prompt."""
    row_cell_us: float
    """Microseconds for each cell that a decode row passes over."""
    prompt_cell_us: float
    """The same for a token of a prompt, for the cells before its ubatch."""
    step_ms: float
    """What a step takes beside llama.cpp: schedule, fill, sample, advance."""
    save_us: float
    """Microseconds a token to save a sequence's state to host memory. Restoring takes 60% of that."""
    copy_us: float
    """Microseconds a token to copy a prefix from stream to stream."""
    cell_bytes: int
    """Keys and values of one token."""
    start_s: float
    """From the start of a replica to its first request."""
    on_gpu: bool
    n_parallel: int
    stream_cells: int
    """The most tokens of a sequence."""
    n_batch: int = 2048
    n_ubatch: int = 512

    def seconds(self, plan: StepPlan) -> float:
        """Of a step. Decode rows and prompt tokens take their times one after the other (docs/decisions/0002)."""
        milliseconds = self.step_ms + sum(at(self.rows_ms, n) for n in plan.row_groups)
        row_cells, prompt_cells, pieces = 0, 0, []
        for sequence, n in plan.scheduled:
            if sequence.status is SeqStatus.DECODE:
                row_cells += sequence.n_computed
            else:
                prompt_cells += self.cells_before_ubatches(n, sequence.n_computed)
                pieces.append(n)
        milliseconds += self.prompts_ms(pieces)
        return milliseconds / 1e3 + (row_cells * self.row_cell_us + prompt_cells * self.prompt_cell_us) / 1e6

    def cells_before_ubatches(self, n: int, n_before: int) -> int:
        """For each of `n` prompt tokens the cells before its ubatch, summed; `n_before` of them before the first."""
        whole, rest = divmod(n, self.n_ubatch)
        return n * n_before + self.n_ubatch**2 * whole * (whole - 1) // 2 + rest * whole * self.n_ubatch

    def prompts_ms(self, pieces: Sequence[int]) -> float:
        """Of pieces of prompts. On a CPU each has its own ubatches; on a GPU they fill ubatches together, as pieces of
        one length do (`in_batch_order`)."""
        together: Iterable[int] = [sum(pieces)] if self.on_gpu else pieces
        milliseconds = 0.0
        for n in together:
            whole, rest = divmod(n, self.n_ubatch)
            milliseconds += whole * at(self.prompt_ms, self.n_ubatch) + (at(self.prompt_ms, rest) if rest else 0.0)
        return milliseconds


def at(curve: Curve, n: int) -> float:
    """Milliseconds for `n` tokens: on the line through the two nearest points, the last two beyond the end."""
    i = min(bisect_left(curve, (n, 0.0)), len(curve) - 1)
    if i == 0 or curve[i][0] == n:
        return curve[i][1]
    (low, low_ms), (high, high_ms) = curve[i - 1], curve[i]
    return low_ms + (n - low) / (high - low) * (high_ms - low_ms)


def load_step_times(path: Path) -> StepTimes:
    """Reads a JSON file. Raises `msgspec.ValidationError` naming the field at fault."""
    return msgspec.json.decode(path.read_bytes(), type=StepTimes)
