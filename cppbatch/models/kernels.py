"""Which types of weights have a batched kernel on this CPU: found out by timing, and cached.

llama.cpp computes some types row by row: a batch of 16 takes 16 times as long as one row. Which types these are differs
between its releases and CPUs, so a child process times tiny models. Its results are cached for each library build and
CPU.
"""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from cppbatch.findings import build_key, finding_path, library_folder, read_finding, write_finding
from cppbatch.models.file_header import WEIGHT_TYPES

log = logging.getLogger("cppbatch.kernels")

ROWS = (1, 4, 16, 256)
"""The batch sizes that are timed."""

_BATCH = 16
_BATCHED_GAIN = 1.3  # types without a batched kernel measure 1.0 to 1.1, those with one 1.6 to 7 (docs/decisions/0028)
_TIMEOUT_S = 60
_CLOCK = "cpu-time"  # of the times in a file: those of older releases were wall time, longer on a busy machine
_UNTIMED = {
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M"),  # ggml makes tables for seconds before it can convert to them
    *("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"),  # no weights: ggml would abort
}


class KernelTimes(msgspec.Struct, frozen=True):
    """The times of a type's kernels."""

    ms: dict[int, float]
    """{rows: milliseconds of one thread for a million weights}, for each number of rows in `ROWS`."""
    plain_ms: dict[int, float] | None = None
    """The same with weights as they are in the file; None: llama.cpp does not repack this type for this CPU."""

    def rows_ms(self, rows: int, *, plain: bool = False) -> float:
        """The milliseconds of a batch of `rows`, interpolated between the numbers of rows that are timed.

        `plain`: with weights that are not repacked.
        """
        return interpolate(rows, (plain and self.plain_ms) or self.ms)

    def load_ms(self, n_parallel: int, *, plain: bool = False) -> float:
        """The milliseconds of a prompt token and a generated one, in a load with as many of either.

        The generated token is one row of a batch of `n_parallel` (all sequences run), the prompt token one of 256.
        """
        return sum(self.rows_ms(rows, plain=plain) / rows for rows in (n_parallel, max(ROWS)))

    @property
    def batch_ms(self) -> float:
        """`load_ms` of 16 sequences, repacked or not: the engine keeps weights in the faster way. Types of weights are
        compared by this."""
        return min(self.load_ms(_BATCH), self.load_ms(_BATCH, plain=True))

    @property
    def batch_gain(self) -> float:
        """How many times faster a row is computed in a batch of 16 than alone."""
        return _BATCH * self.ms[1] / self.ms[_BATCH]

    @property
    def is_batched(self) -> bool:
        """Whether a batch of 16 takes clearly less time than 16 rows one by one."""
        return self.batch_gain >= _BATCHED_GAIN


class Measured(msgspec.Struct, frozen=True):
    """What the child process prints."""

    ms: dict[str, dict[int, float]]
    plain_ms: dict[str, dict[int, float]]
    """Not repacked, of the types that llama.cpp repacks."""
    has_gpu: bool
    """Whether llama.cpp sees a GPU (on a Mac: Metal)."""


def kernel_times(types: Iterable[str]) -> dict[str, KernelTimes]:
    """The times of these types (ggml's names: "Q4_K"), measured unless they are cached: about a second for each,
    twice that where llama.cpp repacks it.

    Types that cannot be measured are left out; all of them, if llama-cpp-python is missing or crashes.
    """
    wanted = [kind for kind in dict.fromkeys(types) if kind in WEIGHT_TYPES.keys() - _UNTIMED]
    path = times_path()
    if path is None:
        return {}
    known = _read(path)
    if missing := [kind for kind in wanted if kind not in known.ms]:
        known = _measure(missing, path) or known
    return {kind: KernelTimes(known.ms[kind], known.plain_ms.get(kind)) for kind in wanted if kind in known.ms}


def has_gpu() -> bool:
    """Whether llama.cpp saw a GPU (on a Mac: Metal) when `kernel_times` measured; False if it never has."""
    path = times_path()
    return path is not None and _read(path).has_gpu


def times_path() -> Path | None:
    """The file of the times; None: llama.cpp's library is not found."""
    folder = library_folder()
    return folder and finding_path("kernels", f"{build_key(folder)}-{_CLOCK}")


def _read(path: Path) -> Measured:
    return read_finding(path, Measured) or Measured({}, {}, has_gpu=False)


def child_command(types: list[str]) -> list[str]:
    """The command of the child process."""
    return [sys.executable, "-m", "cppbatch.llama.kernels_child", *types]


def _measure(types: list[str], path: Path) -> Measured | None:
    """Measures in a child process and adds the result to the cache. None if the child fails."""
    try:
        done = subprocess.run(child_command(types), capture_output=True, timeout=_TIMEOUT_S, check=True)
        measured = msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=Measured)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        log.info("the kernels of %s cannot be timed: %s", ", ".join(types), error)
        return None
    known = _read(path)
    merged = Measured({**known.ms, **measured.ms}, {**known.plain_ms, **measured.plain_ms}, measured.has_gpu)
    write_finding(path, merged)
    return merged


def interpolate(at: float, points: Mapping[int, float]) -> float:
    """The value at a place between known points, linear between two of them; the first or last one's outside."""
    places = sorted(points)
    if at <= places[0] or len(places) == 1:
        return points[places[0]]
    low, high = next(((a, b) for a, b in itertools.pairwise(places) if at <= b), (places[-2], places[-1]))
    return points[low] + (points[high] - points[low]) * min(1.0, (at - low) / (high - low))
