"""Tests a projector in a child process before the engine loads it: a damaged one crashes llama.cpp."""

from __future__ import annotations

import logging
from pathlib import Path

from cppbatch import child_processes
from cppbatch.errors import ModelError
from cppbatch.findings import build_key, file_key, finding_path, read_finding, write_finding
from cppbatch.llama.library import library_path
from cppbatch.llama.selfcheck import run_child

log = logging.getLogger("cppbatch.engine")

_FINE = "fine"


def check_projector(path: str, model_path: str) -> None:
    """Raises `ModelError` if llama.cpp crashes when loading this file, or when encoding an image or audio with it.

    Successful tests are cached per file and build. Other errors are left to `MediaEncoder`, which reports them.
    """
    if not Path(path).is_file():
        return
    key = f"{build_key(Path(library_path()).parent)}-{file_key(Path(path))}"
    verdict = finding_path("projectors", key)
    if read_finding(verdict, str) == _FINE:
        return
    failure = run_child(child_command(path, model_path))
    if failure is None:
        write_finding(verdict, _FINE)
    elif failure.crashed:
        raise ModelError(
            f"{path} cannot be used: llama.cpp crashes when loading it ({failure.text}), for example because of "
            "missing tensors. Download it again, or use another projector for this model"
        )
    else:
        log.info("could not check %s: %s", path, failure.text)


def child_command(path: str, model_path: str) -> list[str]:
    """The command of the child process."""
    return child_processes.child_command("cppbatch.llama.projector_child", model_path, path)
