"""What llama.cpp has allocated is freed once: by `close`, or when the last reference to it goes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any


class Owned:
    """A pointer of llama.cpp, or several. `close` frees it; so does garbage collection once nothing refers to this.

    What must be freed later is kept alive until then (`needs`, `keep`), so the order is right in reference cycles too:
    the collector runs their finalizers in any order. Nothing in `needs` may refer to this object. A forked process
    frees nothing: llama.cpp's threads, devices and connections belong to its parent.
    """

    def __init__(self, pointer: Any, free: Callable[[Any], object], *needs: object) -> None:
        """`free`: called with `pointer`, from any thread."""
        self._pointers = [pointer]  # emptied when it is freed
        self._needs = [*needs]
        self._finalizer = weakref.finalize(self, _free, self._pointers, free, os.getpid(), self._needs)
        self._finalizer.atexit = False  # another thread may still compute with it

    def keep(self, needed: object) -> None:
        """Keeps an object alive until the pointer is freed."""
        self._needs.append(needed)

    @property
    def pointer(self) -> Any:
        """None once it is freed."""
        return self._pointers[0] if self._pointers else None

    def close(self) -> None:
        """Frees the pointer. A second call does nothing."""
        if called := self._finalizer.detach():
            _free(*called[2])


def _free(pointers: list[Any], free: Callable[[Any], object], pid: int, needs: list[object]) -> None:
    pointer = pointers.pop()
    if os.getpid() == pid:
        free(pointer)
    needs.clear()
