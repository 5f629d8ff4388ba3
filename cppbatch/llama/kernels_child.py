"""The child process that times the kernels of weight types: decodes with a tiny model of each type. It may crash.

Two models of a type differ only in the width of their feed-forward matrices, so the difference of their times is the
time of these matrices. They fit into the CPU's cache, so the measurement covers computation, not memory access. To
exclude the influence of other programs, it uses CPU time, the fastest of many decodes taken alternately, and a single
thread: two would wait for each other whenever one of them is interrupted. A type that llama.cpp repacks is timed with
and without repacking.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter, process_time

import gguf
import msgspec
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES

from cppbatch.llama import Backend, Batch, Context, Model
from cppbatch.llama.library import ggml
from cppbatch.llama.selfcheck import repacking_works
from cppbatch.models.kernels import ROWS, Measured
from cppbatch.models.synthetic import LlamaShape, write_llama

_N_EMBD, _WIDE, _NARROW = 512, 4096, 256  # multiples of 256, as required by repacked and AMX kernels
_MILLION_WEIGHTS = 3 * _N_EMBD * (_WIDE - _NARROW) / 1e6
_REPEATS = {1: 3, 4: 2, 16: 4, 256: 1}  # per round
_WEIGHTS = re.compile(r"(\S+) model buffer size")  # in llama.cpp's log
_NOT_REPACKED = {"CPU", "CPU_Mapped"}
_clock = perf_counter if sys.platform == "win32" else process_time  # on Windows, CPU time has a resolution of 16 ms

_Key = tuple[str, bool]
"""A type, and whether llama.cpp may repack it."""


def main() -> None:
    """`kernels_child TYPE...`: prints `Measured` as JSON on the last line."""
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(measure(sys.argv[1:])))


def measure(kinds: Sequence[str]) -> Measured:
    """The milliseconds per decode and million weights, for each type."""
    with tempfile.TemporaryDirectory(prefix="cppbatch-kernels-") as folder, contextlib.ExitStack() as stack:
        pairs: dict[_Key, list[Context]] = {}
        for kind in kinds:
            files = [_write(Path(folder), kind, n_ff) for n_ff in (_WIDE, _NARROW)]
            opened = [stack.enter_context(_open(file, repack=repacking_works())) for file in files]
            pairs[kind, True] = [context for context, _ in opened]
            if any(is_repacked for _, is_repacked in opened):
                pairs[kind, False] = [stack.enter_context(_open(file, repack=False))[0] for file in files]
        best = _fastest(pairs)
    ms = {
        key: {rows: (wide - narrow) * 1e3 / _MILLION_WEIGHTS for rows, (wide, narrow) in times.items()}
        for key, times in best.items()
        if all(wide > narrow for wide, narrow in times.values())
    }
    return Measured(
        ms={kind: each for (kind, may_repack), each in ms.items() if may_repack},
        plain_ms={kind: each for (kind, may_repack), each in ms.items() if not may_repack},
        has_gpu=any("GPU" in device.kind for device in Backend.get().devices()),
    )


def _fastest(pairs: dict[_Key, list[Context]]) -> dict[_Key, dict[int, list[float]]]:
    """The seconds of the fastest decode: {key: {rows: a time for each context}}."""
    best = {key: {rows: [math.inf] * len(pair) for rows in ROWS} for key, pair in pairs.items()}
    for turn in range(12):
        for key, pair in pairs.items():
            for rows in ROWS if turn < 4 else ROWS[:-1]:
                for _ in range(_REPEATS[rows]):
                    for i, context in enumerate(pair):
                        best[key][rows][i] = min(best[key][rows][i], _seconds(context, rows))
    return best


def _write(folder: Path, kind: str, n_ff: int) -> Path:
    shape = LlamaShape(n_layer=1, n_embd=_N_EMBD, n_head=4, n_head_kv=1, n_ff=n_ff)
    # some types take a second to convert a million random values
    return write_llama(folder / f"{kind}-{n_ff}.gguf", shape, quant=kind, encode=encode, max_random=1 << 14)


@contextlib.contextmanager
def _open(path: Path, *, repack: bool) -> Iterator[tuple[Context, bool]]:
    """A context, and whether llama.cpp has repacked weights of the model."""
    size = max(ROWS)
    with contextlib.ExitStack() as stack:
        with Backend.get().lines() as lines:
            model = stack.enter_context(Model(path, n_gpu_layers=0, repack=repack))
        buffers = {found[1] for line in lines if (found := _WEIGHTS.search(line))}
        context = stack.enter_context(Context(model, n_ctx=size, n_batch=size, n_ubatch=size, n_threads=1))
        yield context, bool(buffers - _NOT_REPACKED)


def _seconds(context: Context, rows: int) -> float:
    batch = Batch(rows)
    batch.add_run(np.zeros(rows, np.int32), 0, 0, n_logits=rows)  # the last layer skips rows without logits
    context.clear()
    start = _clock()
    context.decode(batch)
    return _clock() - start


# ggml's own conversion of floats to its weight types: it supports all of them, many more than the gguf package.


def encode(rows: npt.NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    """Converts rows, float32[n, columns], to blocks of `kind`, uint8[n, bytes of a row].

    `columns` must be a multiple of the type's block size. `kind` must be a weight type that does not need an importance
    matrix: for others, ggml aborts the process.
    """
    lib = ggml()
    convert = lib.ggml_quantize_chunk
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    convert.argtypes, convert.restype = [ctypes.c_int, pointer, pointer, *[number] * 3, pointer], ctypes.c_size_t
    n, columns = rows.shape
    block, n_bytes = GGML_QUANT_SIZES[kind]
    rows = np.ascontiguousarray(rows, np.float32)
    out = np.empty((n, columns // block * n_bytes), np.uint8)
    convert(int(kind), rows.ctypes.data, out.ctypes.data, 0, n, columns, None)
    return out


if __name__ == "__main__":
    main()
