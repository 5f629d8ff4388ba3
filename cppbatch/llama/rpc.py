"""llama.cpp's RPC backend: devices of other processes and machines, reached over TCP (docs/rpc.md)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from cppbatch.errors import LibraryError, LlamaError
from cppbatch.llama.library import ggml
from cppbatch.llama.owned import Owned
from cppbatch.rpc_endpoint import Endpoint, check_worker, end_when_silent

_Void, _Size = ctypes.c_void_p, ctypes.c_size_t
_NAME = b"RPC"
_OPEN_FILES = "/dev/fd"  # Linux and macOS
_CPU, _ACCELERATOR = 0, 3  # ggml_backend_dev_type
_ADD_SERVER = ctypes.CFUNCTYPE(_Void, ctypes.c_char_p)
_START_SERVER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, _Size, _Size, ctypes.POINTER(_Void))

_lock = threading.RLock()  # garbage collection may close connections while this thread opens some
_registered: dict[Endpoint, list[int]] = {}
"""llama.cpp's devices of each worker to which this process has ever connected."""
_connections: Counter[Endpoint] = Counter()
"""The number of models in this process that share the connection to a worker."""


def has_rpc() -> bool:
    """Whether this build has the RPC backend."""
    return bool(_library().ggml_backend_reg_by_name(_NAME))


def any_registered() -> bool:
    """Whether this process has ever connected to a worker: llama.cpp then adds the worker's devices to every model."""
    return bool(_registered)


def connected_devices() -> list[int]:
    """ggml's pointers to the devices of workers to which this process is connected."""
    return [device for endpoint, devices in _registered.items() if _connections[endpoint] for device in devices]


def is_remote(device: int) -> bool:
    """Whether a device (ggml's pointer) belongs to a worker."""
    return any(device in devices for devices in _registered.values())


def is_reachable(device: int) -> bool:
    """Whether a device is local, or belongs to a worker to which this process is connected.

    If the worker is gone, llama.cpp aborts a process that queries the memory of the device.
    """
    return not is_remote(device) or any(
        _connections[endpoint] for endpoint, its in _registered.items() if device in its
    )


class RpcConnections:
    """Connections to workers, kept open until `close`, and their devices.

    A worker serves one connection at a time. llama.cpp shares one per process and worker as long as anything uses it,
    and would open another one for the next model or context.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        """Raises `RpcUnreachable`, `ConfigError` for a worker of another version, `LibraryError` without RPC.

        Each worker is probed first, because llama.cpp aborts the process if it cannot connect.
        """
        self.devices: list[int] = []
        """ggml's pointers, in the order of the workers."""
        self._held: list[tuple[Endpoint, int]] = []
        self._owned = Owned(self._held, _disconnect)
        if not endpoints:
            return
        if not has_rpc():
            raise LibraryError(without_rpc("--rpc"))
        library = _library()
        with _lock:
            for endpoint in endpoints:
                if not _connections[endpoint]:
                    check_worker(endpoint)
            for endpoint in endpoints:
                devices = _devices(library, endpoint)
                self._held.append((endpoint, library.ggml_backend_dev_init(devices[0], None)))
                _end_when_silent(_peer_port, endpoint.port)
                _connections[endpoint] += 1
                self.devices += devices

    def close(self) -> None:
        """Closes the connections that other models do not use. A second call does nothing."""
        self._owned.close()


def _disconnect(held: list[tuple[Endpoint, int]]) -> None:
    with _lock:
        while held:
            endpoint, backend = held.pop()
            _library().ggml_backend_free(backend)
            _connections[endpoint] -= 1


def without_rpc(what: str) -> str:
    """The error message for a build without RPC."""
    return (
        f"{what} requires llama.cpp's RPC backend, which this build does not include: run scripts/install.py, or build "
        "llama-cpp-python with -DGGML_RPC=ON in CMAKE_ARGS"
    )


def _devices(library: ctypes.CDLL, endpoint: Endpoint) -> list[int]:
    """The devices of a worker. The first call registers them."""
    if endpoint not in _registered:
        server = _ADD_SERVER(_function(library, b"ggml_backend_rpc_add_server"))(str(endpoint).encode())
        if not server:
            raise LlamaError(f"the RPC worker at {endpoint} has no devices")
        library.ggml_backend_register(server)
        n = library.ggml_backend_reg_dev_count(server)
        _registered[endpoint] = [library.ggml_backend_reg_dev_get(server, i) for i in range(n)]
    return _registered[endpoint]


def choose_devices(names: Sequence[str]) -> list[str]:
    """Returns ggml's names of the chosen devices of this machine. No names: all GPUs, or the CPU if there are none.

    Raises `LibraryError` for a build without RPC, and `LlamaError` for a device that does not exist.
    """
    if not has_rpc():
        raise LibraryError(without_rpc("an RPC worker"))
    known = _local_devices(_library())
    if missing := [name for name in names if name not in known]:
        raise LlamaError(f"--devices: device {missing[0]!r} not found; available: {', '.join(known)}")
    if names:
        return list(names)
    types = {name: _library().ggml_backend_dev_type(device) for name, device in known.items()}
    gpus = [name for name, kind in types.items() if kind not in (_CPU, _ACCELERATOR)]
    return gpus or [name for name, kind in types.items() if kind == _CPU][:1]


def serve_devices(endpoint: Endpoint, names: Sequence[str], *, n_threads: int, cache: str | None) -> NoReturn:
    """Serves these devices to one connection at a time. Never returns; prints to stdout.

    `n_threads`: of the CPU. `cache`: a folder for large tensors, or None. Raises `LlamaError` if it cannot listen.
    """
    library = _library()
    known = _local_devices(library)
    devices = (_Void * len(names))(*(known[name] for name in names))
    if os.path.isdir(_OPEN_FILES):
        threading.Thread(target=_watch_clients, args=(endpoint.port,), daemon=True).start()
    start = _START_SERVER(_function(library, b"ggml_backend_rpc_start_server"))
    start(str(endpoint).encode(), cache.encode() if cache else None, n_threads, len(names), devices)
    raise LlamaError(f"llama.cpp's RPC server cannot listen on {endpoint}; see the log lines above")


def _local_devices(library: ctypes.CDLL) -> dict[str, int]:
    devices = [library.ggml_backend_dev_get(i) for i in range(library.ggml_backend_dev_count())]
    return {library.ggml_backend_dev_name(device).decode(): device for device in devices}


def _watch_clients(port: int) -> None:
    """Ends connections to engines on unreachable machines: llama.cpp would keep waiting for them forever.

    Connections inherit this setting from the listening socket, once it exists.
    """
    while not _end_when_silent(_own_port, port):
        time.sleep(0.05)


def _peer_port(connection: socket.socket) -> int:
    return int(connection.getpeername()[1])


def _own_port(connection: socket.socket) -> int:
    return int(connection.getsockname()[1])


def _end_when_silent(port_of: Callable[[socket.socket], int], port: int) -> bool:
    """`end_when_silent` for the TCP sockets of this process with this port. Returns whether there are any."""
    found = False
    for fd in os.listdir(_OPEN_FILES) if os.path.isdir(_OPEN_FILES) else []:
        with contextlib.suppress(OSError):  # not a socket, or already closed
            copy = os.dup(int(fd))
            try:
                connection = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with connection:
                is_tcp = connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM
                if is_tcp and port_of(connection) == port:
                    end_when_silent(connection)
                    found = True
    return found


def _function(library: ctypes.CDLL, name: bytes) -> Any:
    return library.ggml_backend_reg_get_proc_address(library.ggml_backend_reg_by_name(_NAME), name)


def _library() -> ctypes.CDLL:
    library = ggml()
    for name, restype, *arguments in (
        ("ggml_backend_reg_by_name", _Void, ctypes.c_char_p),
        ("ggml_backend_reg_get_proc_address", _Void, _Void, ctypes.c_char_p),
        ("ggml_backend_register", None, _Void),
        ("ggml_backend_reg_dev_count", _Size, _Void),
        ("ggml_backend_reg_dev_get", _Void, _Void, _Size),
        ("ggml_backend_dev_init", _Void, _Void, ctypes.c_char_p),
        ("ggml_backend_free", None, _Void),
    ):
        function = getattr(library, str(name))
        function.argtypes, function.restype = arguments, restype
    return library
