"""`cppbatch doctor`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click
from rich.console import Console
from rich.markup import escape

import cppbatch
from cppbatch.config import available_threads
from cppbatch.errors import CppBatchError

Finding = tuple[str, str, str | None]
"""What was checked, what was found, and what to do about it (None: no problem)."""


@click.command()
def doctor() -> None:
    """Shows versions, devices, the self-check and the model, and how to fix each problem."""
    console = Console(soft_wrap=True)
    problems = 0
    for name, found, advice in _findings():
        console.print(f"[{'red' if advice else 'green'}]{'x' if advice else 'ok':>2}[/] {name:<12} {escape(found)}")
        if advice:
            problems += 1
            console.print(f"   {'':<12} -> {escape(advice)}")
    console.print(f"\n{problems} problem{'s' * (problems != 1)}" if problems else "\nno problems")
    sys.exit(1 if problems else 0)


def _findings() -> Iterator[Finding]:
    yield "cppbatch", f"{cppbatch.__version__}, Python {sys.version.split()[0]}", None
    yield "threads", f"{available_threads()} compute threads (one per core that this process may use)", None
    from cppbatch.llama import Backend
    from cppbatch.llama.library import PINNED_VERSION

    try:
        backend = Backend.get()
    except CppBatchError as error:
        yield "llama.cpp", "not usable", str(error)
        return
    yield "llama.cpp", f"{backend.version} in llama-cpp-python {PINNED_VERSION}", None
    yield "library", backend.library_path, None
    yield "build", ", ".join(flag.removesuffix(" = 1") for flag in backend.build_flags), None
    for device in backend.devices():
        memory = f"{device.memory_free / 2**30:.1f} of {device.memory_total / 2**30:.1f} GiB free"
        yield "device", f"{device.name}: {device.description} ({device.kind}, {memory})", None
    yield _self_check()
    yield _model()


def _self_check() -> Finding:
    from cppbatch.llama.library import REINSTALL
    from cppbatch.llama.selfcheck import check

    verdict = check()
    if verdict.fast_path_works:
        return "self-check", "this build works on this CPU", None
    state = "works only without its fast path" if verdict.plain_path_works else "does not work"
    return "self-check", f"this build {state} on this CPU: {verdict.detail}", f"rebuild it: {REINSTALL}"


def _model() -> Finding:
    from cppbatch.models.find import check_file, models_folder, models_in
    from cppbatch.models.pull import DEFAULT

    folder = models_folder()
    found = models_in(folder)
    if not found:
        return "model", f"none in {folder}/", "download the default model: cppbatch models pull"
    chosen = found[0] if len(found) == 1 else folder / DEFAULT.file_name
    if chosen not in found:
        return (
            "model",
            f"{len(found)} in {folder}/; choose one with -m, or the default model is downloaded",
            None,
        )
    try:
        return "model", str(check_file(chosen)), None
    except CppBatchError as error:
        return "model", str(chosen), str(error)
