"""Tries the files of an engine in a child process before the first load: llama.cpp crashes with some damaged ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from cppbatch import child_processes
from cppbatch.config import EngineConfig
from cppbatch.errors import ModelError
from cppbatch.findings import finding_key, finding_path, read_finding, write_finding
from cppbatch.llama.library import library_path
from cppbatch.llama.selfcheck import run_child
from cppbatch.models.check import check_model
from cppbatch.models.find import model_parts

log = logging.getLogger("cppbatch.engine")

_FINE = "fine"
_TIMEOUT_S = 600  # a large file from a slow disk


def check_loads(config: EngineConfig, *, survives_crash: bool = False) -> None:
    """Raises `ModelError` as `check_model`, and if llama.cpp crashes with the model of an engine or an adapter of it.

    `survives_crash`: the model is not tried, because this process is a worker, whose end its server reports. A file
    that has passed is not tried again until it, llama.cpp or cppbatch changes. Other errors are left to the load.
    """
    if not Path(config.model_path).is_file():
        return
    check_model(Path(config.model_path))  # takes less time than a process
    if not survives_crash:
        _check(config.model_path, [config.model_path])
    for adapter, _ in config.lora:
        _check(adapter, [config.model_path, adapter])


def _check(blamed: str, files: Sequence[str]) -> None:
    parts = [part for file in files for part in model_parts(Path(file))]
    verdict = finding_path("loads", finding_key(Path(library_path()).parent, parts))
    if read_finding(verdict, str) == _FINE:
        return
    failure = run_child(child_command(files), _TIMEOUT_S)
    if failure is None:
        write_finding(verdict, _FINE)
    elif failure.crashed:
        raise ModelError(
            f"{blamed} cannot be used: llama.cpp crashes when it loads the file or computes with it ({failure.text}). "
            "Download it again, or use another file"
        )
    else:
        log.info("could not check %s: %s", blamed, failure.text)


def child_command(files: Sequence[str]) -> list[str]:
    """The command of the child process."""
    return child_processes.child_command("cppbatch.llama.load_child", *files)
