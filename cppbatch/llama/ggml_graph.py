"""Graphs of ggml operations, computed on one device without a model."""

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
from cppbatch.llama.library import ggml
from cppbatch.models.kernels import DeviceTimes

_Void, _Size, _Int64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64


class _InitParams(ctypes.Structure):
    """ggml's `ggml_init_params`."""

    _fields_ = (("mem_size", _Size), ("mem_buffer", _Void), ("no_alloc", ctypes.c_bool))


@contextmanager
def open_device(lib: ctypes.CDLL, device: str, n_threads: int) -> Iterator[int]:
    """A ggml backend that computes on this device."""
    Backend.get()  # loads the devices of a portable build
    handles = [lib.ggml_backend_dev_get(i) for i in range(lib.ggml_backend_dev_count())]
    named = {lib.ggml_backend_dev_name(handle).decode(): handle for handle in handles}
    if device not in named:
        raise LlamaError(f"device {device!r} not found; available: {', '.join(named)}")
    backend = lib.ggml_backend_dev_init(named[device], None)
    registry = lib.ggml_backend_dev_backend_reg(named[device])
    if address := lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads"):
        ctypes.CFUNCTYPE(None, _Void, ctypes.c_int)(address)(backend, n_threads)
    try:
        yield backend
    finally:
        lib.ggml_backend_free(backend)


@contextmanager
def descriptions(lib: ctypes.CDLL, n: int = 64) -> Iterator[int]:
    """A ggml context that holds the descriptions of a graph and of at most `n` tensors."""
    size = lib.ggml_graph_overhead() + n * lib.ggml_tensor_overhead()
    context = lib.ggml_init(_InitParams(mem_size=size, mem_buffer=None, no_alloc=True))
    try:
        yield context
    finally:
        lib.ggml_free(context)


def declare() -> ctypes.CDLL:
    """Declares the graph functions of ggml's library and returns it. Raises `LibraryError`."""
    lib = ggml()
    for name, restype, *arguments in (
        ("ggml_backend_dev_init", _Void, _Void, ctypes.c_char_p),
        ("ggml_backend_dev_backend_reg", _Void, _Void),
        ("ggml_backend_reg_get_proc_address", _Void, _Void, ctypes.c_char_p),
        ("ggml_backend_free", None, _Void),
        ("ggml_graph_overhead", _Size),
        ("ggml_tensor_overhead", _Size),
        ("ggml_init", _Void, _InitParams),
        ("ggml_free", None, _Void),
        ("ggml_new_tensor_2d", _Void, _Void, ctypes.c_int, _Int64, _Int64),
        ("ggml_new_graph", _Void, _Void),
        ("ggml_mul_mat", _Void, _Void, _Void, _Void),
        ("ggml_build_forward_expand", None, _Void, _Void),
        ("ggml_backend_alloc_ctx_tensors", _Void, _Void, _Void),
        ("ggml_backend_buffer_clear", None, _Void, ctypes.c_uint8),
        ("ggml_backend_buffer_free", None, _Void),
        ("ggml_backend_graph_compute", ctypes.c_int, _Void, _Void),
        ("ggml_backend_get_device", _Void, _Void),
        ("ggml_backend_dev_supports_op", ctypes.c_bool, _Void, _Void),
        ("ggml_backend_get_default_buffer_type", _Void, _Void),
        ("ggml_backend_alloc_buffer", _Void, _Void, _Size),
        ("ggml_backend_buffer_get_base", _Void, _Void),
        ("ggml_backend_tensor_alloc", ctypes.c_int, _Void, _Void, _Void),
        ("ggml_backend_tensor_set", None, _Void, _Void, _Size, _Size),
        ("ggml_backend_tensor_get", None, _Void, _Void, _Size, _Size),
        ("ggml_backend_tensor_memset", None, _Void, ctypes.c_uint8, _Size, _Size),
        ("ggml_gallocr_new", _Void, _Void),
        ("ggml_gallocr_free", None, _Void),
        ("ggml_gallocr_alloc_graph", ctypes.c_bool, _Void, _Void),
        ("ggml_set_input", None, _Void),
        ("ggml_nbytes", _Size, _Void),
        ("ggml_row_size", _Size, ctypes.c_int, _Int64),
        ("ggml_new_tensor_4d", _Void, _Void, ctypes.c_int, _Int64, _Int64, _Int64, _Int64),
        ("ggml_permute", _Void, _Void, _Void, *[ctypes.c_int] * 4),
        ("ggml_view_4d", _Void, _Void, _Void, *[_Int64] * 4, *[_Size] * 4),
        ("ggml_cont", _Void, _Void, _Void),
        ("ggml_reshape_2d", _Void, _Void, _Void, _Int64, _Int64),
        ("ggml_set_rows", _Void, _Void, _Void, _Void, _Void),
        ("ggml_nelements", _Int64, _Void),
        ("ggml_soft_max_ext", _Void, _Void, _Void, _Void, ctypes.c_float, ctypes.c_float),
        ("ggml_flash_attn_ext", _Void, *[_Void] * 5, *[ctypes.c_float] * 3),
        ("ggml_prec_set_acc", None, _Void, ctypes.c_int),
    ):
        function = getattr(lib, str(name))
        function.argtypes, function.restype = arguments, restype
    return lib


# --- device speed ----------------------------------------------------------------------------------------------------
# Measures with ggml's own kernels how fast a device reads memory and multiplies matrices.


_READ_BYTES, _READ_COLUMNS = 512 << 20, 8192  # more than any cache
_PRODUCT_SHAPE, _PRODUCT_ROWS = (4096, 4096), 512
_SMALLER_SHAPE = 4096, 1024
_MIN_RUNS, _MAX_RUNS, _MAX_SECONDS = 2, 20, 1.0
_NODES = 4  # products per graph of a small matrix, so that its start-up time is negligible
_KERNEL_SECONDS = 0.1
_SLOWEST_RUN = 5.0  # seconds that a run may take
_SLOW_RUN = 1.0  # seconds; a run that takes longer is the only one
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
        multiplied = _seconds(backend, weight_type, _PRODUCT_SHAPE, _PRODUCT_ROWS, n_nodes=_NODES)
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
                shape = large if n <= _FEW_ROWS else _SMALLER_SHAPE
                fewer = max(by_rows, default=0)
                if fewer and by_rows[fewer] * n / fewer * math.prod(shape) > _SLOWEST_RUN * 1e9:  # a software driver
                    by_rows[n] = by_rows[fewer] * n / fewer
                else:
                    by_rows[n] = _seconds(backend, kind, shape, n, most=_KERNEL_SECONDS) * 1e9 / math.prod(shape)
        round_trip_s = _seconds(backend, "F32", _SMALL_SHAPE, 1, most=_KERNEL_SECONDS, sends=True)
        copy_s = _copy_seconds(backend)
    return DeviceTimes(ms, round_trip_s * 1e3, copy_s * 1e9 / _COPIED_BYTES)


_FEW_ROWS = 32


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
        if sum(seconds) > _SLOW_RUN:
            break
        began = perf_counter()
        run()
        seconds.append(perf_counter() - began)
    return seconds
