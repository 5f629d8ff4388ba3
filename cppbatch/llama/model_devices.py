"""The devices that a model is split over: those of RPC workers, then this machine's GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from cppbatch.config import named
from cppbatch.errors import ModelError
from cppbatch.llama.library import C, ggml
from cppbatch.llama.rpc import RpcConnections, any_registered, is_remote
from cppbatch.rpc_endpoint import parse_endpoint

_GPU, _INTEGRATED_GPU = 1, 2  # ggml_backend_dev_type


class ModelDevices:
    """The devices of one model, with the connections to their workers, until `close`."""

    def __init__(self, rpc: Sequence[str], tensor_split: Sequence[float]) -> None:
        """Raises `ModelError` if there is not one share for each device, and as `RpcConnections`."""
        self._connections = RpcConnections([parse_endpoint(each) for each in rpc])
        handles = [*self._connections.devices, *_local_gpus()]
        self._list = (ctypes.c_void_p * (len(handles) + 1))(*handles)  # 0 is its end
        self._split: ctypes.Array[ctypes.c_float] | None = None
        if not tensor_split:
            return
        if len(tensor_split) != len(handles):
            self.close()
            names = ", ".join(map(_name, handles)) or "none (no GPU or RPC worker found)"
            given = f"{named('tensor_split')} has {len(tensor_split)} shares"
            raise ModelError(f"{given}; it must have one for each device: {names}")
        self._split = (ctypes.c_float * C.llama_max_devices())(*tensor_split)

    def set_in(self, params: Any) -> None:
        """Sets them in `llama_model_params`, which then refer to memory of this object."""
        if any_registered():  # else llama.cpp finds the GPUs by itself
            params.devices = ctypes.addressof(self._list)
        if self._split is not None:
            params.tensor_split = self._split

    def close(self) -> None:
        """Ends the connections. The model must be freed before. A second call does nothing."""
        self._connections.close()


def _local_gpus() -> list[int]:
    """As llama.cpp chooses them: integrated ones only if there are no others."""
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
