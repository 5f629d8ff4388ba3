"""Writes GGUF files with random weights: no download, ready in a moment, text without meaning.

They serve the self-check (does this build of the library crash here?), tests, and speed measurements at real sizes.
Only the Llama architecture is built here; `Weight` and `write_gguf` work for other architectures too.
"""

from __future__ import annotations

import itertools
import math
import os
import string
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import msgspec
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize

from cppbatch.errors import ModelError
from cppbatch.models.inspect import read_gguf

QUANTS = {  # the values of `quant`, with the file type that is written to the metadata
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
}

Encode = Callable[[npt.NDArray[np.float32], gguf.GGMLQuantizationType], npt.NDArray[Any]]
"""Converts rows of floats to a type: rows of floats, or of blocks as uint8."""

UNK, BOS, EOS, IM_START, IM_END = range(5)  # token ids, the same in every `byte_vocab`
FIRST_BYTE = 5  # the id of <0x00>; the other 255 bytes follow

_SPACE = "\u2581"  # how SentencePiece writes a space
_WORDS = "the that this they and are was for you not with have from said what when will one all can"
_PAIRS = "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri"
_MAX_RANDOM = 1 << 22  # or 8B shapes would take too long


class GgufVocab(msgspec.Struct, frozen=True):
    """A vocabulary: three lists with one entry per token id. SentencePiece, unless `copied` contains another kind."""

    pieces: list[str]
    scores: list[float]  # empty for kinds that have none
    types: list[int]  # gguf.TokenType
    copied: dict[str, Any] = msgspec.field(default_factory=dict)
    """The other metadata of a copied tokeniser: `GGUFReader` fields by name (kind, merges, special ids, template)."""

    def ids(self, *types: int) -> list[int]:
        """The token ids of these types."""
        return [i for i, t in enumerate(self.types) if t in types]


def byte_vocab(size: int = 512) -> GgufVocab:
    """A vocabulary of `size` tokens in which every text tokenises and comes back unchanged.

    In order: 5 special tokens, 256 bytes, printable ASCII, a few English words with their prefixes, letter pairs, then
    made-up words up to `size` (a model can generate them; the tokeniser does not use them). Other characters become
    several byte tokens. Raises ValueError for a `size` below 462 or above 231,987.
    """
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 4
    raw = [f"<0x{b:02X}>" for b in range(256)]
    words = [_SPACE + w for w in _WORDS.split()]
    prefixes = [w[:n] for w in words for n in range(2, len(w) + 1)]  # each merge step needs its own piece
    letters = [_SPACE, *(chr(c) for c in range(0x21, 0x7F)), *(_SPACE + c for c in string.ascii_lowercase)]
    pieces = list(dict.fromkeys([*letters, *prefixes, *_PAIRS.split()]))
    missing = size - len(special) - len(raw) - len(pieces)
    soft, hard = "aeiou", sorted(set(string.ascii_lowercase) - set("aeiou"))
    made_up = (_SPACE + "".join(s) for s in itertools.product(hard, soft, hard, soft, hard))
    pieces += itertools.islice(made_up, max(missing, 0))
    if len(special) + len(raw) + len(pieces) != size:
        raise ValueError(f"a vocabulary of {size} tokens: must be 462 to 231987")
    return GgufVocab(
        pieces=special + raw + pieces,
        scores=[0.0] * (len(special) + len(raw)) + [-float(rank) for rank in range(len(pieces))],
        types=[*kinds, *[gguf.TokenType.BYTE] * len(raw), *[gguf.TokenType.NORMAL] * len(pieces)],
    )


def copy_vocab(path: Path, size: int | None = None) -> GgufVocab:
    """The vocabulary and chat template of another GGUF file.

    It is padded to `size` tokens (None: at least `LLAMA3_VOCAB`) with unused tokens, which no text contains and which
    models of `write_llama` hardly ever generate. Raises `ModelError` if the file has no vocabulary of one of the
    `COPIED_KINDS`, ValueError if `size` is too small.
    """
    reader = read_gguf(path)
    fields = {name: value for name, value in reader.fields.items() if name.startswith("tokenizer.")}
    kind = fields.pop("tokenizer.ggml.model", None)
    if kind is None or "tokenizer.ggml.tokens" not in fields:
        raise ModelError(f"{path} has no vocabulary. Use a model that generates text")
    if kind.contents() not in COPIED_KINDS:
        wanted = " or ".join(COPIED_KINDS.values())
        raise ModelError(f"{path} has a vocabulary of type {kind.contents()!r}. Use one of {wanted}")
    pieces = fields.pop("tokenizer.ggml.tokens").contents()
    n_more = (max(len(pieces), LLAMA3_VOCAB) if size is None else size) - len(pieces)
    if n_more < 0:
        raise ValueError(f"a vocabulary of {size} tokens: {path} has {len(pieces)}, and none of them can be left out")
    scores, types = (fields.pop(f"tokenizer.ggml.{name}", None) for name in ("scores", "token_type"))
    return GgufVocab(
        pieces=pieces + [f"<|unused_{i}|>" for i in range(n_more)],
        scores=scores.contents() + [-1e6] * n_more if scores else [],
        types=(types.contents() if types else [gguf.TokenType.NORMAL] * len(pieces)) + [gguf.TokenType.UNUSED] * n_more,
        copied={"tokenizer.ggml.model": kind, **fields},
    )


COPIED_KINDS = {"gpt2": "byte-level BPE (gpt2)", "llama": "SentencePiece (llama)"}
"""The kinds of vocabularies that `copy_vocab` accepts, by GGUF's names: their unused tokens never match a text."""


class LlamaShape(msgspec.Struct, frozen=True):
    """The sizes of a Llama model. Raises ValueError if they do not fit together."""

    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 128
    n_ctx_train: int = 4096
    rope_base: float = 10_000.0
    tied: bool = False
    """Whether the token embedding is also the output matrix, as in many small models."""

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_embd", "n_head", "n_head_kv", "n_ff", "n_ctx_train", "rope_base"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least 1")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f"n_embd is {self.n_embd}: must be a multiple of 2 * n_head, {2 * self.n_head}")
        if self.n_head % self.n_head_kv:
            raise ValueError(f"n_head is {self.n_head}: must be a multiple of n_head_kv, {self.n_head_kv}")


SHAPES = {
    "1B": LlamaShape(
        n_layer=16, n_embd=2048, n_head=32, n_head_kv=8, n_ff=8192, n_ctx_train=131_072, rope_base=500_000.0, tied=True
    ),
    "8B": LlamaShape(
        n_layer=32, n_embd=4096, n_head=32, n_head_kv=8, n_ff=14_336, n_ctx_train=131_072, rope_base=500_000.0
    ),
    "70B": LlamaShape(
        n_layer=80, n_embd=8192, n_head=64, n_head_kv=8, n_ff=28_672, n_ctx_train=131_072, rope_base=500_000.0
    ),
}
"""The sizes of Llama 3.2 1B, Llama 3.1 8B and 70B. They have `LLAMA3_VOCAB` tokens."""

OLDER_SHAPES = {
    "7B": LlamaShape(n_layer=32, n_embd=4096, n_head=32, n_head_kv=32, n_ff=11_008),
    "13B": LlamaShape(n_layer=40, n_embd=5120, n_head=40, n_head_kv=40, n_ff=13_824),
}
"""The sizes of Llama 2, without grouped-query attention and with `LLAMA2_VOCAB` tokens."""

LLAMA2_VOCAB = 32_000

LLAMA3_VOCAB = 128_256


class Weight(NamedTuple):
    """One tensor to write: normally distributed values, or the constant `mean` if `std` is 0."""

    name: str
    shape: tuple[int, ...]  # (n,), or (outputs, inputs), numpy's order: the reverse of ggml's ne
    std: float = 0.0
    mean: float = 0.0
    zero_rows: Sequence[int] = ()
    kind: str = ""
    """The type of the tensor; "": that of the file's matrices."""


def matrix(name: str, outputs: int, inputs: int, gain: float = 1.0, zero_rows: Sequence[int] = ()) -> Weight:
    """A random (outputs, inputs) matrix that multiplies the norm of its input by about `gain`."""
    return Weight(f"{name}.weight", (outputs, inputs), std=gain / math.sqrt(inputs), zero_rows=zero_rows)


def norm(name: str, size: int) -> Weight:
    """The (size,) weight of a normalisation: all ones."""
    return Weight(f"{name}.weight", (size,), mean=1.0)


def write_llama(
    path: str | os.PathLike[str],
    shape: LlamaShape | None = None,
    *,
    quant: str = "F32",
    seed: int = 0,
    chat_template: str | None = None,
    vocab: GgufVocab | None = None,
    silent: Sequence[int] = (gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED),
    output_gain: float = 4.0,
    encode: Encode = quantize,
    max_random: int = _MAX_RANDOM,
    is_hollow: bool = False,
) -> Path:
    """Writes a random Llama model to `path` and returns it. The same arguments produce the same bytes.

    `quant`: the type of the matrices, a key of `QUANTS`; vectors stay F32. llama.cpp's repacked and AMX kernels need
    n_embd and n_ff to be multiples of 256, and a vocabulary of 512. `vocab`: None for `byte_vocab()`. Tokens of the
    types in `silent` have logit 0, far below the highest ones, so greedy text does not end by chance. `output_gain`:
    the spread of the other logits. `encode` may know more types than `QUANTS`. `max_random`: random values per matrix;
    a larger matrix repeats them. `is_hollow`: write a hole of their size in place of the weights, for estimates.
    Raises ValueError for an unknown `quant` or a size that is not a multiple of its block (32), OSError if the file
    cannot be written.
    """
    shape = shape or LlamaShape()
    vocab = vocab or byte_vocab()
    writer = start_gguf(path, "llama", shape, vocab)
    writer.add_rope_dimension_count(shape.n_embd // shape.n_head)
    writer.add_rope_freq_base(shape.rope_base)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    weights = _llama_weights(shape, vocab, silent, output_gain)
    return write_gguf(
        path, writer, weights, quant=quant, seed=seed, encode=encode, max_random=max_random, is_hollow=is_hollow
    )


def start_gguf(path: str | os.PathLike[str], architecture: str, shape: LlamaShape, vocab: GgufVocab) -> Any:
    """Returns a GGUFWriter with the metadata that Llama and its relatives have in common."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocab.pieces))
    add_vocab(writer, vocab)
    return writer


def add_vocab(writer: Any, vocab: GgufVocab) -> None:
    """Adds a vocabulary to the metadata of a GGUFWriter.

    With a `byte_vocab`, BOS but no space is added in front of a text, so that it comes back unchanged. A copied
    vocabulary keeps its own settings.
    """
    writer.add_token_list(vocab.pieces)
    writer.add_token_types(vocab.types)
    if vocab.scores:
        writer.add_token_scores(vocab.scores)
    for name, copied in vocab.copied.items():
        writer.add_key_value(name, copied.contents(), copied.types[0], copied.types[-1])
    if vocab.copied:
        return
    writer.add_tokenizer_model("llama")
    writer.add_unk_token_id(UNK)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(IM_END)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def write_gguf(
    path: str | os.PathLike[str],
    writer: Any,
    weights: Iterable[Weight],
    *,
    quant: str = "F32",
    seed: int = 0,
    encode: Encode = quantize,
    max_random: int = _MAX_RANDOM,
    is_hollow: bool = False,
) -> Path:
    """Writes the metadata of `writer` and the weights to `path`, with one tensor in memory at a time.

    `writer`: a GGUFWriter that has not written anything yet. Raises the same exceptions as `write_llama`.
    """
    if encode is quantize and quant not in QUANTS:
        raise ValueError(f"quant is {quant!r}: must be one of {', '.join(QUANTS)}")
    weights = list(weights)
    n_bytes = [_n_bytes(weight, quant) for weight in weights]
    writer.add_file_type(QUANTS.get(quant, gguf.LlamaFileType.GUESSED))
    for weight, size in zip(weights, n_bytes, strict=True):
        kind = _kind(weight, quant)
        writer.add_tensor_info(weight.name, weight.shape, np.dtype(np.float32), size, raw_dtype=kind)
    rng = np.random.default_rng(seed)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for weight in () if is_hollow else weights:
            writer.write_tensor_data(_values(weight, _kind(weight, quant), rng, encode, max_random))
    finally:
        writer.close()
    if is_hollow:
        start = writer.ggml_pad(Path(path).stat().st_size, writer.data_alignment)
        os.truncate(path, start + sum(writer.ggml_pad(size, writer.data_alignment) for size in n_bytes))
    return Path(path)


def llama_bytes(shape: LlamaShape, vocab: GgufVocab, quant: str) -> int:
    """The size of the weights that `write_llama` would write, in bytes. Raises the same exceptions."""
    return sum(_n_bytes(weight, quant) for weight in _llama_weights(shape, vocab, ()))


def _n_bytes(weight: Weight, quant: str) -> int:
    block, size = GGML_QUANT_SIZES[_kind(weight, quant)]
    if weight.shape[-1] % block:
        raise ValueError(f"{weight.name} has rows of {weight.shape[-1]}: must be a multiple of {block} for {quant}")
    return int(math.prod(weight.shape) // block * size)


def _kind(weight: Weight, quant: str) -> Any:
    is_float = len(weight.shape) == 1 or weight.shape[-1] < 16  # a vector, or kernels of a convolution
    return gguf.GGMLQuantizationType["F32" if is_float else weight.kind or quant]


def _values(weight: Weight, kind: Any, rng: np.random.Generator, encode: Encode, max_random: int) -> npt.NDArray[Any]:
    """The tensor in the format of the file: rows of floats, or of quantised blocks as uint8."""
    if weight.std == 0.0:
        return np.asarray(quantize(np.full(weight.shape, weight.mean, np.float32), kind))
    rows, columns = math.prod(weight.shape[:-1]), weight.shape[-1]
    n_random = min(rows, max(1, max_random // columns))
    random = rng.standard_normal((n_random, columns), dtype=np.float32)
    random *= np.float32(weight.std)
    random += np.float32(weight.mean)
    part = encode(random, kind)
    block = GGML_QUANT_SIZES[kind][1] if part.dtype == np.uint8 else 1
    out = np.empty((rows, part.shape[1]), part.dtype)
    for shift, start in enumerate(range(0, rows, n_random)):  # repeats are shifted by a block: no two rows are equal
        out[start : start + n_random] = np.roll(part, shift * block, axis=1)[: rows - start]
    out[list(weight.zero_rows)] = 0
    return out


def _llama_weights(
    shape: LlamaShape, vocab: GgufVocab, silent: Sequence[int], output_gain: float = 4.0
) -> Iterable[Weight]:
    """The gains keep generated text varied: attention selects a few tokens, and layers outweigh the embedding."""
    n_embd, n_vocab = shape.n_embd, len(vocab.pieces)
    n_kv = n_embd // shape.n_head * shape.n_head_kv
    if shape.tied:
        yield matrix("token_embd", n_vocab, n_embd, output_gain, zero_rows=vocab.ids(*silent))
    else:
        yield Weight("token_embd.weight", (n_vocab, n_embd), std=0.5)
    for i in range(shape.n_layer):
        yield norm(f"blk.{i}.attn_norm", n_embd)
        yield matrix(f"blk.{i}.attn_q", n_embd, n_embd, 2.0)
        yield matrix(f"blk.{i}.attn_k", n_kv, n_embd, 2.0)
        yield matrix(f"blk.{i}.attn_v", n_kv, n_embd)
        yield matrix(f"blk.{i}.attn_output", n_embd, n_embd, 2.0)
        yield norm(f"blk.{i}.ffn_norm", n_embd)
        yield matrix(f"blk.{i}.ffn_gate", shape.n_ff, n_embd, 2.0)
        yield matrix(f"blk.{i}.ffn_up", shape.n_ff, n_embd)
        yield matrix(f"blk.{i}.ffn_down", n_embd, shape.n_ff)
    yield norm("output_norm", n_embd)
    if not shape.tied:
        yield matrix("output", n_vocab, n_embd, output_gain, zero_rows=vocab.ids(*silent))
