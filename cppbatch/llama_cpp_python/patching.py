"""`patch`: replaces llama_cpp.Llama, for libraries in this process that create such objects themselves."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from cppbatch.llama_cpp_python.llama import Llama

_ORIGINAL = Llama.__mro__[1]


class PatchedLlama(Llama):
    """`cppbatch.Llama` under the name of the original, so that `undo` can find the replaced names."""


class patch:
    """Replaces `llama_cpp.Llama` by `cppbatch.Llama`.

        cppbatch.patch()

        with cppbatch.patch():
            ...  # only in this block

    Also replaces the class in modules that have imported it by name. `undo`, or the end of the block, restores it.
    """

    def __init__(self) -> None:
        for namespace, name in _names_of(_ORIGINAL):
            namespace[name] = PatchedLlama

    def undo(self) -> None:
        """Restores the replaced names, including those in modules imported since `patch`."""
        for namespace, name in _names_of(PatchedLlama):
            namespace[name] = _ORIGINAL

    def __enter__(self) -> patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def _names_of(cls: type) -> list[tuple[dict[str, Any], str]]:
    """The module namespaces and names that are bound to a class, except those of this project."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] != "cppbatch"]
    namespaces = [getattr(module, "__dict__", {}) for module in modules]
    return [(each, name) for each in namespaces for name, value in list(each.items()) if value is cls]
