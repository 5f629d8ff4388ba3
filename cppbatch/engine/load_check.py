"""Tries the files of an engine in a child process before the first load: llama.cpp crashes with some damaged ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cppbatch import child_processes
from cppbatch.config import EngineConfig, setting_name
from cppbatch.errors import ModelError
from cppbatch.findings import build_key, file_key, finding_key, finding_path
from cppbatch.llama.library import library_path
from cppbatch.llama.selfcheck import find_crash
from cppbatch.models.check import check_model
from cppbatch.models.find import model_parts


def check_loads(config: EngineConfig, *, survives_crash: bool = False) -> None:
    """Raises `ModelError` as `check_model`, and if llama.cpp crashes with the model of an engine or an adapter of it.

    `survives_crash`: the model is not tried, because this process is a worker, whose end its server reports. A file
    that has passed is not tried again until it, llama.cpp or cppbatch changes. Other errors are left to the load.
    """
    if not Path(config.model_path).is_file():
        return
    check_model(Path(config.model_path))  # takes less time than a process
    if not survives_crash:
        _check(config.model_path, [config.model_path], config.kv_overrides)
    for adapter, _ in config.lora:
        _check(adapter, [config.model_path, adapter])


def _check(blamed: str, files: Sequence[str], overrides: Sequence[str] = ()) -> None:
    parts = [part for file in files for part in model_parts(Path(file))]
    verdict = finding_path("loads", finding_key(Path(library_path()).parent, parts, *overrides))
    command = [*load_command(files), *(f"--override-kv={each}" for each in overrides)]
    if crash := find_crash(blamed, verdict, command, 600):  # seconds, for a large file on a slow disk
        if overrides:
            raise ModelError(
                f"{blamed} cannot be used: llama.cpp crashes ({crash}) with these metadata or with the file itself; "
                f"check {setting_name('kv_overrides')}"
            )
        raise ModelError(
            f"{blamed} cannot be used: llama.cpp crashes when it loads the file or computes with it ({crash}). "
            "Download it again, or use another file"
        )


def check_projector(path: str, model_path: str) -> None:
    """Raises `ModelError` if llama.cpp crashes when loading this file, or when encoding an image or audio with it.

    As for models, a file that has passed is not tried again. Other errors are left to `MediaEncoder`.
    """
    if not Path(path).is_file():
        return
    verdict = finding_path("projectors", f"{build_key(Path(library_path()).parent)}-{file_key(Path(path))}")
    if crash := find_crash(path, verdict, projector_command(path, model_path)):
        raise ModelError(
            f"{path} cannot be used: llama.cpp crashes when loading it ({crash}), for example because of missing "
            "tensors. Download it again, or use another projector for this model"
        )


def load_command(files: Sequence[str]) -> list[str]:
    """The command of the child process that loads a model, and an adapter."""
    return child_processes.child_command("cppbatch.llama.load_child", *files)


def projector_command(path: str, model_path: str) -> list[str]:
    """The command of the child process that encodes with a projector."""
    return child_processes.child_command("cppbatch.llama.projector_child", model_path, path)
