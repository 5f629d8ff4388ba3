"""Models on the Hugging Face hub by name: OWNER/REPO, OWNER/REPO:Q4_K_M, OWNER/REPO:FILE.gguf.

Files of a repository are stored in the folder OWNER/REPO of the models folder, so downloaded models need no network.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from cppbatch.child_processes import child_command, run
from cppbatch.errors import ModelError
from cppbatch.extras import require
from cppbatch.models.check import check_model
from cppbatch.models.find import (
    LATER_PART,
    check_file,
    files_below,
    is_copy,
    is_projector,
    model_parts,
    models_folder,
    models_in,
    short_name,
)
from cppbatch.models.requantize import part_folder

_NAME = re.compile(r"([\w.-]+)/([\w.-]+)(?::([\w./-]+))?")
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_TYPE = re.compile(r"(?:^|[./-])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4|BF16|F16|F32))$", re.IGNORECASE)
_USUAL_TYPE = "Q4_K_M"  # as in llama.cpp
_HUB = "https://huggingface.co"

Say = Callable[[str], object]
Starts = Callable[[str, int], object]


class HubModel(NamedTuple):
    """A model on the hub."""

    repository: str
    """OWNER/REPO."""
    choice: str = ""
    """A weight type, a file name or a pattern; "": the default."""

    def __str__(self) -> str:
        return f"{self.repository}:{self.choice}" if self.choice else self.repository


def hub_model(name: str) -> HubModel | None:
    """The hub model with this name; None if it looks like a file."""
    found = _NAME.fullmatch(name)
    if not found or (found[3] is None and (name.endswith(".gguf") or Path(found[1]).is_dir())):
        return None
    return HubModel(f"{found[1]}/{found[2]}", found[3] or "")


def bytes_so_far(model: HubModel, root: Path) -> int:
    """The bytes of the repository's files in a models folder, also of those that are being downloaded."""
    found = 0
    for path in (root / model.repository).rglob("*"):
        if path.name.endswith((".gguf", ".incomplete")):
            with contextlib.suppress(OSError):  # it was renamed meanwhile
                found += path.stat().st_size
    return found


def present_file(model: HubModel, root: Path | None = None) -> Path | None:
    """The model's file in the models folder, if all its parts exist. Without a choice, any file of the repository is
    accepted. `root`: another models folder. Raises `ModelError` if a file is damaged."""
    folder = (root or models_folder()) / model.repository
    files = sorted(files_below(folder))
    whole = [path for path in files if not any(is_copy(path, each) for each in files)]
    whole = [path for path in whole if all(part.exists() for part in model_parts(path))]
    found = choose_file((path.relative_to(folder).as_posix() for path in whole), model.choice)
    return check_model(folder / found) if found else None


def pull_model(
    model: HubModel,
    say: Say = lambda line: None,
    root: Path | None = None,
    starts: Starts = lambda file, size: None,
    *,
    in_child: bool = False,
) -> Path:
    """The path of the model's file, downloaded if missing. `say` gets a line before the download, and `starts` the file
    and the bytes of all its parts. `root`: another models folder. `in_child`: a child process downloads, without a
    progress bar; `child_processes.to_thread` ends it if it is cancelled.

    The hub client shows the progress, resumes interrupted downloads, and reads $HF_TOKEN, $HF_ENDPOINT and
    $HF_HUB_OFFLINE. Raises `ModelError`, and `ConfigError` without the client (the extra `hub`).
    """
    if present := present_file(model, root):
        return present
    fetched = _fetch(model, lambda sizes: choose_files(model, sizes), say, root, starts, in_child=in_child)
    return check_model(fetched[0])


def pull_projector(
    model: HubModel,
    say: Say = lambda line: None,
    root: Path | None = None,
    starts: Starts = lambda file, size: None,
    *,
    in_child: bool = False,
) -> Path | None:
    """The path of a model's projector; None: no projector. Downloaded if the model is not local.

    Call this before `pull_model`, so that a local model also has its projector. Arguments and errors as there.
    """
    if present := present_file(model, root):
        found = projector_below((root or models_folder()) / model.repository, present)
        return check_file(found) if found else None

    def choose(sizes: dict[str, int]) -> list[str]:
        found = choose_projector(sizes, choose_files(model, sizes)[0])
        return [found] if found else []

    fetched = _fetch(model, choose, say, root, starts, in_child=in_child)
    return check_file(fetched[0]) if fetched else None


def pull_whole(
    model: HubModel,
    say: Say = lambda line: None,
    root: Path | None = None,
    starts: Starts = lambda file, size: None,
    *,
    in_child: bool = False,
) -> Path:
    """Downloads a model with its projector. Raises as `pull_model`."""
    pull_projector(model, say, root, starts, in_child=in_child)
    return pull_model(model, say, root, starts, in_child=in_child)


def _fetch(
    model: HubModel,
    choose: Callable[[dict[str, int]], list[str]],
    say: Say,
    root: Path | None = None,
    starts: Starts = lambda file, size: None,
    *,
    in_child: bool = False,
) -> list[Path]:
    """Downloads the files of a model selected by `choose`, which gets the repository's files with their sizes."""
    require("huggingface_hub", f"downloading {model} from the hub")
    import huggingface_hub as hub

    folder = (root or models_folder()) / model.repository
    say(f"looking for {model} on {hub_address()}")
    try:
        sizes = file_sizes(hub, model.repository)
        files = choose(sizes)
        if not files:
            return []
        n_bytes = sum(sizes[file] for file in files)
        folder.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(folder).free) < n_bytes:
            raise ModelError(f"{model} has {n_bytes / 1e9:.2f} GB, but {folder} has only {free / 1e9:.2f} GB free")
        say(f"downloading {files[0]} from {model.repository} ({n_bytes / 1e9:.2f} GB) into {folder}/")
        starts(files[0], n_bytes)
        for file in files:
            (_download_in_child if in_child else _download)(model.repository, file, str(folder))
    except ModelError:
        raise
    except Exception as error:  # the hub's, its HTTP client's, and the system's
        raise ModelError(reason_of(hub, model, error)) from error
    return [folder / file for file in files]


def _download(repository: str, file: str, folder: str) -> None:
    import huggingface_hub as hub

    hub.hf_hub_download(repository, file, local_dir=folder, endpoint=_endpoint())


def _download_in_child(repository: str, file: str, folder: str) -> None:
    """The file appears when it is complete; of a download that is stopped, nothing remains. Raises `ModelError`."""
    with part_folder(Path(folder)) as part:
        command = child_command(__name__, repository, file, str(part))
        done = run(command, seconds=None, env={"HF_HUB_DISABLE_PROGRESS_BARS": "1"})
        if done.returncode:
            raise ModelError(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
        target = Path(folder, file)
        target.parent.mkdir(parents=True, exist_ok=True)
        (part / file).replace(target)


def _main(repository: str, *arguments: str) -> None:
    """The program of the child."""
    import huggingface_hub as hub

    try:
        _download(repository, *arguments)
    except Exception as error:  # the hub's, its HTTP client's, and the system's
        sys.exit(reason_of(hub, HubModel(repository), error))


def choose_file(files: Iterable[str], choice: str) -> str | None:
    """The repository file selected by `choice`; for a split model, its first part.

    `choice`: a file, a pattern such as *Q8_0.gguf, or a weight type; "": Q4_K_M, or else the first file. None: not
    found.
    """
    models = sorted((f for f in files if _is_model(f)), key=lambda file: (len(file), file))
    if choice.endswith(".gguf"):
        patterns = choice, f"*/{choice}"
        return next((file for file in models if any(fnmatchcase(file, pattern) for pattern in patterns)), None)
    of_type = (file for file in models if _has_type(file, choice or _USUAL_TYPE))
    return next(of_type, models[0] if models and not choice else None)


def choose_projector(files: Iterable[str], model: str) -> str | None:
    """The projector (mmproj) of a model among its repository's files, chosen as in llama.cpp, if there is one.

    The one in the nearest folder above the model; of several, the one with the most similar bits per weight, so that
    most models get F16 or BF16 rather than F32.
    """

    def distance(file: str) -> tuple[int, int, int, str]:
        return -file.count("/"), abs(_bits(file) - _bits(model)), len(file), file

    projectors = (file for file in files if is_projector(file.rsplit("/", 1)[-1]))
    above = [file for file in projectors if f"{model}/".startswith(file.rpartition("/")[0])]
    return min(above, key=distance, default=None)


def projector_below(folder: Path, model: Path) -> Path | None:
    """The projector in this folder for a model in it; None: there is none."""
    files = (path.relative_to(folder).as_posix() for path in files_below(folder))
    found = choose_projector(files, model.relative_to(folder).as_posix())
    return folder / found if found else None


def projector_beside(model: Path, root: Path) -> Path | None:
    """The projector in the folder of a model below the models folder `root`, or in the folder of its repository. None:
    there is none, or the folder has other models than this one in several types of weights."""
    for folder in takewhile(lambda each: each != root, model.parents):
        if found := projector_below(folder, model):
            names = {_TYPE.sub("", short_name(path)) for path in models_in(folder)}
            return found if len(names) == 1 else None
    return None


def _bits(file: str) -> int:
    """The bits of the weights, by the name of their type; 0 if the file's name has none."""
    found = _TYPE.search(_PART.sub("", file.removesuffix(".gguf")))
    return int(digits[0]) if found and (digits := re.search(r"\d+", found[1])) else 0


def model_files(files: Iterable[str]) -> list[str]:
    """The models among a repository's files; of a split model the first part."""
    return sorted(file for file in files if _is_model(file))


def weight_type(file: str) -> str:
    """The type of weights at the end of a file's name, or of its folder's; "": none."""
    found = _TYPE.search(_PART.sub("", file.removesuffix(".gguf"))) or _TYPE.search(file.rpartition("/")[0])
    return found[1] if found else ""


def _is_model(file: str) -> bool:
    name = file.rsplit("/", 1)[-1]
    return name.endswith(".gguf") and not LATER_PART.search(name) and not is_projector(name)


def _has_type(file: str, kind: str) -> bool:
    """Whether the name of a file, or of its folder, ends with a type of weights."""
    folder, _, name = file.rpartition("/")
    names = (_PART.sub("", name.removesuffix(".gguf")), folder)
    return any(re.search(rf"(?:^|[./-]){re.escape(kind)}$", each, re.IGNORECASE) for each in names)


def file_sizes(hub: Any, repository: str) -> dict[str, int]:
    """The files of a repository with their bytes."""
    api = hub.HfApi(endpoint=_endpoint())
    info = api.model_info(repository, files_metadata=True, timeout=10)  # listing the tree retries for 23 s
    return {each.rfilename: each.size or 0 for each in info.siblings or ()}


def _endpoint() -> str | None:
    """$MODEL_ENDPOINT (llama.cpp's name) or $HF_ENDPOINT; read now: the client reads it when it is imported."""
    return os.environ.get("MODEL_ENDPOINT") or os.environ.get("HF_ENDPOINT")


def hub_address() -> str:
    """The address of the hub, or of its mirror."""
    return _endpoint() or _HUB


def choose_files(model: HubModel, sizes: dict[str, int]) -> list[str]:
    """The files to fetch: one, or all parts of a split model. Raises `ModelError`."""
    models = model_files(sizes)
    if not models:
        raise ModelError(f"{model.repository} has no GGUF files. Look for a repository with -GGUF in its name")
    found = choose_file(models, model.choice)
    if found is None:
        types = {weight_type(file) for file in models} - {""}
        there = sorted(types) if types and not model.choice.endswith(".gguf") else models
        shown = ", ".join(there[:12]) + (" ..." if len(there) > 12 else "")
        raise ModelError(f"{model.choice} not found in {model.repository}; available: {shown}")
    missing = [part.as_posix() for part in model_parts(Path(found)) if part.as_posix() not in sizes]
    if missing:
        raise ModelError(f"{model.repository} lacks {', '.join(missing)}, a part of {found}")
    return [part.as_posix() for part in model_parts(Path(found))]


def reason_of(hub: Any, model: HubModel, error: Exception) -> str:
    """Why a model could not be downloaded, in a sentence."""
    where = hub_address()
    if isinstance(error, hub.errors.GatedRepoError):
        return (
            f"{model.repository} requires you to accept its terms: open {where}/{model.repository}, then set HF_TOKEN"
        )
    if isinstance(error, hub.errors.RepositoryNotFoundError):
        return (
            f"{model} is neither an existing file nor, on {where}, a repository ({model.repository}). If it "
            "is private, set HF_TOKEN"
        )
    if isinstance(error, hub.errors.OfflineModeIsEnabled):
        return f"{model} has not been downloaded, and HF_HUB_OFFLINE is set: unset it, or give a GGUF file with -m"
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f"{model} could not be downloaded from {where}: {first}. Check the network, or give a GGUF file with -m"


if __name__ == "__main__":
    _main(*sys.argv[1:])
