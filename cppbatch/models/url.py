"""Models at an address (--model-url, --mmproj-url): downloaded once, into the models folder."""

from __future__ import annotations

import http.client
import re
import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from cppbatch.errors import ModelError
from cppbatch.models.check import check_model
from cppbatch.models.find import check_file, model_parts, models_folder

_TIMEOUT_S = 30  # without any data
_CHUNK = 1 << 20
_UNSAFE = re.compile(r"[^\w.-]+")
_RANGE_IGNORED = 200

Say = Callable[[str], object]


def pull_url(url: str, say: Say = lambda line: None) -> Path:
    """The path of a model, given the address of its first or only file. Files that are there are not downloaded again;
    an interrupted download continues. Raises `ModelError`."""
    path = _place(url)
    for part in model_parts(path):
        _fetch(url if part == path else _beside(url, part.name), part, say)
    return check_model(path)


def pull_url_file(url: str, say: Say = lambda line: None) -> Path:
    """As `pull_url`, for a file that is not a model, such as a projector."""
    path = _place(url)
    _fetch(url, path, say)
    return check_file(path)


def _place(url: str) -> Path:
    """The file for an address: its host and path, in the models folder. Raises `ModelError`."""
    parts = urlsplit(url)
    names = [_UNSAFE.sub("_", name) for name in (parts.netloc.rpartition("@")[2], *unquote(parts.path).split("/"))]
    names = [name for name in names if name.strip(".")]
    if parts.scheme not in ("http", "https") or not parts.netloc or not names[-1].endswith(".gguf"):
        raise ModelError(f"{url!r:.200} is not the http or https address of a GGUF file")
    return models_folder().joinpath(*names)


def _beside(url: str, name: str) -> str:
    """The address of another file in the same folder."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rpartition('/')[0]}/{name}"))


def _fetch(url: str, target: Path, say: Say) -> None:
    if target.is_file():
        return
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        n_there = part.stat().st_size if part.is_file() else 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={n_there}-"} if n_there else {})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            if answer.status == _RANGE_IGNORED:
                n_there = 0
            n_bytes = int(answer.headers.get("Content-Length") or 0)
            if (free := shutil.disk_usage(target.parent).free) < n_bytes:
                raise ModelError(f"{url} has {n_bytes / 1e9:.2f} GB, but {target.parent} has {free / 1e9:.2f} GB free")
            say(f"downloading {url} ({(n_there + n_bytes) / 1e9:.2f} GB) into {target.parent}/")
            with part.open("ab" if n_there else "wb") as file:
                shutil.copyfileobj(answer, file, _CHUNK)
                if n_bytes and file.tell() != n_there + n_bytes:
                    raise ModelError(f"{url}: the connection closed before the end; run the same command to continue")
        part.replace(target)
    except (OSError, http.client.HTTPException, ValueError) as error:  # urllib's errors are OSErrors
        reason = getattr(error, "reason", None) or error
        raise ModelError(f"{url} could not be downloaded: {reason}. Check the address and the network") from error
