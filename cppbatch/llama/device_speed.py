"""Measuring a device with ggml's own kernels: how fast it reads memory, and how fast it multiplies matrices."""

from __future__ import annotations

import ctypes
import math
from time import perf_counter
from typing import NamedTuple

from gguf import GGMLQuantizationType

from cppbatch.errors import LlamaError
from cppbatch.llama.backend import Backend
from cppbatch.llama.ggml_graph import declare, descriptions, open_device

_READ_SHAPE = 8192, 16384  # in F32 512 MiB: more than any cache
_PRODUCT_SHAPE, _PRODUCT_ROWS = (4096, 4096), 512
_F32_BYTES = 4
_MIN_RUNS, _MAX_RUNS, _MAX_SECONDS = 2, 20, 1.0
_NODES = 4  # products in a graph, so that starting it does not count


class DeviceSpeed(NamedTuple):
    """What a device reaches in its best of several runs."""

    bytes_per_s: float
    """Reading a matrix that is larger than every cache, for a product with one vector."""
    flops: float
    """Operations/s in a product of a matrix with 512 rows: a multiplication and an addition count as two."""


def measure_device(device: str, weight_type: str, *, n_threads: int) -> DeviceSpeed:
    """Takes a second or two, and half a GiB of the device's memory.

    `device`: ggml's name of it ("CPU", "CUDA0"). `weight_type`: ggml's name of the type of the matrix in the product
    ("Q4_K"). `n_threads`: for the CPU. Raises `LlamaError` if the memory is not free.
    """
    columns, rows = _READ_SHAPE
    read = _seconds(device, "F32", _READ_SHAPE, 1, n_threads)
    multiplied = _seconds(device, weight_type, _PRODUCT_SHAPE, _PRODUCT_ROWS, n_threads)
    return DeviceSpeed(columns * rows * _F32_BYTES / read, 2 * math.prod(_PRODUCT_SHAPE) * _PRODUCT_ROWS / multiplied)


def _seconds(device: str, weight_type: str, shape: tuple[int, int], n_rows: int, n_threads: int) -> float:
    """The seconds of the product of a matrix with `n_rows` vectors."""
    lib = declare()
    with open_device(lib, device, n_threads) as backend, descriptions(lib) as context:
        matrix = lib.ggml_new_tensor_2d(context, GGMLQuantizationType[weight_type].value, *shape)
        vectors = lib.ggml_new_tensor_2d(context, GGMLQuantizationType.F32.value, shape[0], n_rows)
        graph = lib.ggml_new_graph(context)
        for _ in range(_NODES):
            lib.ggml_build_forward_expand(graph, lib.ggml_mul_mat(context, matrix, vectors))
        with Backend.get().errors():
            buffer = lib.ggml_backend_alloc_ctx_tensors(context, backend)
        if not buffer:
            raise LlamaError(
                f"{device} does not have enough free memory for the measurement: "
                f"{math.prod(shape) * _F32_BYTES} bytes needed"
            )
        try:
            lib.ggml_backend_buffer_clear(buffer, 0)
            return min(_runs(lib, backend, graph)) / _NODES
        finally:
            lib.ggml_backend_buffer_free(buffer)


def _runs(lib: ctypes.CDLL, backend: int, graph: int) -> list[float]:
    seconds: list[float] = []
    while len(seconds) < _MIN_RUNS or (len(seconds) < _MAX_RUNS and sum(seconds) < _MAX_SECONDS):
        began = perf_counter()
        if lib.ggml_backend_graph_compute(backend, graph):  # waits for the end
            raise LlamaError("the device cannot compute matrix products")
        seconds.append(perf_counter() - began)
    return seconds
