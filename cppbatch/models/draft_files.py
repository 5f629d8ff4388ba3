"""Draft models that read hidden rows of the model they draft for (EAGLE-3, DFlash, Gemma 4's assistant), recognised by
the header of their file, and checked there: llama.cpp aborts the process where such a file does not fit to its
target.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cppbatch.config import MAX_LAYERS
from cppbatch.errors import ModelError
from cppbatch.models.file_header import FileHeader, TensorInfo, read_header, read_integers
from cppbatch.models.find import model_parts

RowKind = Literal["eagle3", "dflash", "gemma4-assistant"]

NAMES: dict[RowKind, str] = {"eagle3": "EAGLE-3", "dflash": "DFlash", "gemma4-assistant": "Gemma 4 assistant"}

ASSISTANT: RowKind = "gemma4-assistant"

TARGETS = frozenset(
    {
        "bailingmoe3", "deepseek4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe", "llama", "mimo2",
        "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe", "qwen3", "qwen35",
        "qwen35moe", "qwen3moe", "qwen3next",
    }
)  # fmt: skip
"""Architectures whose graph exports the rows that enter each layer. Asked for those of another one, llama.cpp aborts
the process."""
_EXPORTS_LAST = frozenset({"deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"})
"""Architectures whose graph also exports the rows that leave the last layer."""


class DraftFile(NamedTuple):
    """The metadata of an EAGLE-3 or DFlash file."""

    kind: RowKind
    layers: tuple[int, ...]
    """The target's layers whose input it reads; (): it reads the rows that leave the last layer."""
    n_row: int
    """Numbers that it reads of a token: those of all these layers."""
    shares: bool
    """Whether it uses the target's token embeddings or output matrix."""
    block: int = 0
    """DFlash: tokens of a block, the newest one of the text and masks after it."""
    first: int = 1
    """DFlash: the row of a block that drafts its first token; DSpark's newest token drafts one itself."""
    mask: int = 0
    """DFlash: the token in place of those that are drafted."""
    top_k: int = 0
    """DFlash2: candidates of each token in the lattice of its selector; 0: there are logits."""
    is_causal: bool = False
    """DFlash: whether a token of a block sees only those before it."""


class _File(NamedTuple):
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, tuple[Path, TensorInfo]]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    def number(self, key: str) -> int | None:
        """An integer; None if it is missing, or of another type in a damaged file."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value if isinstance(value, int) else None

    def numbers(self, key: str) -> tuple[Any, ...]:
        """An array of numbers; () if it is missing."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value if isinstance(value, tuple) else ()

    def size(self, key: str) -> int:
        """An integer that loading needs. Raises `ModelError` if it is missing, or impossible."""
        if (value := self.number(key)) is None or not 1 <= value <= (MAX_LAYERS if key == "block_count" else 1 << 30):
            raise ModelError(f"{self.path} is damaged: {self.architecture}.{key} is {value}. Download it again")
        return value

    @property
    def n_vocab(self) -> int:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return tokens if isinstance(tokens, int) else 0


def row_kind(path: Path) -> RowKind | None:
    """Whether a file is a draft model that reads hidden rows; None: another kind. Raises `ModelError` if it is not
    GGUF."""
    architecture = read_header(path).metadata.get("general.architecture")
    return next((kind for kind in NAMES if kind == architecture), None)


def describe_draft(path: Path) -> str | None:
    """For people: "EAGLE-3 draft model, reads layers 2, 18, 33". None: not such a file. Raises as `row_kind`."""
    if (kind := row_kind(path)) is None:
        return None
    reads = "the KV cells of its model"
    if kind != ASSISTANT:
        reads = f"layers {', '.join(map(str, _layers(_open(path))))}"
    return f"{NAMES[kind]} draft model, reads {reads}"


def read_draft_file(path: Path, target: Path) -> DraftFile:
    """Reads the header of such a file that is to draft for `target`.

    Raises `ModelError` if one of the two cannot be read, or if llama.cpp would abort the process with the two.
    """
    draft, its_target = _open(path), _open(target)
    kind = row_kind(path)
    assert kind
    for fault in (_assistant_faults if kind == ASSISTANT else _faults)(draft, its_target):
        raise ModelError(
            f"{path.name} cannot be used as a draft model for {target.name} (-md): {fault}. Use a draft model made for "
            "it, or leave out -md"
        )
    layers, n_embd = _layers(draft), its_target.size("embedding_length")
    if kind == ASSISTANT:
        return DraftFile(kind, (), n_embd, shares=True)
    file = DraftFile(
        kind, layers, len(layers) * n_embd, not {"token_embd.weight", "output.weight"} <= set(draft.tensors)
    )
    if kind == "eagle3":
        return file
    is_dspark = "markov_w1.weight" in draft.tensors
    return file._replace(
        shares="token_embd.weight" not in draft.tensors,  # also the output matrix if the file has none
        block=draft.number("block_size") or _USUAL_BLOCK,
        first=0 if is_dspark and draft.number("sample_from_anchor") is not False else 1,
        mask=draft.metadata["tokenizer.ggml.mask_token_id"],
        top_k=draft.number("selector_top_k") or 0 if "selector_hidden.weight" in draft.tensors else 0,
        is_causal=bool(draft.number("attention.causal")),
    )


_USUAL_BLOCK = 16


def _open(path: Path) -> _File:
    parts = model_parts(path)
    headers = [read_header(part) for part in parts]
    tensors = {t.name: (part, t) for part, header in zip(parts, headers, strict=True) for t in header.tensors}
    return _File(path, headers[0].metadata, tensors)


def _layers(draft: _File) -> tuple[int, ...]:
    return draft.numbers("target_layers")


def _assistant_faults(draft: _File, target: _File) -> Iterator[str]:
    """Yields why llama.cpp would abort. Layers with a window read the cells of the target's last layer but one, the
    others those of the last one."""
    if target.architecture != "gemma4":
        yield f"it reads the KV cells of a gemma4 model, but {target.path.name} is {target.architecture}"
        return
    given, n_embd = draft.number("embedding_length_out"), target.size("embedding_length")
    if given != n_embd:
        yield f"it expects rows of {given} numbers, but the rows of the model have {n_embd}"
    n_own, n_layers = draft.size("block_count"), target.size("block_count")
    if (n_draft := draft.number("nextn_predict_layers")) != n_own:
        yield f"{n_draft} of its {n_own} layers are draft layers; all must be"
    if [_has_window(target, i) for i in (n_layers - 2, n_layers - 1)] != [True, False]:
        yield "the last two layers of the model are not one with a sliding window and one without"
    for i in range(n_own):
        own, read = (_cell_shape(*each) for each in ((draft, i), (target, n_layers - 1 - _has_window(draft, i))))
        if own != read:
            sizes = [f"{n_heads} KV heads of {n_numbers} numbers" for n_heads, n_numbers in (own, read)]
            yield f"its layer {i} reads cells of {sizes[0]}, but those of the model have {sizes[1]}"


def _has_window(file: _File, layer: int) -> bool:
    pattern = file.numbers("attention.sliding_window_pattern")
    return bool(pattern[layer]) if 0 <= layer < len(pattern) else False


def _cell_shape(file: _File, layer: int) -> tuple[int | None, int | None]:
    """(KV heads, numbers of a head) of a layer."""
    heads = file.numbers("attention.head_count_kv") or file.numbers("attention.head_count")
    number = file.number("attention.head_count_kv") or file.number("attention.head_count")
    kind = "_swa" if _has_window(file, layer) else ""
    return heads[layer] if 0 <= layer < len(heads) else number, file.number(f"attention.key_length{kind}")


def _faults(draft: _File, target: _File) -> Iterator[str]:
    """What llama.cpp would abort the process for, the first one first."""
    if target.architecture not in TARGETS:
        yield f"llama.cpp does not export hidden rows for the architecture {target.architecture}"
    n_layers, n_embd = target.size("block_count"), target.size("embedding_length")
    n_layers -= target.number("nextn_predict_layers") or 0
    last = n_layers if target.architecture in _EXPORTS_LAST else n_layers - 1
    layers = _layers(draft)
    if not layers or not all(0 <= layer <= last for layer in layers):
        yield f"it reads layers {list(layers)}, but llama.cpp exports only layers 0 to {last}"
    own = draft.number("embedding_length")
    given = draft.number("target_hidden_size") if draft.architecture == "eagle3" else own
    if given != n_embd:
        yield f"it expects rows of {given} numbers, but the rows of the model have {n_embd}"
    yield from _wrong_sizes(draft)
    yield from _wrong_tables(draft, n_embd)
    if draft.architecture == "dflash":
        yield from _wrong_blocks(draft)


def _wrong_sizes(draft: _File) -> Iterator[str]:
    if draft.architecture == "eagle3" and draft.number("block_count") != 1:
        yield f"it has {draft.number('block_count')} layers, but llama.cpp supports only one"
    of_head = [draft.number(f"attention.{name}_length") for name in ("key", "value")]
    if of_head[0] != of_head[1]:
        yield f"its keys and values have different lengths ({of_head[0]} and {of_head[1]})"


def _wrong_tables(draft: _File, n_embd: int) -> Iterator[str]:
    """Tables by token: embeddings, output matrix, the tokens that a reduced output matrix knows (d2t)."""
    n_vocab = draft.n_vocab
    shapes = {name: tensor.shape for name, (_, tensor) in draft.tensors.items()}
    embeddings = shapes.get("token_embd.weight")
    if embeddings and embeddings[-1] != n_vocab:
        yield f"it has embeddings for {embeddings[-1]} tokens, but a vocabulary of {n_vocab}"
    own = draft.number("embedding_length")
    if not (embeddings and "output.weight" in shapes) and own != n_embd:
        yield (
            f"it shares embeddings or the output matrix with the model, which have {n_embd} dimensions, but "
            f"it has {own}"
        )
    if "d2t" not in draft.tensors:
        return
    part, table = draft.tensors["d2t"]
    if "output.weight" not in shapes or table.kind != "I64":
        yield "its token table (d2t) does not contain 64-bit integers, or the output matrix is missing"
        return
    tokens = read_integers(part, "d2t")
    if not (tokens.size and tokens.min() >= 0 and tokens.max() < n_vocab):
        yield f"its token table (d2t) contains values outside 0 to {n_vocab - 1}"


def _wrong_blocks(draft: _File) -> Iterator[str]:
    if draft.number("hyper_connection.count"):
        yield "it is a DSpark model for DeepSeek 4 with hyper-connections, which is not supported"
    usual = None if "markov_w1.weight" in draft.tensors else _USUAL_BLOCK
    block, mask = draft.number("block_size") or usual, draft.metadata.get("tokenizer.ggml.mask_token_id")
    if block is None or block < 2:
        yield f"it has blocks of {block} tokens (dflash.block_size)"
    if not (isinstance(mask, int) and 0 <= mask < draft.n_vocab):
        yield f"its mask token is {mask} (tokenizer.ggml.mask_token_id)"


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
    architecture = headers[0].text("general.architecture") or "unknown"
    n, n_layers = (metadata.get(f"{architecture}.{key}") for key in ("nextn_predict_layers", "block_count"))
    if not (isinstance(n, int) and isinstance(n_layers, int) and 0 < n < n_layers):
        return DraftHeads(0, architecture)
    names = {tensor.name for header in headers for tensor in header.tensors}
    if n_layers > MAX_LAYERS:
        return DraftHeads(0, architecture)
    layers, fault = [f"blk.{i}" for i in range(n_layers - n, n_layers)], None
    sections = metadata.get(f"{architecture}.rope.dimension_sections")
    if architecture == "glm4moe" and isinstance(sections, tuple) and any(sections):
        fault = "multi-dimensional positions, which llama.cpp does not support in a draft head"
    if architecture == "mimo2" and not all(f"{layer}.attn_qkv.weight" in names for layer in layers):
        fault = "separate query, key and value matrices, which llama.cpp does not support in a draft head"
    return DraftHeads(n if f"{layers[0]}.nextn.eh_proj.weight" in names else 0, architecture, fault)
