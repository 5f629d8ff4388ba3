"""The child process that times attention: runs the operations that llama.cpp builds for a layer (`build_attn_mha` in
llama-graph.cpp), on the cells of one layer, with ggml alone. It may crash.

Cells hold zeros: the time does not depend on their values, except that flash attention skips masked cells. A stream
has all cells of its memory, and only the first ones are read: without flash attention, each value of a head is a row
over all cells, and short parts of long rows take longer to read. Each layer of a graph has its own cells, and so do
consecutive graphs: in a model, the cells of a layer are not in the CPU's cache either, because the weights and the
other layers are read in between. The attention weights of a prompt are larger than the cache of a core. Graphs take
turns, and the fastest run of each counts, because other programs can only slow a run down. A single thread computes,
measured in its own CPU time: two threads would wait for each other whenever one of them is interrupted.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from cppbatch.config import CacheType
from cppbatch.errors import LlamaError
from cppbatch.llama.backend import Backend
from cppbatch.llama.ggml_graph import declare, descriptions, open_device
from cppbatch.models.attention_times import PIECE, Attention, AttentionTask, AttentionTimes, Seconds, Shape

_TYPES: tuple[CacheType, ...] = ("f16", "bf16", "q8_0")
_LENGTHS = (128, 512, 2048)
_MAX_CELLS = 8192  # of a layer; longer contexts are not measured: their time is proportional to their cells
_ARENA_BYTES = 96 << 20  # bytes for cells: more than most caches
_PREC_F32 = 10
_MIN_ROUNDS, _MAX_ROUNDS, _MAX_SECONDS = 3, 40, 0.8


_Values = npt.NDArray[Any]


class _Case(NamedTuple):
    """One attention computation of one layer."""

    attention: Attention
    is_prefill: bool
    n_cells: int
    """The cells of each sequence."""


class _Sizes(NamedTuple):
    """The part of a layer that is computed at once."""

    n_tokens: int
    """Per stream."""
    n_streams: int
    n_kv: int
    """Cells read per stream."""
    n_memory: int
    """All cells of a stream."""
    n_heads: int
    """Key heads."""

    @property
    def rows(self) -> int:
        return self.n_tokens * self.n_streams


class _Graph(NamedTuple):
    case: _Case
    handle: int
    scale: float
    """Factor from the seconds of a run to those of one layer."""


def main() -> None:
    """Reads an `AttentionTask` from the standard input, writes `AttentionTimes` to the standard output."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=AttentionTask)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(measure(task)))


def measure(task: AttentionTask) -> AttentionTimes:
    """The seconds of each kind of attention that the CPU can compute. Raises `LlamaError` if memory runs out."""
    backend = Backend.get()
    lib = declare()
    with open_device(lib, "CPU", 1) as device, ExitStack() as stack:
        bench = stack.enter_context(_bench(lib, device, task))
        cases = [
            _Case(attention, is_prefill, n)
            for n in _LENGTHS
            for is_prefill in (False, True)
            for attention in _kinds(task.shape)
        ]
        graphs = [graph for case in cases if (graph := bench.build(case, stack))]
        best = _fastest(lib, device, graphs)
    decode: dict[str, Seconds] = {}
    prefill: dict[str, Seconds] = {}
    for (attention, is_prefill, n_cells), seconds in best.items():
        (prefill if is_prefill else decode).setdefault(attention.name, {})[n_cells] = seconds
    return AttentionTimes(decode=decode, prefill=prefill, has_amx=backend.has_amx)


def _kinds(shape: Shape) -> Iterator[Attention]:
    # a block of q8_0 has 32 values
    of_k, of_v = ([t for t in _TYPES if t != "q8_0" or size % 32 == 0] for size in (shape.head_k, shape.head_v))
    for k in of_k:
        for v in of_v:
            yield Attention("on", k, v)
            if v != "q8_0":  # values are transposed here, and blocks cannot be transposed
                yield Attention("off", k, v)
    yield Attention("off", "f32", "f32")


def _fastest(lib: ctypes.CDLL, device: int, graphs: list[_Graph]) -> dict[_Case, float]:
    """The seconds of one layer in the fastest run of each graph."""
    best = {graph.case: math.inf for graph in graphs}
    end = perf_counter() + _MAX_SECONDS
    for turn in range(_MAX_ROUNDS):
        if turn >= _MIN_ROUNDS and perf_counter() > end:
            break
        for case, handle, scale in graphs:
            began = thread_time()
            if lib.ggml_backend_graph_compute(device, handle):
                raise LlamaError("the CPU backend cannot compute attention")
            best[case] = min(best[case], (thread_time() - began) * scale)
    return best


@contextmanager
def _bench(lib: ctypes.CDLL, device: int, task: AttentionTask) -> Iterator[_Bench]:
    with Backend.get().errors():
        arena = lib.ggml_backend_alloc_buffer(device, _ARENA_BYTES)
    if not arena:
        raise LlamaError(f"not enough memory to time attention: {_ARENA_BYTES} bytes needed")
    lib.ggml_backend_buffer_clear(arena, 0)
    try:
        yield _Bench(lib, device, arena, task)
    finally:
        lib.ggml_backend_buffer_free(arena)


class _Bench:
    """Builds graphs, which all use the same memory for their cells."""

    def __init__(self, lib: ctypes.CDLL, device: int, arena: int, task: AttentionTask) -> None:
        self._lib, self._device, self._arena = lib, device, arena
        self._base, self._used = lib.ggml_backend_buffer_get_base(arena), 0
        self._shape, self._task = task.shape, task
        self._handle = lib.ggml_backend_get_device(device)

    def build(self, case: _Case, stack: ExitStack) -> _Graph | None:
        """The graph of a case; None if it takes too long or the CPU cannot compute it. `stack` frees it."""
        lib, shape, attention = self._lib, self._shape, case.attention
        sizes = self._sizes(case)
        rows, n_heads = sizes.rows, sizes.n_heads
        layer_bytes = self._cell_bytes(attention) * n_heads * sizes.n_memory * sizes.n_streams
        if sizes.n_kv * sizes.n_streams > _MAX_CELLS or layer_bytes > _ARENA_BYTES:
            return None
        n_layers = 1 if case.is_prefill else min(4, _ARENA_BYTES // layer_bytes)
        context = stack.enter_context(descriptions(lib, 24 * n_layers + 10))
        is_flash = attention.flash_attn == "on"
        tokens, mask_values = self._tokens(case, sizes), self._mask(case, sizes)
        mask = self._tensor(context, "F16" if is_flash else "F32", sizes.n_kv, sizes.n_tokens, 1, sizes.n_streams)
        at_k = at_v = self._tensor(context, "I64", rows)
        inputs: dict[int, _Values] = {mask: mask_values.astype(np.float16 if is_flash else np.float32), at_k: tokens}
        if not is_flash:
            at_v = self._tensor(context, "I64", rows * n_heads * shape.head_v)
            inputs[at_v] = _elements(tokens, n_heads * shape.head_v, sizes.n_memory)
        group = shape.n_head // shape.n_head_kv
        q = self._tensor(context, "F32", shape.head_k, n_heads * group, sizes.n_tokens, sizes.n_streams)
        new_k, new_v = (self._tensor(context, "F32", n_heads * size, rows) for size in (shape.head_k, shape.head_v))
        graph = lib.ggml_new_graph(context)
        for _ in range(n_layers):
            k, v = self._cells(context, attention, sizes, self._take(layer_bytes))
            lib.ggml_build_forward_expand(graph, self._store(context, k, new_k, at_k))
            lib.ggml_build_forward_expand(graph, self._store(context, v, new_v, at_v))
            k, v = self._read(context, k, v, attention, sizes)
            out = self._attend(context, (q, k, v), mask, is_flash=is_flash)
            if out is None:
                return None
            lib.ggml_build_forward_expand(graph, out)
        if not self._allocate(graph, (q, new_k, new_v, *inputs), stack):
            return None
        for tensor in (q, new_k, new_v):
            lib.ggml_backend_tensor_memset(tensor, 0, 0, lib.ggml_nbytes(tensor))
        for tensor, values in inputs.items():
            lib.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)
        return _Graph(case, graph, shape.n_head_kv / n_heads / rows / n_layers)

    def _read(self, context: int, k: int, v: int, attention: Attention, sizes: _Sizes) -> tuple[int, int]:
        """Views of the cells that are read."""
        _, n_streams, n_kv, n_memory, n_heads = sizes
        head_k, head_v = self._shape.head_k, self._shape.head_v
        keys = self._view(context, k, attention.k, (head_k, n_heads, n_memory), (head_k, n_heads, n_kv, n_streams))
        if attention.flash_attn == "on":
            memory, shape = (head_v, n_heads, n_memory), (head_v, n_heads, n_kv, n_streams)
        else:
            memory, shape = (n_memory, head_v, n_heads), (n_kv, head_v, n_heads, n_streams)
        return keys, self._view(context, v, attention.v, memory, shape)

    def _view(self, context: int, cells: int, kind: str, memory: tuple[int, ...], shape: tuple[int, ...]) -> int:
        """A view of this shape of cells whose shape is `memory` in each stream."""
        row = int(self._lib.ggml_row_size(_number(kind), memory[0]))
        strides = row, row * memory[1], row * memory[1] * memory[2]
        return int(self._lib.ggml_view_4d(context, cells, *shape, *strides, 0))

    def _store(self, context: int, cells: int, new: int, where: int) -> int:
        """Stores new keys or values: per cell, or per element if values are transposed."""
        lib = self._lib
        n_places = lib.ggml_nelements(where)
        n = lib.ggml_nelements(new) // n_places
        to = lib.ggml_reshape_2d(context, cells, n, lib.ggml_nelements(cells) // n)
        return int(lib.ggml_set_rows(context, to, lib.ggml_reshape_2d(context, new, n, n_places), where))

    def _tokens(self, case: _Case, sizes: _Sizes) -> npt.NDArray[np.int64]:
        """The cells of the computed tokens: int64[rows]."""
        if case.is_prefill:
            return np.arange(case.n_cells - sizes.n_tokens, case.n_cells, dtype=np.int64)
        of_each = case.n_cells if self._task.kv_layout == "unified" else sizes.n_memory
        return np.arange(sizes.rows, dtype=np.int64) * of_each + case.n_cells - 1

    def _sizes(self, case: _Case) -> _Sizes:
        """The minimum number of key heads with enough work to time."""
        n_parallel, cells, n_heads = self._task.n_parallel, case.n_cells, self._shape.n_head_kv
        is_unified = self._task.kv_layout == "unified"
        n_kv = cells * n_parallel if is_unified else cells
        n_memory = max(n_kv, self._task.n_memory)
        if case.is_prefill:
            head_bytes = 4 * PIECE * n_kv * self._shape.n_head // n_heads
            # as many heads as the attention weights of a prompt take 2 MiB
            return _Sizes(PIECE, 1, n_kv, n_memory, min(n_heads, -(-(2 << 20) // head_bytes)))
        return (
            _Sizes(n_parallel, 1, n_kv, n_memory, 1) if is_unified else _Sizes(1, n_parallel, n_kv, n_memory, n_heads)
        )

    def _mask(self, case: _Case, sizes: _Sizes) -> npt.NDArray[np.float64]:
        """0 where a token attends to a cell, -inf elsewhere: float64[n_streams, 1, n_tokens, n_kv]."""
        n_tokens, n_streams, n_kv, _, _ = sizes
        cells, token = np.arange(n_kv), np.arange(n_tokens)[:, None]
        if case.is_prefill:  # the last tokens of a sequence
            is_seen = cells <= case.n_cells - n_tokens + token
        elif self._task.kv_layout == "unified":  # a token of each sequence
            is_seen = cells // case.n_cells == token
        else:
            is_seen = np.ones((1, n_kv), bool)
        one = np.where(is_seen, 0.0, -np.inf)
        return np.ascontiguousarray(np.broadcast_to(one, (n_streams, 1, n_tokens, n_kv)))

    def _attend(self, context: int, qkv: tuple[int, int, int], mask: int, *, is_flash: bool) -> int | None:
        """The output of a layer's attention; None if the CPU cannot compute it."""
        lib, scale = self._lib, 1 / math.sqrt(self._shape.head_k)
        q, k = (lib.ggml_permute(context, each, 0, 2, 1, 3) for each in qkv[:2])
        v = qkv[2]
        if is_flash:
            v = lib.ggml_permute(context, v, 0, 2, 1, 3)
            out = lib.ggml_flash_attn_ext(context, q, k, v, mask, scale, 0.0, 0.0)
            lib.ggml_prec_set_acc(out, _PREC_F32)
            return int(out) if lib.ggml_backend_dev_supports_op(self._handle, out) else None
        kq = lib.ggml_mul_mat(context, k, q)
        lib.ggml_prec_set_acc(kq, _PREC_F32)
        weights = lib.ggml_soft_max_ext(context, kq, mask, scale, 0.0)
        kqv = lib.ggml_mul_mat(context, v, weights)
        if not all(lib.ggml_backend_dev_supports_op(self._handle, each) for each in (kq, weights, kqv)):
            return None
        return int(lib.ggml_cont(context, lib.ggml_permute(context, kqv, 0, 2, 1, 3)))

    def _cells(self, context: int, attention: Attention, sizes: _Sizes, offset: int) -> tuple[int, int]:
        """Keys and values of a layer in memory order: without flash attention, values are transposed."""
        lib, shape = self._lib, self._shape
        _, n_streams, _, n_kv, n_heads = sizes
        k = self._tensor(context, attention.k, shape.head_k, n_heads, n_kv, n_streams)
        if attention.flash_attn == "on":
            v = self._tensor(context, attention.v, shape.head_v, n_heads, n_kv, n_streams)
        else:
            v = self._tensor(context, attention.v, n_kv, shape.head_v, n_heads, n_streams)
        lib.ggml_backend_tensor_alloc(self._arena, k, self._base + offset)
        lib.ggml_backend_tensor_alloc(self._arena, v, self._base + offset + lib.ggml_nbytes(k))
        return k, v

    def _take(self, n_bytes: int) -> int:
        """The next bytes of the arena; starts over when the arena is used up."""
        n_bytes = -(-n_bytes // 64) * 64
        start = self._used if self._used + n_bytes <= _ARENA_BYTES else 0
        self._used = start + n_bytes
        return start

    def _cell_bytes(self, attention: Attention) -> int:
        """Bytes of one cell of one head in one layer."""
        lib, shape = self._lib, self._shape
        sizes = ((attention.k, shape.head_k), (attention.v, shape.head_v))
        return sum(int(lib.ggml_row_size(_number(kind), size)) for kind, size in sizes)

    def _tensor(self, context: int, kind: str, *shape: int) -> int:
        return int(self._lib.ggml_new_tensor_4d(context, _number(kind), *shape, *[1] * (4 - len(shape))))

    def _allocate(self, graph: int, inputs: tuple[int, ...], stack: ExitStack) -> bool:
        """Allocates the inputs and the tensors of the graph. False if memory runs out."""
        lib = self._lib
        for each in inputs:
            lib.ggml_set_input(each)
        allocator = lib.ggml_gallocr_new(lib.ggml_backend_get_default_buffer_type(self._device))
        stack.callback(lib.ggml_gallocr_free, allocator)
        with Backend.get().errors():
            return bool(lib.ggml_gallocr_alloc_graph(allocator, graph))


def _elements(cells: npt.NDArray[np.int64], n_values: int, n_kv: int) -> npt.NDArray[np.int64]:
    """The indices of these cells' transposed values: int64[len(cells) * n_values]."""
    stream, cell = cells // n_kv, cells % n_kv
    return ((stream * n_values)[:, None] * n_kv + np.arange(n_values) * n_kv + cell[:, None]).ravel()


def _number(kind: str) -> int:
    return int(GGMLQuantizationType[kind.upper()].value)


if __name__ == "__main__":
    main()
