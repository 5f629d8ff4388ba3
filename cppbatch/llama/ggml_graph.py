"""Graphs of ggml operations, computed on one device without a model."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from cppbatch.errors import LlamaError
from cppbatch.llama.backend import Backend
from cppbatch.llama.library import ggml

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
