"""What the Hugging Face hub has, before anything is downloaded: repositories, their files, the header of a file.

Nothing is kept. The client reads $HF_TOKEN, $HF_ENDPOINT and $HF_HUB_OFFLINE, as for downloads.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from cppbatch.errors import ModelError
from cppbatch.extras import require
from cppbatch.models.file_header import read_before_weights
from cppbatch.models.find import model_parts
from cppbatch.models.hub import (
    HubModel,
    choose_file,
    choose_files,
    file_sizes,
    hub_address,
    model_files,
    reason_of,
    weight_type,
)


class Found(NamedTuple):
    """A repository with GGUF files."""

    repository: str
    """OWNER/REPO."""
    downloads: int
    """In the last month."""
    likes: int


class HubFile(NamedTuple):
    """A model of a repository: a GGUF file, or all parts of a split one."""

    file: str
    """The first part."""
    weights: str
    """The type of its weights, by its name; "": unknown."""
    n_bytes: int
    """The size of all parts."""
    is_default: bool
    """Whether OWNER/REPO means this one."""
    is_here: bool
    """Whether it is in the models folder."""


def search_hub(text: str) -> list[Found]:
    """Repositories with GGUF files for these words, the most downloaded first; up to 30. Raises `ModelError`, and
    `ConfigError` without the client (the extra `hub`)."""
    require("huggingface_hub", "searching the hub")
    from huggingface_hub import errors

    asked = {"search": text, "filter": "gguf", "sort": "downloads", "direction": -1, "limit": 30}
    try:
        found = _get(f"{hub_address()}/api/models", params=asked).json()
        return [Found(each["id"], each.get("downloads") or 0, each.get("likes") or 0) for each in found]
    except errors.OfflineModeIsEnabled as error:
        raise ModelError("the hub cannot be searched, because HF_HUB_OFFLINE is set: unset it") from error
    except Exception as error:  # the hub's, its HTTP client's, and of another answer than a list
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"{hub_address()} could not be searched: {first}. Check the network") from error


def repository_files(repository: str, root: Path) -> list[HubFile]:
    """The models of a repository, the smallest first. `root`: the models folder. Raises as `search_hub`."""
    sizes = _sizes(repository)
    files = model_files(sizes)
    default = choose_file(files, "")
    found = []
    for file in files:
        parts = [part.as_posix() for part in model_parts(Path(file))]
        is_here = all((root / repository / part).exists() for part in parts)
        n_bytes = sum(sizes.get(part, 0) for part in parts)
        found.append(HubFile(file, weight_type(file), n_bytes, file == default, is_here))
    return sorted(found, key=lambda each: (each.n_bytes, each.file))


def fetch_headers(model: HubModel, folder: Path) -> Path:
    """Writes files with the headers of a model and its sizes, but without weights, into a folder; their blocks of zeros
    take no space on the disk. Returns the first one. Raises as `search_hub`."""
    sizes = _sizes(model.repository)
    files = choose_files(model, sizes)
    import huggingface_hub as hub

    for file in files:
        start = _read_start(hub, model, file, sizes[file])
        path = folder / Path(file).name
        with path.open("wb") as out:
            out.write(start)
            out.truncate(sizes[file])
    return folder / Path(files[0]).name


def _sizes(repository: str) -> dict[str, int]:
    require("huggingface_hub", f"listing {repository} on the hub")
    import huggingface_hub as hub

    try:
        return file_sizes(hub, repository)
    except Exception as error:  # the hub's, and its HTTP client's
        raise ModelError(reason_of(hub, HubModel(repository), error)) from error


def _read_start(hub: Any, model: HubModel, file: str, n_bytes: int) -> bytes:
    url = hub.hf_hub_url(model.repository, file, endpoint=hub_address())
    try:
        return read_before_weights(cast(Any, _RemoteFile(url, n_bytes)), n_bytes)
    except ModelError:
        raise
    except Exception as error:  # the hub's, and its HTTP client's
        raise ModelError(reason_of(hub, model, error)) from error


class _RemoteFile(io.RawIOBase):
    """Reads a file on the hub piece by piece, at least as much as asked for."""

    def __init__(self, url: str, n_bytes: int) -> None:
        self._url, self._n_bytes, self._at = url, n_bytes, 0

    def read(self, size: int = -1) -> bytes:
        end = min(self._at + max(size, 4 << 20), self._n_bytes)
        if self._at >= end:
            return b""
        found = _get(self._url, headers={"Range": f"bytes={self._at}-{end - 1}"}).content
        self._at += len(found)
        return cast(bytes, found)


def _get(url: str, *, params: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> Any:
    """The response of the hub. Raises its errors."""
    from huggingface_hub import utils

    sent = {**utils.build_hf_headers(), **(headers or {})}
    response = utils.get_session().get(url, params=params, headers=sent, timeout=10)
    utils.hf_raise_for_status(response)
    return response
