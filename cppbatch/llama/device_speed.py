"""Measures with ggml's own kernels how fast a device reads memory and multiplies matrices."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from cppbatch.errors import LlamaError
from cppbatch.llama.backend import Backend
from cppbatch.llama.ggml_graph import declare, descriptions, open_device
from cppbatch.models.kernels import DeviceTimes

_READ_BYTES, _READ_COLUMNS = 512 << 20, 8192  # more than any cache
_PRODUCT_SHAPE, _PRODUCT_ROWS = (4096, 4096), 512
_SMALLER_SHAPE = 4096, 1024
_MIN_RUNS, _MAX_RUNS, _MAX_SECONDS = 2, 20, 1.0
_KERNEL_SECONDS = 0.1
_COPIED_BYTES = 4 << 20
_SMALL_SHAPE = 256, 256


class DeviceSpeed(NamedTuple):
    """The best of several runs on a device."""

    bytes_per_s: float
    """Reading a matrix larger than every cache, for a product with one vector."""
    flops: float
    """Operations/s of a matrix product with 512 rows; a multiplication and an addition count as two."""


def measure_device(device: str, weight_type: str, *, n_threads: int) -> DeviceSpeed:
    """Measures a device in one or two seconds, with half a GiB of its memory.

    `device`: ggml's name of the device ("CPU", "CUDA0"). `weight_type`: ggml's name of the type of the matrix in the
    product ("Q4_K"). `n_threads`: for the CPU. Raises `LlamaError` if the device has too little free memory.
    """
    with open_device(declare(), device, n_threads) as backend:
        read = _seconds(backend, "F32", _large_shape("F32", _READ_BYTES), 1)
        # 4 products per graph, so that its start-up time is negligible
        multiplied = _seconds(backend, weight_type, _PRODUCT_SHAPE, _PRODUCT_ROWS, n_nodes=4)
    return DeviceSpeed(_READ_BYTES / read, 2 * math.prod(_PRODUCT_SHAPE) * _PRODUCT_ROWS / multiplied)


def measure_products(
    device: str, kinds: Sequence[str], rows: Sequence[int], *, n_bytes: int, n_threads: int
) -> DeviceTimes:
    """Times matrix products of weights of these types with these numbers of rows, and what it takes to reach the
    device. Takes a second or two. Arguments and errors as of `measure_device`.

    `n_bytes`: of the matrix, up to 32 rows; it should be larger than the caches, as the weights of a model are.
    """
    with open_device(declare(), device, n_threads) as backend:
        ms: dict[str, dict[int, float]] = {}
        for kind in kinds:
            large, by_rows = _large_shape(kind, n_bytes), ms.setdefault(kind, {})
            for n in rows:
                shape = large if n <= 32 else _SMALLER_SHAPE
                fewer = max(by_rows, default=0)
                if (
                    fewer and by_rows[fewer] * n / fewer * math.prod(shape) > 5e9
                ):  # a software driver: a run would take more than 5 s
                    by_rows[n] = by_rows[fewer] * n / fewer
                else:
                    by_rows[n] = _seconds(backend, kind, shape, n, most=_KERNEL_SECONDS) * 1e9 / math.prod(shape)
        round_trip_s = _seconds(backend, "F32", _SMALL_SHAPE, 1, most=_KERNEL_SECONDS, sends=True)
        copy_s = _copy_seconds(backend)
    return DeviceTimes(ms, round_trip_s * 1e3, copy_s * 1e9 / _COPIED_BYTES)


def _large_shape(kind: str, n_bytes: int) -> tuple[int, int]:
    """Columns and rows of a matrix with about this many bytes."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return _READ_COLUMNS, n_bytes // (_READ_COLUMNS // block * size)


def _seconds(
    backend: int,
    kind: str,
    shape: tuple[int, int],
    n_rows: int,
    *,
    n_nodes: int = 1,
    most: float = _MAX_SECONDS,
    sends: bool = False,
) -> float:
    """The seconds of the product of a matrix with `n_rows` vectors. `sends`: with sending the vectors."""
    lib = declare()
    with descriptions(lib) as context:
        matrix = lib.ggml_new_tensor_2d(context, GGMLQuantizationType[kind].value, *shape)
        vectors = lib.ggml_new_tensor_2d(context, GGMLQuantizationType.F32.value, shape[0], n_rows)
        graph = lib.ggml_new_graph(context)
        for _ in range(n_nodes):
            product = lib.ggml_mul_mat(context, matrix, vectors)
            lib.ggml_build_forward_expand(graph, product)
        sent = np.zeros(shape[0] * n_rows, np.float32)
        read = np.zeros(1, np.float32)

        def compute() -> None:
            if sends:
                lib.ggml_backend_tensor_set(vectors, sent.ctypes.data, 0, sent.nbytes)
            if lib.ggml_backend_graph_compute(backend, graph):
                raise LlamaError("the device cannot compute matrix products")
            lib.ggml_backend_tensor_get(product, read.ctypes.data, 0, read.nbytes)  # an RPC worker may still compute

        with _allocated(lib, backend, context):
            return min(_runs(compute, most)) / n_nodes


def _copy_seconds(backend: int) -> float:
    """The seconds of sending `_COPIED_BYTES` from the host's memory."""
    lib = declare()
    with descriptions(lib) as context:
        tensor = lib.ggml_new_tensor_2d(context, GGMLQuantizationType.I8.value, _COPIED_BYTES, 1)
        sent = np.zeros(_COPIED_BYTES, np.int8)
        read = np.zeros(1, np.int8)

        def copy() -> None:
            lib.ggml_backend_tensor_set(tensor, sent.ctypes.data, 0, sent.nbytes)
            lib.ggml_backend_tensor_get(tensor, read.ctypes.data, 0, read.nbytes)  # it has arrived

        with _allocated(lib, backend, context):
            return min(_runs(copy, _KERNEL_SECONDS))


@contextmanager
def _allocated(lib: ctypes.CDLL, backend: int, context: int) -> Iterator[None]:
    with Backend.get().errors():
        buffer = lib.ggml_backend_alloc_ctx_tensors(context, backend)
    if not buffer:
        raise LlamaError("the device does not have enough free memory for the measurement")
    try:
        lib.ggml_backend_buffer_clear(buffer, 0)
        yield
    finally:
        lib.ggml_backend_buffer_free(buffer)


def _runs(run: Callable[[], None], most: float) -> list[float]:
    """The seconds of several runs, in about `most` seconds."""
    seconds: list[float] = []
    while len(seconds) < _MIN_RUNS or (len(seconds) < _MAX_RUNS and sum(seconds) < most):
        if sum(seconds) > 1.0:  # a slow run is the only one
            break
        began = perf_counter()
        run()
        seconds.append(perf_counter() - began)
    return seconds
