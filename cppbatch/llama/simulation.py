"""Models of which llama.cpp loads nothing but says what they would take (its `no_alloc`).

What it says is in its log: sizes of buffers, layers and their devices, and tensors and their buffers. Its function with
these figures (`llama_get_memory_breakdown`) returns a C++ map, which cannot be read through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from cppbatch.llama.backend import Backend
from cppbatch.llama.library import C, ggml


class _Override(ctypes.Structure):
    """llama.cpp's `llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def simulate(params: Any) -> None:
    """Makes these `llama_model_params` those of a simulation.

    Without GPUs it is also told to put every tensor where a CPU would have it. That changes nothing, but it then logs
    which tensors it would repack for this CPU: those are not in the mapped file.
    """
    params.no_alloc = True
    params.load_mode = C.LLAMA_LOAD_MODE_NONE  # it asserts that nothing is mapped
    if not any("GPU" in device.kind for device in Backend.get().devices()):
        params.tensor_buft_overrides = ctypes.addressof(_all_on_cpu())


@functools.cache  # C keeps the address
def _all_on_cpu() -> ctypes.Array[_Override]:
    overrides = (_Override * 2)()
    overrides[0] = _Override(b".", ggml().ggml_backend_cpu_buffer_type())
    return overrides
