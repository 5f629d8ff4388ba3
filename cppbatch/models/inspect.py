"""The metadata of a GGUF file, read without loading the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cppbatch.errors import ModelError
from cppbatch.models.draft_files import describe_draft
from cppbatch.models.draft_heads import heads_in
from cppbatch.models.file_header import read_header
from cppbatch.models.find import check_file, model_parts

_POOLING = {1: "mean", 2: "cls", 3: "last", 4: "rank"}


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a GGUF file. None where the file does not contain it."""

    path: str
    architecture: str
    name: str | None
    license: str | None
    size_bytes: int
    """Of all parts of a split model."""
    n_params: int
    n_ctx_train: int | None
    n_layer: int | None
    n_embd: int | None
    n_head: int | None
    n_head_kv: int | None
    n_vocab: int | None
    draft_heads: int = 0
    """Layers that draft (MTP), with which speculative decoding may be possible."""
    drafts_as: str | None = None
    """The kind of draft model that the file is, if it is one that reads hidden rows (EAGLE-3, DFlash)."""
    tensor_types: dict[str, int]
    """Number of tensors by type, most frequent first."""
    main_type: str
    """The type of most weights."""
    has_chat_template: bool
    pooling: str | None
    """How a text becomes one vector: mean, cls or last; rank: a reranker. None: mostly a model that generates text."""


def inspect_model(path: Path) -> ModelFacts:
    """Reads metadata and tensor list, of a split model all parts. Raises `ModelError` if a file is not GGUF."""
    parts = model_parts(path)
    headers = [read_header(part) for part in parts]
    metadata, tensors = headers[0].metadata, [tensor for header in headers for tensor in header.tensors]
    value: Callable[[str], Any] = metadata.get
    architecture = value("general.architecture") or "unknown"
    types = Counter(tensor.kind for tensor in tensors)
    weights: Counter[str] = Counter()
    for tensor in tensors:
        weights[tensor.kind] += tensor.n_elements
    return ModelFacts(
        path=str(path),
        architecture=architecture,
        name=value("general.name"),
        license=value("general.license"),
        size_bytes=sum(part.stat().st_size for part in parts),
        n_params=sum(tensor.n_elements for tensor in tensors),
        n_ctx_train=value(f"{architecture}.context_length"),
        n_layer=value(f"{architecture}.block_count"),
        n_embd=value(f"{architecture}.embedding_length"),
        n_head=value(f"{architecture}.attention.head_count"),
        n_head_kv=value(f"{architecture}.attention.head_count_kv"),
        n_vocab=value("tokenizer.ggml.tokens"),
        draft_heads=heads_in(headers).n,
        drafts_as=describe_draft(path),
        tensor_types=dict(types.most_common()),
        main_type=weights.most_common(1)[0][0],
        has_chat_template="tokenizer.chat_template" in metadata,
        pooling=_POOLING.get(value(f"{architecture}.pooling_type")),
    )


def has_chat_template(path: Path) -> bool:
    """Whether the file has one. Raises `ModelError` if it is not GGUF."""
    return "tokenizer.chat_template" in read_header(path).metadata


def read_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader` of the file. Raises `ModelError` if the file is not GGUF."""
    import gguf

    check_file(path)
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:  # GGUFReader's errors for truncated or damaged files
        raise ModelError(f"{path} is damaged or truncated. Download it again") from error
