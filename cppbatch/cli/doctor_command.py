"""`cppbatch doctor`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
from rich.console import Console
from rich.markup import escape

import cppbatch
from cppbatch.config import EngineConfig, available_threads
from cppbatch.engine.compute_threads import usable_cpus
from cppbatch.errors import ConfigError, CppBatchError
from cppbatch.findings import computes_on_cpu_only

if TYPE_CHECKING:
    from cppbatch.llama import Backend


_WATCH_S = 0.5
_DRM = Path("/sys/class/drm")
_MAKERS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}  # PCI's numbers, as in scripts/install.py
_INTEGRATED, _INTEL_INTEGRATED = "integrated", "0000:00:02.0"  # the place on the bus of the GPU in Intel's processors


class Finding(NamedTuple):
    """The result of a check."""

    name: str
    found: str
    remedy: str | None = None
    """What to do about a problem; None: no problem."""
    is_note: bool = False
    """Not a problem, but could be improved."""


@click.command()
def doctor() -> None:
    """Check this installation, and name the remedy for each problem.

    Shows versions, devices, the self-check and the model.
    """
    console = Console(soft_wrap=True)
    problems = 0
    for name, found, remedy, is_note in _findings():
        color, mark = ("red", "x") if remedy else ("yellow", "!") if is_note else ("green", "ok")
        console.print(f"[{color}]{mark:>2}[/] {name:<12} {escape(found)}")
        if remedy:
            problems += 1
            console.print(f"   {'':<12} -> {escape(remedy)}")
    console.print(f"\n{problems} problem{'s' * (problems != 1)}" if problems else "\nno problems")
    sys.exit(1 if problems else 0)


def _findings() -> Iterator[Finding]:
    yield Finding("cppbatch", f"{cppbatch.__version__}, Python {sys.version.split()[0]}")
    yield Finding("threads", f"{available_threads()} compute threads (one per core available to this process)")
    yield _other_programs()
    from cppbatch.llama import Backend
    from cppbatch.llama.library import PINNED_VERSION

    try:
        backend = Backend.get()
    except CppBatchError as error:
        yield Finding("llama.cpp", "not usable", str(error))
        return
    yield Finding("llama.cpp", f"{backend.version} in llama-cpp-python {PINNED_VERSION}")
    yield Finding("library", backend.library_path)
    yield Finding("build", ", ".join(flag.removesuffix(" = 1") for flag in backend.build_flags))
    if backend.cpu_variant:
        yield Finding("variant", f"{backend.cpu_variant}: of the CPU kernels in this wheel, the fastest that run here")
    for device in backend.devices():
        memory = f"{device.memory_free / 2**30:.1f} of {device.memory_total / 2**30:.1f} GiB free"
        yield Finding("device", f"{device.name}: {device.description} ({device.kind}, {memory})")
    yield from _unused_gpus(backend)
    yield _rpc(backend)
    yield _media()
    yield _self_check()
    yield from _model()


def _other_programs() -> Finding:
    from cppbatch.bench.resource_usage import watch_other_programs

    others = watch_other_programs(_WATCH_S)
    if others.cores < 0.3:
        return Finding("cores", "not used by other programs")
    names = ", ".join(f"{each.name} (process {each.pid}) {each.cores:.1f}" for each in others.busiest)
    return Finding(
        "cores",
        f"other programs use {others.cores:.1f} of {len(usable_cpus())}{': ' if names else ''}{names}. Until they end, "
        "steps use fewer threads, and `tune` and `bench` report figures that are too low: stop them, or wait for them "
        "to finish",
        is_note=True,
    )


def _unused_gpus(backend: Backend) -> Iterator[Finding]:
    """GPUs of this machine, if the library has no device for any of them."""
    gpus = _gpus()
    if backend.supports_gpu or not gpus:
        return
    names = ", ".join(dict.fromkeys(gpus))
    if computes_on_cpu_only(Path(backend.library_path).parent):
        nvidia = "NVIDIA" in gpus
        wanted = "once CUDA's toolkit is installed, python3" if nvidia else "CPPBATCH_BACKEND=vulkan python3"
        text = f"this build does not use it; {wanted} scripts/install.py builds for it (docs/gpu.md)"
    else:
        text = "this build has code for GPUs, but its driver shows none to this user (docs/gpu.md)"
    yield Finding("gpu", f"{names}: {text}", is_note=any(_INTEGRATED not in gpu for gpu in gpus))


def _gpus() -> list[str]:
    """The makers of the GPUs that Linux lists, whether or not they have a driver that llama.cpp can use."""
    found = []
    for file in sorted(_DRM.glob("card[0-9]*/device/vendor")):
        maker = _MAKERS.get(file.read_text().strip())
        is_integrated = maker == "Intel" and file.parent.resolve().name == _INTEL_INTEGRATED
        if maker:
            found.append(f"{_INTEGRATED} {maker}" if is_integrated else maker)
    return found


def _rpc(backend: Backend) -> Finding:
    from cppbatch.rpc_endpoint import PROTOCOL

    if backend.supports_rpc:
        return Finding("RPC", f"version {PROTOCOL}: --rpc and `cppbatch rpc-worker` work")
    return Finding("RPC", "not included in this build; scripts/install.py builds with it", is_note=True)


def _media() -> Finding:
    from cppbatch.engine.media.files import check_decoders
    from cppbatch.llama.media_encoder import has_mtmd

    if not has_mtmd():
        return Finding(
            "media", "text only: this build does not include mtmd; scripts/install.py builds with it", is_note=True
        )
    try:
        check_decoders("image", "audio")
    except ConfigError as error:
        return Finding("media", f"incomplete: {error}", is_note=True)
    return Finding("media", "--mmproj works: images and audio")


def _self_check() -> Finding:
    from cppbatch.llama.library import REINSTALL
    from cppbatch.llama.selfcheck import check

    verdict = check()
    if verdict.fast_path_works:
        return Finding("self-check", "this build works on this CPU")
    state = "works only without its fast path" if verdict.plain_path_works else "does not work"
    return Finding("self-check", f"this build {state} on this CPU: {verdict.detail}", f"rebuild it: {REINSTALL}")


def _model() -> Iterator[Finding]:
    from cppbatch.models.find import check_file, models_folder, models_in
    from cppbatch.models.pull import present_model

    folder = models_folder()
    found = models_in(folder)
    if not found:
        yield Finding("model", f"none in {folder}/", "download the default model: cppbatch models pull")
        return
    chosen = present_model()
    if chosen is None:
        yield Finding(
            "model", f"{len(found)} in {folder}/; choose one with -m, otherwise the default model is downloaded"
        )
        return
    try:
        yield Finding("model", str(check_file(chosen)))
        yield _kernels(chosen)
        yield from _repacking(chosen)
        yield from _attention(chosen)
    except CppBatchError as error:
        yield Finding("model", str(chosen), str(error))


def _kernels(model: Path) -> Finding:
    from cppbatch.models.batch_gain import kernel_report

    report = kernel_report(model)
    return Finding("kernels", str(report), is_note=report.advice is not None)


def _repacking(model: Path) -> Iterator[Finding]:
    from cppbatch.models.kernels import has_gpu, why_not_repacked

    if not has_gpu() and (why := why_not_repacked(model, EngineConfig(str(model)).n_parallel)):
        yield Finding("repacking", why)


def _attention(model: Path) -> Iterator[Finding]:
    from cppbatch.sizing.attention import plan_attention

    plan = plan_attention(EngineConfig(str(model)), ())
    if plan.line or not plan.proposal:
        with_load = f" with {plan.load}" if plan.load else ""
        kept = f"llama.cpp's choice, with cells in f16: no alternative is clearly faster{with_load}"
        yield Finding("attention", plan.line or kept)
    if plan.proposal:
        yield Finding("attention", plan.proposal, is_note=True)
