"""An RPC worker whose device is a card: it reports the given memory, and refuses buffers that exceed it.

    python tests/support/rpc_card.py FILE [flags of `cppbatch rpc-worker`]        FILE: holds the number of bytes

llama.cpp's RPC server reports what its device does, and has no limit to set. So the worker's child process replaces two
functions of ggml's device: the one that reports memory, and the one that allocates buffers.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cppbatch.child_processes import child_command
from cppbatch.llama.library import ggml

Pointer, Size = ctypes.c_void_p, ctypes.c_size_t
_GET_MEMORY = 2  # `ggml_backend_device_i`: get_name, get_description, get_memory
_ALLOC = 1  # `ggml_backend_buffer_type_i`: get_name, alloc_buffer
_FREE = 0  # `ggml_backend_buffer_i`
_IN_CHILD = "--in-child"

_Memory = ctypes.CFUNCTYPE(None, Pointer, ctypes.POINTER(Size), ctypes.POINTER(Size))
_Alloc = ctypes.CFUNCTYPE(Pointer, Pointer, Size)
_Free = ctypes.CFUNCTYPE(None, Pointer)
_replaced: list[Any] = []  # must not be collected while ggml calls them


class Card:
    """The memory of one device."""

    def __init__(self, device: int, total: Path) -> None:
        self._file = total
        self._held: dict[int, int] = {}
        library = ggml()
        library.ggml_backend_dev_buffer_type.argtypes, library.ggml_backend_dev_buffer_type.restype = [Pointer], Pointer
        buffers = library.ggml_backend_dev_buffer_type(device)
        _replace(device, _GET_MEMORY, _Memory, self._report)
        self._alloc = _replace(buffers, _ALLOC, _Alloc, self._allocate)
        self._free: Any = None

    @property
    def _total(self) -> int:
        return int(self._file.read_text())

    def _report(self, _device: int, free: Any, total: Any) -> None:
        total[0] = self._total
        free[0] = max(0, total[0] - sum(self._held.values()))

    def _allocate(self, kind: int, size: int) -> int | None:
        if size > self._total - sum(self._held.values()) or not (buffer := self._alloc(kind, size)):
            return None
        self._held[buffer] = size
        earlier = _replace(buffer, _FREE, _Free, self._release)
        self._free = self._free or earlier  # each buffer has its own table, with the same function
        return int(buffer)

    def _release(self, buffer: int) -> None:
        del self._held[buffer]
        self._free(buffer)


def _replace(table: int, index: int, kind: Any, function: Callable[..., Any]) -> Any:
    """Sets a function of a table of ggml. Returns the earlier one."""
    functions = (Pointer * (index + 1)).from_address(table)
    earlier = kind(functions[index])
    replacement = kind(function)
    _replaced.append(replacement)
    functions[index] = ctypes.cast(replacement, Pointer).value
    return earlier


def _serve(total: Path) -> None:
    from cppbatch.llama.backend import Backend
    from cppbatch.llama.rpc_server_child import main

    Backend.get()
    library = ggml()
    library.ggml_backend_dev_get.argtypes, library.ggml_backend_dev_get.restype = [Size], Pointer
    cards = [Card(library.ggml_backend_dev_get(i), total) for i in range(library.ggml_backend_dev_count())]
    assert cards
    main()


def _run_worker(total: str, flags: list[str]) -> None:
    from cppbatch.cli import main
    from cppbatch.cluster import rpc_server_process

    server = child_command(__file__, _IN_CHILD, total)
    vars(rpc_server_process)["child_command"] = lambda _: server
    sys.argv = ["cppbatch", "rpc-worker", *flags]
    main()


if __name__ == "__main__":
    if sys.argv[1] == _IN_CHILD:
        _serve(Path(sys.argv[2]))
    else:
        _run_worker(sys.argv[1], sys.argv[2:])
