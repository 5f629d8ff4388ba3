"""The draft heads that a model's file contains (MTP: multi-token prediction), and whether they can be used."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cppbatch.models.file_header import FileHeader, read_header
from cppbatch.models.find import model_parts

USABLE_HEADS = frozenset(
    {"cohere2moe", "deepseek2", "deepseek32", "glm-dsa", "glm4moe", "hy_v3", "mimo2", "qwen35", "qwen35moe"}
)
"""Architectures whose heads can be used, each tested with a tiny model (docs/speculation.md)."""


class DraftHeads(NamedTuple):
    """The draft heads in a file."""

    n: int
    """How many layers are heads; 0: none."""
    architecture: str
    fault: str | None = None
    """What llama.cpp would abort the process for."""

    def why_not_usable(self, name: str) -> str | None:
        """Why the engine cannot draft with it; None: it can. `name`: the file's."""
        if not self.n:
            return f"{name} has no draft head"
        if self.architecture not in USABLE_HEADS:
            return f"the draft head of {name} has an unsupported architecture ({self.architecture})"
        return self.fault and f"the draft head of {name} has {self.fault}"


def draft_heads(path: Path) -> DraftHeads:
    """Reads the headers of a file, and of its other parts. Raises `ModelError` if one is not GGUF."""
    return heads_in([read_header(part) for part in model_parts(path)])


def heads_in(headers: list[FileHeader]) -> DraftHeads:
    """The heads in the parts of a model. A file may name heads whose tensors were left out: it has none then."""
    metadata = headers[0].metadata
    architecture = metadata.get("general.architecture") or "unknown"
    n, n_layers = (metadata.get(f"{architecture}.{key}") for key in ("nextn_predict_layers", "block_count"))
    if not (isinstance(n, int) and isinstance(n_layers, int) and 0 < n < n_layers):
        return DraftHeads(0, architecture)
    names = {tensor.name for header in headers for tensor in header.tensors}
    layers, fault = [f"blk.{i}" for i in range(n_layers - n, n_layers)], None
    if architecture == "glm4moe" and any(metadata.get(f"{architecture}.rope.dimension_sections") or ()):
        fault = "multi-dimensional positions, which llama.cpp does not support in a draft head"
    if architecture == "mimo2" and not all(f"{layer}.attn_qkv.weight" in names for layer in layers):
        fault = "separate query, key and value matrices, which llama.cpp does not support in a draft head"
    return DraftHeads(n if f"{layers[0]}.nextn.eh_proj.weight" in names else 0, architecture, fault)
