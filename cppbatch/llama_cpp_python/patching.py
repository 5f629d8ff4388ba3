"""`patch`: llama_cpp.Llama is ours, for the libraries of this process that make such objects themselves."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from cppbatch.llama_cpp_python.llama import Llama

_ORIGINAL = Llama.__mro__[1]


class PatchedLlama(Llama):
    """`cppbatch.Llama` under the name of the original: so `undo` knows what it has replaced."""


class patch:
    """Puts `cppbatch.Llama` in the place of `llama_cpp.Llama`.

        cppbatch.patch()

        with cppbatch.patch():
            ...  # in here only

    Modules that have imported the class by its name get ours too. `undo`, or the end of the block, restores them.
    """

    def __init__(self) -> None:
        for namespace, name in _names_of(_ORIGINAL):
            namespace[name] = PatchedLlama

    def undo(self) -> None:
        """Restores what `patch` has replaced, also in modules that were imported meanwhile."""
        for namespace, name in _names_of(PatchedLlama):
            namespace[name] = _ORIGINAL

    def __enter__(self) -> patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def _names_of(cls: type) -> list[tuple[dict[str, Any], str]]:
    """The namespaces of modules, and the names in them, that are bound to a class; not those of this project."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] != "cppbatch"]
    namespaces = [getattr(module, "__dict__", {}) for module in modules]
    return [(each, name) for each in namespaces for name, value in list(each.items()) if value is cls]
