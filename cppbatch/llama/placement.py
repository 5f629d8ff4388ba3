"""The devices of a model, and which of its tensors lie elsewhere than with their layer (docs/gpu.md)."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Any

from cppbatch.config import setting_name
from cppbatch.errors import ModelError
from cppbatch.llama.backend import Backend
from cppbatch.llama.library import C, ggml
from cppbatch.llama.rpc import RpcConnections, any_registered, connected_devices, is_remote
from cppbatch.models.inspect import DENSE_FFN, EXPERTS
from cppbatch.rpc_endpoint import parse_endpoint

log = logging.getLogger("cppbatch.engine")

_GPU, _INTEGRATED_GPU = 1, 2  # ggml_backend_dev_type
_CPU = "CPU"


class _BufferTypeOverride(ctypes.Structure):
    """llama.cpp's `llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class ModelDevices:
    """The devices over which a model is split: those of RPC workers, then this machine's GPUs. Connections to the
    workers stay open until `close`."""

    def __init__(
        self,
        rpc: Sequence[str] = (),
        names: Sequence[str] = (),
        tensor_split: Sequence[float] = (),
        overrides: Sequence[tuple[str, str]] = (),
    ) -> None:
        """`names`: the devices to use, by ggml's names; (): all. `overrides`: pairs of a regular expression for names
        of tensors, and the name of the device that holds them, or CPU; the first match counts.

        Raises `ModelError` for an unknown device, if there are more shares than devices, and as `RpcConnections`.
        """
        self._connections = RpcConnections([parse_endpoint(each) for each in rpc])
        self._is_chosen = bool(names)
        self._split: ctypes.Array[ctypes.c_float] | None = None
        try:
            handles = [*self._connections.devices, *_local_gpus()]
            if names:
                handles = [_find("device_names", name, handles) for name in names]
            self._list = (ctypes.c_void_p * (len(handles) + 1))(*handles)  # ends with 0
            if tensor_split:
                self._split = _shares(tensor_split, handles)
            self._overrides = _overrides(overrides, [*self._connections.devices, *_local_gpus()])
        except ModelError:
            self.close()
            raise

    def set_in(self, params: Any) -> None:
        """Sets the devices in `llama_model_params`, which then refer to memory of this object."""
        if any_registered() or self._is_chosen:  # else llama.cpp finds the GPUs itself
            params.devices = ctypes.addressof(self._list)
        if self._split is not None:
            params.tensor_split = self._split
        if self._overrides is not None:
            params.tensor_buft_overrides = ctypes.addressof(self._overrides)

    def close(self) -> None:
        """Closes the connections. The model must be freed first. A second call does nothing."""
        self._connections.close()


def cpu_overrides(*, cpu_moe: bool, n_cpu_moe: int, n_cpu_ffn: int) -> list[tuple[str, str]]:
    """The overrides of llama.cpp's --cpu-moe, --n-cpu-moe and --n-cpu-ffn. `n_...`: the first layers."""
    found = [(EXPERTS, _CPU)] if cpu_moe else []
    for n, part in ((n_cpu_moe, EXPERTS), (n_cpu_ffn, DENSE_FFN)):
        if n:
            found.append((rf"blk\.({'|'.join(map(str, range(n)))}){part}", _CPU))
    return found


def media_device(name: str = "", names: Sequence[str] = (), number: int = 0) -> int | None:
    """ggml's pointer to the device that encodes images and audio; None: there is none but the CPU.

    `name`: of a GPU, or of a device of an RPC worker that the model uses; "": the first GPU of this machine among
    `names`, or without them the GPU with this number. Raises `ModelError` for an unknown name.
    """
    gpus = _local_gpus()
    if name:
        return _find("mmproj_device", name, [*connected_devices(), *gpus])
    if names:
        return next((gpu for gpu in gpus if _name(gpu) in names), None)
    return gpus[number] if number < len(gpus) else None


def set_no_alloc(params: Any, *, on_cpu: bool) -> None:
    """Sets `no_alloc` in these `llama_model_params`.

    `on_cpu`: the CPU is the only device. All tensors are then "overridden" to CPU buffers, where they would be anyway,
    so that llama.cpp logs which tensors it would repack for this CPU. Those are not in the memory-mapped file.
    """
    params.no_alloc = True
    params.load_mode = C.LLAMA_LOAD_MODE_NONE  # llama.cpp asserts that the file is not mapped
    if on_cpu:
        params.tensor_buft_overrides = ctypes.addressof(_all_on_cpu())


@functools.cache  # llama.cpp keeps the address
def _all_on_cpu() -> ctypes.Array[_BufferTypeOverride]:
    found = _overrides([(".", _CPU)], [])
    assert found
    return found


def _overrides(wanted: Sequence[tuple[str, str]], devices: Sequence[int]) -> ctypes.Array[_BufferTypeOverride] | None:
    """llama.cpp's list, which ends with an empty one; None: no overrides."""
    if not wanted:
        return None
    listed = (_BufferTypeOverride * (len(wanted) + 1))()
    for i, (pattern, place) in enumerate(wanted):
        listed[i] = _BufferTypeOverride(pattern.encode(), _buffer_type(place, devices))
    return listed


def _buffer_type(place: str, devices: Sequence[int]) -> int:
    lib = ggml()
    if place == _CPU:
        return int(lib.ggml_backend_cpu_buffer_type())
    return int(lib.ggml_backend_dev_buffer_type(_find("override_tensor", place, devices)))


def _find(setting: str, name: str, devices: Sequence[int]) -> int:
    lib = ggml()
    for device in devices:
        buffers = lib.ggml_backend_buft_name(lib.ggml_backend_dev_buffer_type(device))  # RPC0[192.168.1.5:50052]
        if name in (lib.ggml_backend_dev_name(device).decode(), _name(device), buffers.decode()):
            return device
    known = ", ".join(map(_name, devices)) or "none (no GPU or RPC worker found)"
    raise ModelError(f"{setting_name(setting)} names the device {name!r}; available: {known}")


def _shares(tensor_split: Sequence[float], devices: Sequence[int]) -> ctypes.Array[ctypes.c_float]:
    """Devices without a share get 0, as in llama-server."""
    if not devices:
        log.warning("%s has no effect: no GPU or RPC worker found", setting_name("tensor_split"))
    elif len(tensor_split) > len(devices):
        given = f"{setting_name('tensor_split')} has {len(tensor_split)} shares"
        raise ModelError(f"{given}; it must have at most one for each device: {', '.join(map(_name, devices))}")
    shares: ctypes.Array[ctypes.c_float] = (ctypes.c_float * C.llama_max_devices())(*tensor_split)
    return shares


def check_gpu(number: int) -> None:
    """Raises `ModelError` if there is no GPU with this number: llama.cpp would use the CPU without a warning."""
    gpus = [gpu.name for gpu in Backend.get().devices() if "GPU" in gpu.kind]
    if number >= len(gpus):
        raise ModelError(
            f"GPU {number} not found ({setting_name('device')}); available in llama.cpp: {', '.join(gpus) or 'none'}"
        )


def _local_gpus() -> list[int]:
    """The GPUs that llama.cpp would choose: integrated ones only if all are integrated."""
    lib = ggml()
    local = [lib.ggml_backend_dev_get(i) for i in range(lib.ggml_backend_dev_count())]
    by_type = {
        kind: [device for device in local if lib.ggml_backend_dev_type(device) == kind and not is_remote(device)]
        for kind in (_GPU, _INTEGRATED_GPU)
    }
    return by_type[_GPU] or by_type[_INTEGRATED_GPU]


def _name(handle: int) -> str:
    """ "CUDA0", or "RPC0 (192.168.1.5:50052)"."""
    lib = ggml()
    name: str = lib.ggml_backend_dev_name(handle).decode()
    return f"{name} ({lib.ggml_backend_dev_description(handle).decode()})" if is_remote(handle) else name
