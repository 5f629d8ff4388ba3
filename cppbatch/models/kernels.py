"""Determines by timing which weight types have a batched kernel on this CPU; results are cached.

llama.cpp computes some types row by row: a batch of 16 takes 16 times as long as one row. Which types these are differs
between its releases and CPUs, so a child process times tiny models. Its results are cached for each library build and
CPU.
"""

from __future__ import annotations

import itertools
import logging
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from cppbatch import child_processes
from cppbatch.findings import build_key, finding_path, library_folder, read_finding, write_finding
from cppbatch.models.file_header import WEIGHT_TYPES, read_header
from cppbatch.models.find import model_parts

log = logging.getLogger("cppbatch.kernels")

ROWS = (1, 4, 16, 256)
"""The batch sizes that are timed."""

_BATCH_ROWS = 16
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
        return min(self.load_ms(_BATCH_ROWS), self.load_ms(_BATCH_ROWS, plain=True))

    @property
    def batch_gain(self) -> float:
        """How many times faster a row is computed in a batch of 16 than alone."""
        return _BATCH_ROWS * self.ms[1] / self.ms[_BATCH_ROWS]

    @property
    def is_batched(self) -> bool:
        """Whether a batch of 16 takes clearly less time than 16 rows one by one."""
        return self.batch_gain >= _BATCHED_GAIN


class DeviceTimes(msgspec.Struct, frozen=True):
    """The times of a device with all of its threads, and of reaching it."""

    ms: dict[str, dict[int, float]]
    """{type: {rows: milliseconds of a product with a million weights}}."""
    round_trip_ms: float
    """Sending a vector, a small product, and reading the result."""
    copy_ms: float
    """Sending a million bytes of the host's memory."""

    def product_ms(self, kind: str, rows: float) -> float:
        """The milliseconds of a product of a million weights with `rows` vectors. A type that was not timed takes the
        time of the first one; rows beyond the timed ones cost what the last ones do."""
        points = self.ms.get(kind) or next(iter(self.ms.values()))
        return interpolate(rows, points) * max(1.0, rows / max(points))


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
    return child_processes.child_command("cppbatch.llama.kernels_child", *types)


def _measure(types: list[str], path: Path) -> Measured | None:
    """Measures in a child process and adds the result to the cache. None if the child fails."""
    try:
        done = child_processes.run(child_command(types), seconds=_TIMEOUT_S)
        done.check_returncode()
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


# Whether repacked weights are faster for an engine, according to this CPU's kernel times.
#
# llama.cpp repacks some types of weights, so that its kernels read several rows of a matrix at once. That helps a
# single sequence, but for some types the kernels for weights as they are in the file compute batches faster.


_MIN_NAMED_GAIN = 1.05
_FLOATS = ("F32", "F16", "BF16")
_LOOKUP = "token_embd.weight"


def why_not_repacked(path: Path, n_parallel: int) -> str | None:
    """One sentence if this CPU computes `n_parallel` sequences clearly faster with weights that are not repacked.

    Compares the time of the matrix products of a load with as many prompt tokens as generated ones, if all sequences
    run. Types that were never timed here are timed now, in seconds. Raises `ModelError` if the file cannot be
    read.
    """
    if n_parallel <= 4:
        return None
    weights = _quantised_weights(path)
    times = kernel_times(weights)
    if not any(each.plain_ms for each in times.values()):
        return None
    gain = _load_ms(weights, times, n_parallel) / _load_ms(weights, times, n_parallel, plain=True)
    if gain < _MIN_NAMED_GAIN:
        return None
    kinds = " and ".join(kind for kind in weights if kind in times and times[kind].plain_ms)
    one = _rows_ms(weights, times, 1, plain=True) / _rows_ms(weights, times, 1)
    alone = f"; with `--repack on`, one sequence alone is about {one:.1f}x faster" if one >= _MIN_NAMED_GAIN else ""
    return (
        f"weights are not repacked: matrix products of {n_parallel} sequences and their prompts are about {gain:.1f}x "
        f"faster with {kinds} as in the file{alone}"
    )


def _quantised_weights(path: Path) -> dict[str, int]:
    """{type: number of weights} of all matrices that every row is multiplied by, largest first.

    Experts are left out: few rows of a batch share one.
    """
    return {kind: n for kind, n in _weights(path).items() if kind not in _FLOATS}


def _weights(path: Path) -> dict[str, int]:
    """{type: number of weights} of all matrices that every row is multiplied by, including floats."""
    tensors = [tensor for part in model_parts(path) for tensor in read_header(part).tensors]
    is_looked_up = any(tensor.name == "output.weight" for tensor in tensors)
    weights: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) == 2 and not (is_looked_up and tensor.name == _LOOKUP):
            weights[tensor.kind] += tensor.n_elements
    return dict(weights.most_common())


def weights_s(path: Path, n_parallel: int) -> tuple[float, float] | None:
    """Seconds of one thread for all weights: for a row in a batch of `n_parallel`, and for a token of a prompt.

    None if a type cannot be timed, and with experts, which are not timed. Types that were never timed here are timed
    now. Raises `ModelError` if the file cannot be read.
    """
    weights = _weights(path)
    times = kernel_times(weights)
    has_experts = any(len(t.shape) == 3 for part in model_parts(path) for t in read_header(part).tensors)
    if has_experts or weights.keys() - times.keys():
        return None
    decode_ms, prompt_ms = (_rows_ms(weights, times, n) / n for n in (n_parallel, max(ROWS)))
    return decode_ms / 1e9, prompt_ms / 1e9  # ms are for a million weights


def _load_ms(
    weights: Mapping[str, int], times: Mapping[str, KernelTimes], n_parallel: int, *, plain: bool = False
) -> float:
    """`KernelTimes.load_ms` of all weights. A type that is not timed takes the same time in both ways."""
    return sum(n * times[kind].load_ms(n_parallel, plain=plain) for kind, n in weights.items() if kind in times)


def _rows_ms(weights: Mapping[str, int], times: Mapping[str, KernelTimes], rows: int, *, plain: bool = False) -> float:
    return sum(n * times[kind].rows_ms(rows, plain=plain) for kind, n in weights.items() if kind in times)
