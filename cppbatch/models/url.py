"""Models at an address (--model-url, --mmproj-url): downloaded once, into the models folder."""

from __future__ import annotations

import http.client
import re
import shutil
import threading
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit, urlunsplit

from cppbatch.errors import ModelError
from cppbatch.models.check import check_model
from cppbatch.models.digest import file_digest
from cppbatch.models.find import check_file, model_parts, models_folder

TIMEOUT_S = 30
"""Without any data."""
_UNSAFE = re.compile(r"[^\w.-]+")
_PARTIAL, _RANGE_REFUSED = 206, 416

_LOCKS: dict[Path, threading.Lock] = {}  # of files that this process downloads

Say = Callable[[str], object]


def pull_url(url: str, say: Say = lambda line: None) -> Path:
    """The path of a model, given the address of its first or only file. Files that are there are not downloaded again;
    an interrupted download continues. Raises `ModelError`."""
    path = url_file(url)
    for part in model_parts(path):
        download(url if part == path else _beside(url, part.name), part, say)
    return check_model(path)


def pull_url_file(url: str, say: Say = lambda line: None) -> Path:
    """The path of a file that is not a model, such as a projector. Raises `ModelError`."""
    path = url_file(url)
    download(url, path, say)
    return check_file(path)


def url_file(url: str) -> Path:
    """The file for an address: its host and path, in the models folder. Raises `ModelError`."""
    parts = urlsplit(url)
    names = file_names(parts.netloc.rpartition("@")[2], *unquote(parts.path).split("/"))
    if parts.scheme not in ("http", "https") or not parts.netloc or not names[-1].endswith(".gguf"):
        raise ModelError(f"{url!r:.200} is not the http or https address of a GGUF file")
    return models_folder().joinpath(*names)


def file_names(*parts: str) -> list[str]:
    """Names of folders and a file, of the parts of an address."""
    names = [_UNSAFE.sub("_", name) for name in parts]
    return [name for name in names if name.strip(".")]


def _beside(url: str, name: str) -> str:
    """The address of another file in the same folder."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rpartition('/')[0]}/{name}"))


def download(url: str, target: Path, say: Say, *, authorization: str = "", sha256: str = "") -> None:
    """Downloads a file, unless it is there. An interrupted download continues if the file at the address is known to be
    the same.

    `authorization`: for this host only, not for the one it redirects to. `sha256`: of the file, in hexadecimal; "":
    unknown. Raises `ModelError`.
    """
    with _LOCKS.setdefault(target, threading.Lock()):
        if not target.is_file():
            _download(url, target, say, authorization, sha256)


def _download(url: str, target: Path, say: Say, authorization: str, sha256: str) -> None:
    part, tag_file = (target.with_name(f"{target.name}.part{end}") for end in ("", ".etag"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        n_there = part.stat().st_size if part.is_file() and tag_file.is_file() else 0
        answer, n_there = _open(url, n_there, tag_file.read_text("utf-8") if n_there else "", authorization)
        with answer:
            n_bytes = int(answer.headers.get("Content-Length") or 0)
            if (free := shutil.disk_usage(target.parent).free) < n_bytes:
                raise ModelError(f"{url} has {n_bytes / 1e9:.2f} GB, but {target.parent} has {free / 1e9:.2f} GB free")
            say(f"downloading {url} ({(n_there + n_bytes) / 1e9:.2f} GB) into {target.parent}/")
            if not n_there:
                tag_file.unlink(missing_ok=True)  # it is that of another file
            with part.open("ab" if n_there else "wb") as file:
                if tag := _tag(answer.headers):
                    tag_file.write_text(tag, "utf-8")
                shutil.copyfileobj(answer, file, 1 << 20)
                if n_bytes and file.tell() != n_there + n_bytes:
                    raise ModelError(f"{url}: the connection closed before the end; run the same command to continue")
        tag_file.unlink(missing_ok=True)
        if sha256 and (found := file_digest(part)) != sha256:
            part.unlink()
            raise ModelError(f"{url} has the SHA-256 {found}, not {sha256}; run the same command to download it again")
        part.replace(target)
    except (OSError, http.client.HTTPException, ValueError) as error:  # urllib's errors are OSErrors
        reason = getattr(error, "reason", None) or error
        raise ModelError(f"{url} could not be downloaded: {reason}. Check the address and the network") from error


def _open(url: str, n_there: int, tag: str, authorization: str) -> tuple[Any, int]:
    """The answer with the rest of a file, and how many of the `n_there` bytes with this tag it continues."""

    def ask(**headers: str) -> Any:
        request = urllib.request.Request(url, headers=headers)
        if authorization:
            request.add_unredirected_header("Authorization", authorization)
        return urllib.request.urlopen(request, timeout=TIMEOUT_S)

    if not n_there:
        return ask(), 0
    try:
        answer = ask(**{"Range": f"bytes={n_there}-", "If-Range": tag})
    except HTTPError as error:
        if error.code != _RANGE_REFUSED:
            raise
        return ask(), 0  # all of it is there, or it is shorter now
    if answer.status != _PARTIAL:
        return answer, 0
    starts = (answer.headers.get("Content-Range") or "").startswith(f"bytes {n_there}-")
    if starts and _tag(answer.headers) == tag:
        return answer, n_there
    answer.close()  # of another file: not every server knows If-Range
    return ask(), 0


def _tag(headers: Message) -> str:
    """What tells this file from a later one at its address; "": nothing."""
    tag = headers.get("ETag") or ""
    return headers.get("Last-Modified") or "" if not tag or tag.startswith("W/") else tag
