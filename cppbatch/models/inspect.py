"""Inspects a GGUF file without loading it: metadata, draft models and draft heads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from cppbatch.errors import ModelError, shorten
from cppbatch.models.draft_files import describe_draft, heads_in
from cppbatch.models.file_header import FILE_TYPES, FileHeader, read_header
from cppbatch.models.find import check_file, model_parts, no_weights

_LONGEST_NAME = 200  # characters that are shown
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""The names of the tensors of experts, as a regular expression; as in llama.cpp's `common.h`."""
DENSE_FFN = r"\.ffn_(up|down|gate)\."
"""The names of the tensors of the feed-forward part of a layer without experts."""
_POOLING = {1: "mean", 2: "cls", 3: "last", 4: "rank"}


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a GGUF file. None where the file does not contain it."""

    path: str
    architecture: str
    name: str | None
    license: str | None
    size_bytes: int
    """The size of all parts of a split model."""
    n_params: int
    n_ctx_train: int | None
    n_layer: int | None
    n_embd: int | None
    n_head: int | tuple[int, ...] | None
    """A number for each layer if they differ."""
    n_head_kv: int | tuple[int, ...] | None
    n_vocab: int | None
    n_expert: int = 0
    """Experts of a layer; 0: none."""
    draft_heads: int = 0
    """Draft layers (MTP), which may allow speculative decoding."""
    drafts_as: str | None = None
    """The kind of draft model, if the file is one that reads hidden rows (EAGLE-3, DFlash)."""
    tensor_types: dict[str, int]
    """Number of tensors by type, most frequent first."""
    main_type: str
    """The type of most weights."""
    file_type: str
    """llama.cpp's name of the file's mix of types, such as Q4_K_M, by its metadata; otherwise `main_type`."""
    has_chat_template: bool
    pooling: str | None
    """How a text becomes one vector: mean, cls or last; rank: a reranker. None: usually a model that generates text."""


def inspect_model(path: Path) -> ModelFacts:
    """Reads metadata and tensor list, including all parts of a split model. Raises `ModelError` if a file is not
    GGUF."""
    parts = model_parts(path)
    headers = [read_header(part) for part in parts]
    first, tensors = headers[0], [tensor for header in headers for tensor in header.tensors]
    if not tensors:
        raise no_weights(path)
    try:
        n_bytes = sum(part.stat().st_size for part in parts)
    except OSError as error:  # it has vanished
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    architecture = first.text("general.architecture") or "unknown"
    types = Counter(tensor.kind for tensor in tensors)
    weights: Counter[str] = Counter()
    for tensor in tensors:
        weights[tensor.kind] += tensor.n_elements
    return ModelFacts(
        path=str(path),
        architecture=shorten(architecture, _LONGEST_NAME),
        name=_shown(first, "general.name"),
        license=_shown(first, "general.license"),
        size_bytes=n_bytes,
        n_params=sum(tensor.n_elements for tensor in tensors),
        n_ctx_train=first.whole_number(f"{architecture}.context_length"),
        n_layer=first.whole_number(f"{architecture}.block_count"),
        n_embd=first.whole_number(f"{architecture}.embedding_length"),
        n_head=_of_layers(first, f"{architecture}.attention.head_count"),
        n_head_kv=_of_layers(first, f"{architecture}.attention.head_count_kv"),
        n_vocab=first.whole_number("tokenizer.ggml.tokens"),
        n_expert=first.whole_number(f"{architecture}.expert_count") or 0,
        draft_heads=heads_in(headers).n,
        drafts_as=describe_draft(path),
        tensor_types=dict(types.most_common()),
        main_type=(main := weights.most_common(1)[0][0]),
        file_type=FILE_TYPES.get(first.whole_number("general.file_type") or -1, main),
        has_chat_template="tokenizer.chat_template" in first.metadata,
        pooling=_POOLING.get(first.whole_number(f"{architecture}.pooling_type") or 0),
    )


def _shown(header: FileHeader, key: str) -> str | None:
    return shorten(text, _LONGEST_NAME) if (text := header.text(key)) else None


def _of_layers(header: FileHeader, key: str) -> int | tuple[int, ...] | None:
    value = header.metadata.get(key)
    return value if isinstance(value, tuple) else header.whole_number(key)


def encoded_media(projector: Path) -> list[str]:
    """What a projector encodes: vision, audio. Raises `ModelError`."""
    metadata = read_header(projector).metadata
    return [kind for kind in ("vision", "audio") if metadata.get(f"clip.has_{kind}_encoder")]


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
