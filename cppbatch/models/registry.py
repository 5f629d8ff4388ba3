"""Models in a registry of container images (--docker-repo), by the OCI distribution API: `ai/smollm2:135M-Q4_0`."""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit

from cppbatch.errors import ModelError
from cppbatch.models.check import check_model
from cppbatch.models.find import models_folder
from cppbatch.models.url import TIMEOUT_S, Say, download, file_names

SCHEME = "docker://"
"""Starts the name of such a model among those of models (`choose_model`)."""
_REGISTRY = "https://registry-1.docker.io"
_NAMESPACE = "ai"  # where a name without a folder is
_PART = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
_NAME = re.compile(rf"({_PART}(?:/{_PART})*)(?::(\w[\w.-]{{0,127}}))?", re.ASCII)
_MANIFESTS = "application/vnd.docker.distribution.manifest.v2+json,application/vnd.oci.image.manifest.v1+json"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


def pull_image(name: str, say: Say = lambda line: None) -> Path:
    """The path of a model, given its name, [REPO/]MODEL[:TAG] (latest), downloaded if missing.

    $CPPBATCH_DOCKER_REGISTRY is the address of another registry. Raises `ModelError`.
    """
    path, registry, (repository, tag) = image_file(name), _registry(), _repository(name)
    if not path.is_file():
        here = f"{registry}/v2/{repository}"
        try:
            token, manifest = _manifest(f"{here}/manifests/{tag}")
        except (OSError, http.client.HTTPException, ValueError) as error:  # urllib's errors are OSErrors
            reason = getattr(error, "reason", None) or error
            raise ModelError(
                f"{repository}:{tag} could not be read from {registry}: {reason}. Check the name and the network"
            ) from error
        digest = _digest_of_model(manifest, f"{repository}:{tag}")
        download(f"{here}/blobs/sha256:{digest}", path, say, authorization=token, sha256=digest)
    return check_model(path)


def image_file(name: str) -> Path:
    """The file for a name, in the models folder. Raises `ModelError`."""
    repository, tag = _repository(name)
    folders, model = repository.split("/"), repository.rpartition("/")[2]
    return models_folder().joinpath(*file_names(urlsplit(_registry()).netloc, *folders, f"{model}-{tag}.gguf"))


def _repository(name: str) -> tuple[str, str]:
    found = _NAME.fullmatch(name)
    if not found:
        raise ModelError(f"--docker-repo is {name!r:.200}; it must be [REPO/]MODEL[:TAG], such as ai/smollm2:135M-Q4_0")
    return found[1] if "/" in found[1] else f"{_NAMESPACE}/{found[1]}", found[2] or "latest"


def _registry() -> str:
    return (os.environ.get("CPPBATCH_DOCKER_REGISTRY") or _REGISTRY).rstrip("/")


def _manifest(url: str) -> tuple[str, Any]:
    """The value of `Authorization` for the repository ("": none), and the manifest."""
    try:
        return "", _read_json(url, Accept=_MANIFESTS)
    except HTTPError as error:
        challenge = error.headers.get("WWW-Authenticate") or ""
        if error.code != 401 or not challenge.lower().startswith("bearer "):
            raise
    fields = dict(_CHALLENGE.findall(challenge))
    realm = fields.pop("realm", "")
    if urlsplit(realm).scheme not in ("https", urlsplit(url).scheme):
        raise ValueError(f"its tokens are at {realm!r:.200}, which is not an https address")
    answer = _read_json(f"{realm}?{urlencode(fields)}")
    token = f"Bearer {answer.get('token') or answer.get('access_token')}"
    return token, _read_json(url, Accept=_MANIFESTS, Authorization=token)


def _read_json(url: str, **headers: str) -> Any:
    request = urllib.request.Request(url)
    for name, value in headers.items():
        request.add_unredirected_header(name, value)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        found = json.loads(answer.read(4 << 20))  # registries limit manifests to this size
    if not isinstance(found, dict):
        raise ValueError(f"{url} is not a JSON object")
    return found


def _digest_of_model(manifest: Any, name: str) -> str:
    """The SHA-256 of the only GGUF file in an image."""
    layers = [each for each in manifest.get("layers") or () if isinstance(each, dict)]
    files = [each.get("digest") for each in layers if "gguf" in str(each.get("mediaType"))]
    if len(files) != 1:
        raise ModelError(f"{name} has {len(files)} GGUF files; only images with one can be used")
    digest = _DIGEST.fullmatch(str(files[0]))
    if not digest:
        raise ModelError(f"{name} names its file by {files[0]!r:.200}; only SHA-256 can be verified")
    return digest[1]
