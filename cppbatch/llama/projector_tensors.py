"""Which tensors a projector file needs. Without some of them llama.cpp crashes, or computes nonsense silently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cppbatch.errors import ModelError
from cppbatch.llama.gguf_header import list_tensors, number_of

_MAX_NAMED = 3
_MAX_BLOCKS = 512


def _with_bias(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{end}" for name in names for end in ("weight", "bias"))


_MERGER = ("v.patch_embd.weight", "v.patch_embd.weight.1", "v.post_ln.weight", *_with_bias("mm.0", "mm.2"))
_BLOCK = _with_bias("attn_out", "ffn_up", "ffn_down")
_QKV, _NORMS = _with_bias("attn_q", "attn_k", "attn_v"), _with_bias("ln1", "ln2")
_NEEDED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "qwen2vl_merger": ((*_MERGER, "v.post_ln.bias"), (*_BLOCK, *_QKV, *_NORMS)),
    "qwen2.5vl_merger": (_MERGER, (*_BLOCK, *_QKV, *_with_bias("ffn_gate"), "ln1.weight", "ln2.weight")),
    "qwen3vl_merger": (
        (*_MERGER, "v.post_ln.bias", "v.patch_embd.bias", "v.position_embd.weight"),
        (*_BLOCK, *_with_bias("attn_qkv"), *_NORMS),
    ),
}
"""For a type of projector: tensors of the file, and of each block. Other types are only tried (`projector_check`)."""
_DEEPSTACK = _with_bias("norm", "fc1", "fc2")


def check_tensors(path: Path, projector: str) -> None:
    """Raises `ModelError` if the file lacks tensors that this type of projector needs."""
    if projector not in _NEEDED:
        return
    there = {tensor.name for tensor in list_tensors(path)}
    missing = [name for name in _needed(path, projector, there) if name not in there]
    if missing:
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        names = ", ".join(missing[:_MAX_NAMED])
        raise ModelError(
            f"{path} is damaged: a projector of type {projector} requires {names}{more}. Download it again"
        )


def _needed(path: Path, projector: str, there: set[str]) -> Iterator[str]:
    of_file, of_block = _NEEDED[projector]
    yield from of_file
    for i in range(min(_MAX_BLOCKS, int(number_of(path, "clip.vision.block_count") or 0))):
        yield from (f"v.blk.{i}.{name}" for name in of_block)
        deepstack = [f"v.deepstack.{i}.{name}" for name in _DEEPSTACK]
        if not there.isdisjoint(deepstack):
            yield from deepstack
