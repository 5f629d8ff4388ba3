"""Whether repacked weights are the faster ones for an engine, by the timed kernels of this CPU.

llama.cpp repacks some types of weights, so that its kernels read several rows of a matrix at once. That helps a single
sequence, but for some types the kernels for weights as they are in the file compute batches faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from cppbatch.models.file_header import read_header
from cppbatch.models.find import model_parts
from cppbatch.models.kernels import ROWS, KernelTimes, kernel_times

_FEW = 4
"""Up to this number of sequences, weights are repacked: the speed of each sequence counts."""
_CLEARLY = 1.05
_FLOATS = ("F32", "F16", "BF16")
_LOOKUP = "token_embd.weight"


def why_not_repacked(path: Path, n_parallel: int) -> str | None:
    """One sentence if this CPU computes `n_parallel` sequences clearly faster with weights that are not repacked.

    Compares the time of the matrix products of a load with as many prompt tokens as generated ones, if all sequences
    run. Types that were never timed here are timed now, in seconds. Raises `ModelError` if the file cannot be
    read.
    """
    if n_parallel <= _FEW:
        return None
    weights = _quantised_weights(path)
    times = kernel_times(weights)
    if not any(each.plain_ms for each in times.values()):
        return None
    gain = _load_ms(weights, times, n_parallel) / _load_ms(weights, times, n_parallel, plain=True)
    if gain < _CLEARLY:
        return None
    kinds = " and ".join(kind for kind in weights if kind in times and times[kind].plain_ms)
    one = _rows_ms(weights, times, 1, plain=True) / _rows_ms(weights, times, 1)
    alone = f"; with `--repack on`, one sequence alone is about {one:.1f}x faster" if one >= _CLEARLY else ""
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
    """As `_quantised_weights`, with floats."""
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
