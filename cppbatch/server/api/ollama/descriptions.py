"""Descriptions of models for the routes of Ollama's API: of a file, a loaded model, a template."""

from __future__ import annotations

import functools
import hashlib
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from cppbatch.chat.reasoning import ReasoningTags
from cppbatch.errors import ModelError
from cppbatch.findings import file_stamp
from cppbatch.models.file_header import FileHeader, read_header
from cppbatch.models.find import file_identity
from cppbatch.models.inspect import encoded_media, inspect_model
from cppbatch.server.api.ollama.builder import timestamp
from cppbatch.server.api.ollama.types import Json
from cppbatch.server.models.served import ModelEntry


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of model it is."""

    parent_model: str = ""
    format: str = "gguf"
    family: str
    """The architecture."""
    families: list[str]
    parameter_size: str
    """`8.0B`."""
    quantization_level: str
    """`Q4_K_M`."""
    context_length: int | UnsetType = UNSET
    embedding_length: int | UnsetType = UNSET


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `GET /api/tags`."""

    name: str
    """The model's id in `/v1/models`."""
    model: str
    """The same."""
    modified_at: str
    size: int
    """Bytes."""
    digest: str
    """Identifies the file: a SHA-256 of its size and its first MiB."""
    details: ModelDetails
    capabilities: list[str]


class RunningModel(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `GET /api/ps`."""

    name: str
    model: str
    size: int
    """Estimated memory in bytes, or for a single model the size of its file."""
    digest: str
    details: ModelDetails
    expires_at: str
    """When it is unloaded if no request comes; centuries from now: never."""
    size_vram: int
    """The same as `size` if layers compute on a GPU; otherwise 0."""
    context_length: int


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the file."""

    name: str
    type: str
    shape: list[int]


class ShowResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /api/show`."""

    license: str | UnsetType = UNSET
    modelfile: str
    """The file and settings in the words of a Modelfile."""
    parameters: str | UnsetType = UNSET
    """The server's sampling defaults for it, one in each line."""
    template: str | UnsetType = UNSET
    """The chat template, in Jinja."""
    system: str | UnsetType = UNSET
    """The system message for conversations without one."""
    details: ModelDetails
    model_info: Json
    """The metadata of the file; null for long arrays."""
    capabilities: list[str]
    """`completion`, `tools`, `insert`, `vision`, `audio`, `thinking`, `embedding`."""
    modified_at: str
    tensors: list[Tensor] | UnsetType = UNSET


class _File(msgspec.Struct, frozen=True):
    """What a file says about its model."""

    header: FileHeader
    details: ModelDetails
    digest: str
    size: int
    modified_at: str
    pooling: str | None


def _file_of(path: Path) -> _File:
    """Raises `ModelError`."""
    return _read_file(path, file_stamp(path))


@functools.lru_cache(256)
def _read_file(path: Path, _stamp: tuple[int, ...]) -> _File:
    facts = inspect_model(path)
    details = ModelDetails(
        family=facts.architecture,
        families=[facts.architecture],
        parameter_size=_count(facts.n_params),
        quantization_level=facts.file_type,
        context_length=facts.n_ctx_train or UNSET,
        embedding_length=facts.n_embd or UNSET,
    )
    try:
        identity, modified = file_identity(path), path.stat().st_mtime
    except OSError as error:  # it has vanished
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()
    return _File(read_header(path), details, digest, facts.size_bytes, timestamp(modified), facts.pooling)


def _count(n: int) -> str:
    """In Ollama's form: 8.0B, 135M."""
    return f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.2f}M"


def list_model(entry: ModelEntry) -> ListedModel | None:
    """None: its file cannot be read, or its projector's."""
    try:
        file = _file_of(entry.path)
        capabilities = _capabilities(entry, file)
    except ModelError:
        return None
    return ListedModel(
        name=entry.name,
        model=entry.name,
        modified_at=file.modified_at,
        size=file.size,
        digest=file.digest,
        details=file.details,
        capabilities=capabilities,
    )


def running_model(entry: ModelEntry) -> RunningModel | None:
    listed = list_model(entry)
    if listed is None or entry.info is None:
        return None
    size = entry.needs or listed.size
    # Ollama shows 290 years for a model that is never unloaded
    left = 290 * 365 * 86_400 if entry.seconds_left is None else entry.seconds_left
    return RunningModel(
        name=listed.name,
        model=listed.model,
        size=size,
        digest=listed.digest,
        details=listed.details,
        expires_at=timestamp(time.time() + left),
        size_vram=size if entry.info.on_gpu else 0,
        context_length=entry.info.max_sequence,
    )


def show_model(entry: ModelEntry, *, verbose: bool) -> ShowResponse:
    """Raises `ModelError`."""
    file = _file_of(entry.path)
    settings = entry.settings
    parameters = [*_parameters(settings.sampling_defaults)]
    template = _template(entry, file) or ""
    lines = [f"FROM {entry.path}", *(f"PARAMETER {name} {value}" for name, value in parameters)]
    lines += [f'SYSTEM """{settings.system}"""'] if settings.system else []
    return ShowResponse(
        license=file.header.text("general.license") or UNSET,
        modelfile="\n".join(lines) + "\n",
        parameters="\n".join(f"{name:<30} {value}" for name, value in parameters) or UNSET,
        template=template or UNSET,
        system=settings.system or UNSET,
        details=file.details,
        model_info=_model_info(file),
        capabilities=_capabilities(entry, file),
        modified_at=file.modified_at,
        tensors=[Tensor(name=each.name, type=each.kind, shape=list(each.shape)) for each in file.header.tensors]
        if verbose
        else UNSET,
    )


_PARAMETER_NAMES = {
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "penalty_last_n": "repeat_last_n",
}


def _parameters(defaults: Json) -> list[tuple[str, str]]:
    """Sampling defaults as lines of a Modelfile: Ollama's names and their values."""
    found: list[tuple[str, str]] = []
    for name, value in defaults.items():
        values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        found += [(_PARAMETER_NAMES.get(name, name), msgspec.json.encode(each).decode()) for each in values]
    return found


def _model_info(file: _File) -> Json:
    """The metadata as JSON. Arrays of texts, of which only the length is known, are null, as in Ollama."""
    left_out = ("general.name", "tokenizer.chat_template")
    info = {
        name: None if isinstance(value, int) and file.header.value_types.get(name) == "ARRAY" else value
        for name, value in file.header.metadata.items()
        if name not in left_out
    }
    return {**info, "general.parameter_count": sum(tensor.n_elements for tensor in file.header.tensors)}


def _template(entry: ModelEntry, file: _File) -> str | None:
    own = entry.info.chat_template if entry.info else file.header.text("tokenizer.chat_template")
    return entry.settings.chat_template or own


def _capabilities(entry: ModelEntry, file: _File) -> list[str]:
    """What the model can do. Tools work with every chat template (docs/chat.md)."""
    pooling = entry.info.pooling if entry.info else file.pooling
    if pooling:
        return [] if pooling == "rank" else ["embedding"]
    template = _template(entry, file) or ""
    reasons = ReasoningTags.of_template(template) or ("<|channel|>" in template and "<|message|>" in template)
    found = ["completion", "tools"]
    fills_in = entry.info.fill_in if entry.info else "tokenizer.ggml.fim_pre_token_id" in file.header.metadata
    if fills_in:
        found.append("insert")
    if entry.info:
        found += ["vision" if each == "image" else each for each in entry.info.modalities]
    elif entry.projector:
        found += encoded_media(entry.projector)
    return [*found, "thinking"] if reasons else found
