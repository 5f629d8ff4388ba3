"""The unit ring: no native library, no model file, no child process. This file enforces it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from cppbatch.engine.grammar import grammar_child
from cppbatch.engine.grammar.grammar_check import GrammarChecker
from cppbatch.jobs.batches.store import BatchStore
from cppbatch.server.address import Address

_TOKENIZER = grammar_child.bytes_tokenizer()


class _NoLlamaCpp:
    """An import hook: every import of llama_cpp fails, as if llama-cpp-python were not installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] == "llama_cpp":
            raise ModuleNotFoundError("the unit ring must not import llama_cpp", name=name)
        return None


def _no_process(*_arguments: Any, **_settings: Any) -> NoReturn:
    raise AssertionError("the unit ring must not start a child process")


def _check_here(_checker: GrammarChecker, field: str, text: str) -> str:
    return json.dumps(grammar_child.check(_TOKENIZER, field, text))


@pytest.fixture(scope="package", autouse=True)
def only_python() -> Iterator[None]:
    """Fails each test of this ring that loads llama.cpp or starts a process."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "llama_cpp"}
    hook = _NoLlamaCpp()
    sys.meta_path.insert(0, hook)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", _no_process)
        patch.setattr(os, "fork", _no_process, raising=False)
        patch.setattr(os, "posix_spawn", _no_process, raising=False)
        patch.setattr(Address, "check", lambda _: None)  # a server may run on the default port
        patch.setattr(GrammarChecker, "_ask", _check_here)  # the child's own code, without the child
        yield
    sys.meta_path.remove(hook)
    assert not any(name.partition(".")[0] == "llama_cpp" for name in sys.modules)
    sys.modules.update(hidden)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    """A new database of batch jobs."""
    store = BatchStore(tmp_path / "jobs.sqlite3")
    yield store
    store.close()
