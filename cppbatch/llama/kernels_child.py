"""The child process that times the kernels of weight types: decodes with a tiny model of each type. It may crash.

Two models of a type differ only in the width of their feed-forward matrices, so the difference of their times is the
time of these matrices. They fit into the CPU's cache: what is timed is the computation, not the memory. Other programs
only make a decode slower, so of many decodes, taken in turns, the fastest counts; and one thread computes, because two
would wait for each other whenever one of them is interrupted.
"""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np

from cppbatch.llama import Backend, Batch, Context, Model
from cppbatch.llama.encode import encode
from cppbatch.llama.selfcheck import safe_use_extra_bufts
from cppbatch.models.kernels import ROWS, Measured
from cppbatch.models.synthetic import LlamaShape, write_llama

_N_EMBD, _WIDE, _NARROW = 512, 4096, 256  # multiples of 256, as repacked and AMX kernels need them
_MILLION_WEIGHTS = 3 * _N_EMBD * (_WIDE - _NARROW) / 1e6
_MAX_RANDOM = 1 << 14  # values of each matrix: some types take a second to convert a million
_REPEATS = {1: 3, 4: 2, 16: 1, 256: 1}  # in each round
_ROUNDS = 12
_SLOW_ROUNDS = 2  # with the most rows


def main() -> None:
    """`kernels_child TYPE...`: prints `Measured` as JSON, in the last line."""
    has_gpu = any("GPU" in device.kind for device in Backend.get().devices())
    measured = Measured(ms=measure(sys.argv[1:]), has_gpu=has_gpu)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(measured))


def measure(kinds: Sequence[str]) -> dict[str, dict[int, float]]:
    """The milliseconds of a decode for a million weights of each type: {type: {rows: ms}}."""
    with tempfile.TemporaryDirectory(prefix="cppbatch-kernels-") as folder, contextlib.ExitStack() as stack:
        pairs = {
            kind: [stack.enter_context(_context(Path(folder), kind, n_ff)) for n_ff in (_WIDE, _NARROW)]
            for kind in kinds
        }
        best = _fastest(pairs)
    return {
        kind: {rows: (wide - narrow) * 1e3 / _MILLION_WEIGHTS for rows, (wide, narrow) in times.items()}
        for kind, times in best.items()
        if all(wide > narrow for wide, narrow in times.values())
    }


def _fastest(pairs: dict[str, list[Context]]) -> dict[str, dict[int, list[float]]]:
    """The seconds of the fastest decode: {type: {rows: one for each context}}."""
    best = {kind: {rows: [math.inf] * len(pair) for rows in ROWS} for kind, pair in pairs.items()}
    for turn in range(_ROUNDS):
        for kind, pair in pairs.items():
            for rows in ROWS if turn < _SLOW_ROUNDS else ROWS[:-1]:
                for _ in range(_REPEATS[rows]):
                    for i, context in enumerate(pair):
                        best[kind][rows][i] = min(best[kind][rows][i], _seconds(context, rows))
    return best


@contextlib.contextmanager
def _context(folder: Path, kind: str, n_ff: int) -> Iterator[Context]:
    shape = LlamaShape(n_layer=1, n_embd=_N_EMBD, n_head=4, n_head_kv=1, n_ff=n_ff)
    path = write_llama(folder / f"{kind}-{n_ff}.gguf", shape, quant=kind, encode=encode, max_random=_MAX_RANDOM)
    size = max(ROWS)
    with (
        Model(path, n_gpu_layers=0, use_extra_bufts=safe_use_extra_bufts()) as model,
        Context(model, n_ctx=size, n_batch=size, n_ubatch=size, n_threads=1) as context,
    ):
        yield context


def _seconds(context: Context, rows: int) -> float:
    batch = Batch(rows)
    batch.add_run(np.zeros(rows, np.int32), 0, 0, n_logits=rows)  # without logits the last layer would leave rows out
    context.clear()
    start = perf_counter()
    context.decode(batch)
    return perf_counter() - start


if __name__ == "__main__":
    main()
