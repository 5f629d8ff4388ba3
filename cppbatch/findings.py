"""Findings about llama.cpp and files on this machine, cached in the user's cache folder: times, verdicts, digests.

A file's name is a hash of everything that its content depends on, so content is never stale: the library's files and
the CPU (`build_key`), plus models, settings and cppbatch's own code where they matter (`finding_key`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from platformdirs import user_cache_path

log = logging.getLogger("cppbatch.findings")

Finding = TypeVar("Finding")

_MOST_FILES = 256  # per kind; beyond that, the oldest are removed
_ON_CPU = ("base", "cpu", "rpc", "blas")  # ggml's libraries without GPU code
_OF_LIBRARY = ("GGML_", "LLAMA_")  # environment variables that change the library's behaviour
_SET_BY_LOADING = "GGML_NO_BACKTRACE"  # by cppbatch, in a process that loads the library; no finding depends on it


def library_folder() -> Path | None:
    """The folder of llama.cpp's libraries, found without loading them; None if llama-cpp-python is not installed."""
    if named := os.environ.get("LLAMA_CPP_LIB_PATH"):
        return Path(named)
    spec = importlib.util.find_spec("llama_cpp")
    return Path(spec.origin).parent / "lib" if spec and spec.origin else None


def computes_on_cpu_only(folder: Path) -> bool:
    """Whether the build in this folder has no GPU library. Its findings then do not depend on a driver."""
    parts = [file.name.split("ggml-", 1)[1] for file in folder.iterdir() if "ggml-" in file.name]
    return bool(parts) and all(part.startswith(_ON_CPU) for part in parts)


def build_key(folder: Path) -> str:
    """A hash of the library files in this folder and the CPU."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    stamps = [(f.name, s.st_size, s.st_mtime_ns) for f in files if (s := f.stat())]
    return _hash(str(folder), stamps, _cpu())


def finding_key(folder: Path, files: Iterable[Path], *settings: object) -> str:
    """A hash of the library, the CPU, these files, cppbatch's code, and the `repr` of settings.

    `files` need not exist: creating one changes the key.
    """
    names = sorted(each for each in os.environ if each.startswith(_OF_LIBRARY) and each != _SET_BY_LOADING)
    variables = [(name, os.environ[name]) for name in names]
    return _hash(build_key(folder), variables, _own_code(), [(str(f), file_stamp(f)) for f in files], *settings)


def file_stamp(path: Path) -> tuple[int, ...]:
    """Numbers that change with any change to a file; () if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def file_key(path: Path) -> str:
    """A hash of a file's path, links resolved, and its `file_stamp`."""
    return _hash(str(path.resolve()), file_stamp(path))


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


@functools.cache
def _own_code() -> list[tuple[str, int, int]]:
    """The stamps of cppbatch's modules."""
    stamps: list[tuple[str, int, int]] = []
    folders = [str(Path(__file__).parent)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir() and not entry.name.startswith("__"):
                    folders.append(entry.path)
                elif entry.name.endswith(".py"):
                    stamps.append((entry.path, entry.stat().st_size, entry.stat().st_mtime_ns))
    return sorted(stamps)


def finding_path(kind: str, key: str) -> Path:
    """The file for a finding; `kind` names the folder."""
    return user_cache_path("cppbatch") / kind / f"{key}.json"


def read_finding(path: Path, kind: type[Finding]) -> Finding | None:
    """The content of a file; None if it is missing, or cannot be read as this type."""
    for place in _places(path):
        with contextlib.suppress(OSError, msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(place.read_bytes(), type=kind)
    return None


def write_finding(path: Path, found: object) -> None:
    """Writes the file atomically: other processes see the old or the new content. Failures are only logged."""
    for place in _places(path):
        try:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = place.with_suffix(f".{os.getpid()}.part")
            part.write_bytes(msgspec.json.encode(found))
            part.replace(place)
            _remove_oldest(place.parent)
            break
        except OSError as error:
            log.info("%s cannot be cached: %s", path.parent.name, error)


def _places(path: Path) -> Iterator[Path]:
    """The file in the user's cache, and a fallback if the cache is not writable: without one, each command would time
    again and could give different advice. The fallback folder is skipped if another user created it."""
    yield path
    above = next(folder for folder in path.parents if os.path.lexists(folder))
    is_writable = above.is_dir() and os.access(above, os.W_OK)
    if not is_writable and hasattr(os, "getuid"):
        folder = Path(tempfile.gettempdir()) / f"cppbatch-{os.getuid()}"
        if not os.path.lexists(folder) or folder.lstat().st_uid == os.getuid():
            yield folder / f"{path.parent.name}-{path.name}"


def _remove_oldest(folder: Path) -> None:
    files = [file for file in folder.iterdir() if file.suffix == ".json"]
    if len(files) > _MOST_FILES:
        for file in sorted(files, key=lambda each: each.stat().st_mtime)[:-_MOST_FILES]:
            file.unlink(missing_ok=True)
