"""The models folder, the files of a model, and a basic check of a file."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from platformdirs import user_data_path

from cppbatch.errors import ModelError

log = logging.getLogger("cppbatch.models")

_HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of metadata entries
_FIRST_PART = re.compile(r"(.*)-00001-of-(?!00000)(\d{5})\.gguf$")
_WEIGHT_TYPE = re.compile(r"[.-](I?Q\d\w*|TQ\d\w*|MXFP4\w*|NVFP4|BF16|F16|F32)$", re.IGNORECASE)
LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def models_folder() -> Path:
    """The folder of models: $CPPBATCH_MODELS, else ./models if it exists, else the user's data folder.

    Raises `ModelError` if $CPPBATCH_MODELS is not valid UTF-8.
    """
    if named := os.environ.get("CPPBATCH_MODELS"):
        return check_path(Path(named).expanduser())
    here = Path("models")
    return here if here.is_dir() else user_data_path("cppbatch") / "models"


def models_in(folder: Path) -> list[Path]:
    """The GGUF models of a folder, of folders of their own in it (NAME/NAME.gguf), and of its OWNER/REPO folders,
    sorted by path.

    A split model is listed once, as its first part.
    """
    return sorted(path for path in files_below(folder) if _is_shown(path.name) and _has_utf8_path(path))


def files_below(folder: Path) -> Iterator[Path]:
    """The GGUF files in a folder and in up to three levels of folders below it, except hidden ones.

    What vanishes meanwhile, or cannot be read, is left out.
    """
    for parent, folders, names in os.walk(folder, followlinks=True):
        here = Path(parent)
        is_deepest = len(here.parts) - len(folder.parts) >= 3  # OWNER/REPO, and a folder for each type of weights
        folders[:] = [] if is_deepest else [name for name in folders if not name.startswith(".")]
        yield from (here / name for name in names if name.endswith(".gguf") and not name.startswith("."))


def _is_shown(name: str) -> bool:
    return not (LATER_PART.search(name) or is_projector(name))


def is_projector(name: str) -> bool:
    """Whether this is the name of a projector, as in llama.cpp."""
    return name.endswith(".gguf") and "mmproj" in name.lower()


@functools.lru_cache(1024)  # one line in the log for each file
def _has_utf8_path(path: Path) -> bool:
    try:
        check_path(path)
    except ModelError as error:
        log.warning("left out: %s", error)
        return False
    return True


def check_path(path: Path) -> Path:
    """Returns `path` if it is valid UTF-8, which answers of the server and llama.cpp need; else raises `ModelError`."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = str(path).encode(errors="backslashreplace").decode()
        raise ModelError(f"the path {shown} is not valid UTF-8; rename the file or its folder") from None
    return path


def short_name(path: Path) -> str:
    """The name of a model in lists: the file name without extension and part number."""
    first = _FIRST_PART.match(path.name)
    return first[1] if first else path.stem


def find_model(folder: Path, name: str) -> Path | None:
    """The model in a folder with this short name, with or without weight types at its end.

    A model and its requantised copies count as one, and the last of these is returned. None: not found. Raises
    `ModelError` if there are several.
    """
    here, wanted = models_in(folder), name.lower()
    found = [path for path in here if short_name(path).lower() == wanted]
    found = found or [path for path in here if wanted in (each.lower() for each in shorter_names(short_name(path)))]
    found = [path for path in found if not any(is_copy(other, path) for other in found)]
    if len(found) > 1:
        names = ", ".join(short_name(path) if len({short_name(p) for p in found}) > 1 else str(path) for path in found)
        raise ModelError(f"{name} is ambiguous: {names}. Give one of these to -m")
    return found[0] if found else None


def model_parts(path: Path) -> list[Path]:
    """All files of a model, from the path of its first or only one; at least one."""
    first = _FIRST_PART.match(path.name)
    if not first:
        return [path]
    name, n = first.groups()
    return [path.with_name(f"{name}-{i:05d}-of-{n}.gguf") for i in range(1, int(n) + 1)]


def remove_model(path: Path, root: Path) -> list[Path]:
    """Deletes all files of a model in a models folder, and the projectors in its own folder if no model is left there.
    Returns the paths."""
    removed = model_parts(path)
    for part in removed:
        part.unlink(missing_ok=True)
    folder = path.parent
    if folder.absolute() != root.absolute() and not models_in(folder):
        projectors = [each for each in folder.glob("*.gguf") if is_projector(each.name)]
        for each in projectors:
            each.unlink(missing_ok=True)
        removed += projectors
    return removed


def copy_path(source: Path, types: Iterable[str]) -> Path:
    """The path of a requantised copy: "name.Q4_K_M.gguf" and ["Q8_0"] give "name.Q4_K_M-Q8_0.gguf"."""
    return source.with_name("-".join([source.stem, *types]) + source.suffix)


def shorter_names(name: str) -> Iterator[str]:
    """The shorter names of a model, removing the weight types at its end one by one.

    "name.Q4_K_M-Q8_0" gives "name.Q4_K_M" and "name".
    """
    while match := _WEIGHT_TYPE.search(name):
        name = name[: match.start()]
        yield name


def is_copy(path: Path, source: Path) -> bool:
    """Whether `path` has the name of a requantised copy of `source`."""
    return path.parent == source.parent and source.stem in shorter_names(path.stem)


def check_file(path: Path) -> Path:
    """Returns `path` if it is a GGUF file with weights; otherwise raises `ModelError` with what it is."""
    check_path(path)
    try:
        if not path.exists():
            raise ModelError(
                f"file not found: {path}. Run `cppbatch models list` to list the models in the models folder; "
                "OWNER/REPO:TYPE downloads one from the Hugging Face hub"
            )
        if path.is_dir():
            raise ModelError(
                f"{path} is a folder, not a GGUF file. Give a .gguf file in it, or serve the whole folder with "
                "`cppbatch serve --models-dir`"
            )
        if not path.is_file():  # such as a pipe, which reading would wait for
            raise ModelError(f"{path} is not a regular file. Give a .gguf file")
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if not header:
        raise ModelError(f"{path} is empty. Download it again")
    if header[:4] != b"GGUF"[: len(header)]:
        raise ModelError(f"{path} is not a GGUF file (it starts with {header[:4]!r}). Download a .gguf version of it")
    if len(header) < _HEADER.size:
        raise ModelError(f"{path} is truncated after {len(header)} bytes. Download it again")
    if _HEADER.unpack(header)[2] == 0 and not _FIRST_PART.match(path.name):  # whose weights may be in the other parts
        raise no_weights(path)
    return path


def no_weights(path: Path) -> ModelError:
    """The error for a file without tensors."""
    return ModelError(f"{path} contains only a vocabulary, no weights. Use the GGUF file of the model itself")


def file_identity(model: Path) -> tuple[int, str]:
    """Identifies a model's file without reading all of it: its size, and a digest of its first MiB."""
    with model.open("rb") as file:
        return model.stat().st_size, hashlib.sha256(file.read(1 << 20)).hexdigest()
