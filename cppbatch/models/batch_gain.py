"""What a model gains by batches on this CPU, by its types of weights; and which types would gain more."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cppbatch.errors import ModelError
from cppbatch.models.file_header import read_header
from cppbatch.models.find import model_parts
from cppbatch.models.inspect import inspect_model
from cppbatch.models.kernels import KernelTimes, has_gpu, kernel_times
from cppbatch.models.requantize import Matrix, copy_with, plan_auto, read_matrices

_FEW_ROWS = 4  # the fewest rows that are timed beside one
_NEARLY_EXACT = ("Q8_0", "BF16", "F16")  # that `requantize` writes of any model


class KernelReport(msgspec.Struct, frozen=True):
    """The kernels of a model's types of weights."""

    on_gpu: bool
    """Whether a GPU (or Metal) computes the model: these kernels are not used then."""
    types: dict[str, KernelTimes]
    """Times of the model's types that can be timed, most frequent first."""
    advice: str | None
    """One sentence, if another type would be clearly faster in batches."""

    def as_json(self) -> dict[str, Any]:
        """The report, derived from the times."""
        types = {
            name: {"ms": each.ms, "batch_gain": round(each.batch_gain, 2), "is_batched": each.is_batched}
            for name, each in self.types.items()
        }
        return {"on_gpu": self.on_gpu, "types": types, "advice": self.advice}

    def __str__(self) -> str:
        if self.on_gpu:
            return "not used: the model runs on the GPU"
        if not self.types:
            return "not timed"
        found = (f"{name} {'batched' if each.is_batched else 'row by row'}" for name, each in self.types.items())
        return f"{', '.join(found)}. {self.advice or 'Other types would not be faster'}"


def kernel_report(path: Path, *, n_gpu_layers: int = -1) -> KernelReport:
    """The kernels of the model's types on this machine. Types that were never timed here are timed now, in about 5 s.

    `n_gpu_layers`: of the engine. There is no advice for what `requantize` refuses, such as a split model, whose types
    are those of all its parts. Raises `ModelError` if the file cannot be read.
    """
    tensors = [tensor for part in model_parts(path) for tensor in read_header(part).tensors]
    kinds = Counter(tensor.kind for tensor in tensors if len(tensor.shape) > 1)
    try:
        matrices, plan = read_matrices(path), plan_auto(path, kernel_times)
    except ModelError:
        matrices, plan = [], None
    times = kernel_times([*kinds, *(new for _, new in plan.changes.values())] if plan else kinds)
    on_gpu = n_gpu_layers != 0 and has_gpu()
    return KernelReport(
        on_gpu,
        {kind: times[kind] for kind, _ in kinds.most_common() if kind in times},
        batch_advice(path, matrices, plan.changes, times) if plan and not on_gpu else None,
    )


def earlier_gain(path: Path, *, n_gpu_layers: int = -1) -> str | None:
    """One sentence with the type of weights that gains from fewer sequences on this CPU than most of the file's do.

    None if there is none, on a GPU, and if the types cannot be timed. Raises `ModelError` if the file cannot be read.
    """
    kind = inspect_model(path).main_type
    times = kernel_times([kind, *_NEARLY_EXACT])
    if kind not in times or (n_gpu_layers != 0 and has_gpu()):
        return None
    cost = {name: each.ms[_FEW_ROWS] / each.ms[1] for name, each in times.items()}
    best = min(cost, key=lambda name: cost[name])
    if cost[best] * 1.2 > cost[kind]:  # times of single kernels vary by a tenth
        return None
    return (
        f"{best} weights batch better: {_FEW_ROWS} rows of a matrix take {cost[best]:.1f} times as long as one, "
        f"compared with {cost[kind]:.1f} times for this file's {kind}; a single row takes "
        f"{times[best].ms[1] / times[kind].ms[1]:.1f} times as long (`cppbatch models requantize "
        f"{shlex.quote(str(path))} --type {best}`)."
    )


def batch_advice(
    path: Path, matrices: Sequence[Matrix], changes: Mapping[str, tuple[str, str]], times: Mapping[str, KernelTimes]
) -> str | None:
    """One sentence with the remedy (a copy that exists, or the command) and its gain; None if `changes` gain little.

    `changes`: {matrix: (its type, its new type)}; `times`: of these types.
    """
    if not changes:
        return None
    gain = _load_ms(matrices, {}, times) / _load_ms(matrices, changes, times)
    if gain < 1.1:  # not worth a larger file
        return None
    total = sum(matrix.is_multiplied for matrix in matrices)
    old, new = ([kind for kind, _ in Counter(kinds).most_common()] for kinds in zip(*changes.values(), strict=True))
    which = f"all {total} matrices are" if total == len(changes) > 1 else f"{len(changes)} of {total} matrices are"
    is_batched = any(times[kind].is_batched for kind in old)
    slower = f"which this CPU computes slower than {' and '.join(new)}"
    why = slower if is_batched else "which this CPU computes row by row"
    copy = copy_with(path, changes)
    remedy = f"`cppbatch models requantize {shlex.quote(str(path))}`"
    if copy.is_file():
        remedy = f"its copy (-m {shlex.quote(str(copy))})"
    return (
        f"{which} {' and '.join(old)}, {why}; {remedy} makes matrix products of 16 sequences, and of their prompts, "
        f"about {gain:.1f}x faster"
    )


def _load_ms(
    matrices: Sequence[Matrix], changes: Mapping[str, tuple[str, str]], times: Mapping[str, KernelTimes]
) -> float:
    """`KernelTimes.batch_ms` of all matrices.

    An embedding that is only looked up takes none. Experts count as computed row by row: few rows of a batch share
    one. So does a type without times, which counts as slow as the slowest: the gain is not overstated.
    """
    slowest = max(each.ms[1] for each in times.values())
    ms = 0.0
    for matrix in matrices:
        kind = changes[matrix.name][1] if matrix.name in changes else matrix.kind
        one_by_one = 2 * (times[kind].ms[1] if kind in times else slowest)  # a prompt token and a generated one
        of_load = times[kind].batch_ms if kind in times and matrix.is_multiplied else one_by_one
        ms += matrix.n_elements * matrix.used * of_load
    return ms


LEAST_GAIN = 1.2
"""Times the tokens/s of one sequence. Two measurements of one setting on a busy machine differ by nearly as much."""


def gain_notes(speeds: Mapping[int, float], model_path: str, *, n_gpu_layers: int = -1) -> list[str]:
    """Sentences for a report. `speeds`: {sequences: tokens/s of all of them together}; none without those of 1."""
    alone, sizes = speeds.get(1), sorted(speeds)
    if not alone or sizes == [1]:
        return []
    factors = ", ".join(f"{speeds[n] / alone:.2f} at B = {n}" for n in sizes[1:])
    first = gains_from(speeds)
    begins = (
        f"batching is faster here from B = {first} on"
        if first
        else (f"no batch size reaches a gain of {LEAST_GAIN} here")
    )
    notes = [f"{begins} (times the tokens/s of one sequence: {factors})."]
    try:
        earlier = earlier_gain(Path(model_path), n_gpu_layers=n_gpu_layers)
    except ModelError:  # the file is gone since: what took minutes to measure is worth more than the advice
        earlier = None
    return [*notes, earlier] if earlier else notes


def gains_from(speeds: Mapping[int, float]) -> int | None:
    """The fewest sequences from which on all numbers that were measured are `LEAST_GAIN` times as fast as one."""
    first = None
    for n in sorted(speeds, reverse=True):
        if n == 1 or speeds[n] < LEAST_GAIN * speeds[1]:
            break
        first = n
    return first
