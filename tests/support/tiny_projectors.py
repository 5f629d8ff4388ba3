"""Small GGUF files with random image and audio encoders and their projectors (llama.cpp's mmproj), for tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from cppbatch.models.synthetic import Weight, matrix, norm, write_gguf
from tests.support.tiny_models import PathLike


@dataclass(frozen=True)
class EncoderShape:
    """The sizes of an encoder. An image is scaled to `image_size` and cut into patches, each of which is a token."""

    n_embd: int = 64
    n_head: int = 4
    n_ff: int = 128
    n_layer: int = 2
    image_size: int = 32
    patch_size: int = 8

    @property
    def n_tokens(self) -> int:
        """Of any image, with `vision`."""
        return (self.image_size // self.patch_size) ** 2


TINY = EncoderShape()
N_EMBD, N_FF, N_LAYER, IMAGE_SIZE = TINY.n_embd, TINY.n_ff, TINY.n_layer, TINY.image_size
IMAGE_TOKENS = TINY.n_tokens
SIGLIP_BASE = EncoderShape(n_embd=768, n_head=12, n_ff=3072, n_layer=12, image_size=224, patch_size=16)
"""SigLIP base at 224 pixels: 86 million weights, 196 tokens."""
N_MEL, SOUND_POSITIONS, STACK = 80, 1500, 250
SOUND_TOKENS = SOUND_POSITIONS // STACK
"""Tokens of each half minute of audio with `audio`."""
SAMPLE_RATE = 16_000


def vision(
    path: PathLike,
    *,
    n_embd: int = 64,
    shape: EncoderShape = TINY,
    quant: str = "F32",
    without: str = "",
    seed: int = 0,
) -> Path:
    """LLaVA: an image becomes tokens of a text model with `n_embd`, without control tokens around them.

    `without`: leaves out this tensor.
    """
    writer = _writer(path, "vision", n_embd, "mlp", shape)
    weights = [*_vision_layers(shape), matrix("mm.0", n_embd, shape.n_embd), Weight("mm.0.bias", (n_embd,))]
    weights += [matrix("mm.2", n_embd, n_embd), Weight("mm.2.bias", (n_embd,))]
    return write_gguf(path, writer, _left(weights, without), quant=quant, seed=seed)


def non_causal_vision(path: PathLike, *, n_embd: int = 64, seed: int = 0) -> Path:
    """Gemma 3: all 16 tokens of an image attend to each other, with text around them."""
    writer = _writer(path, "vision", n_embd, "gemma3")
    writer.add_uint32("clip.vision.projector.scale_factor", 1)
    projector = [norm("mm.soft_emb_norm", N_EMBD), matrix("mm.input_projection", N_EMBD, n_embd, 4.0)]
    post = [norm("v.post_ln", N_EMBD), Weight("v.post_ln.bias", (N_EMBD,))]
    return write_gguf(path, writer, [*_vision_layers(), *post, *projector], seed=seed)


def tiled_vision(path: PathLike, *, n_embd: int = 64, seed: int = 0) -> Path:
    """SmolVLM (Idefics 3): a large image becomes several tiles, with control tokens around each."""
    writer = _writer(path, "vision", n_embd, "idefics3")
    writer.add_uint32("clip.vision.projector.scale_factor", 2)
    writer.add_uint32("clip.vision.preproc_image_size", 2 * IMAGE_SIZE)
    post = [norm("v.post_ln", N_EMBD), Weight("v.post_ln.bias", (N_EMBD,))]
    return write_gguf(path, writer, [*_vision_layers(), *post, matrix("mm.model.fc", n_embd, 4 * N_EMBD)], seed=seed)


QWEN_PROJECTORS = {"qwen2vl": "qwen2vl_merger", "qwen2.5vl": "qwen2.5vl_merger", "qwen3vl": "qwen3vl_merger"}
MERGED = 2
"""Patches of a row, and of a column, that become one token, with `qwen_vision`."""


def qwen_vision(
    path: PathLike, kind: str = "qwen2vl", *, n_embd: int = 64, n_deepstack: int = 0, without: str = "", seed: int = 0
) -> Path:
    """Qwen2-VL, Qwen2.5-VL or Qwen3-VL (`QWEN_PROJECTORS`): an image has a token for each 16 x 16 pixels.

    `n_deepstack`: layers with outputs that become a part of the vectors too. `without`: leaves out this tensor.
    """
    is_25, is_3 = kind == "qwen2.5vl", kind == "qwen3vl"
    shape = EncoderShape(image_size=16 * TINY.patch_size)
    writer = _writer(path, "vision", n_embd, QWEN_PROJECTORS[kind], shape)
    writer.add_uint32("clip.vision.spatial_merge_size", MERGED)
    if is_25:
        writer.add_uint32("clip.vision.n_wa_pattern", 2)  # the second layer sees all, the first one windows
    patches = (N_EMBD, 3, shape.patch_size, shape.patch_size)
    weights = [Weight(f"v.patch_embd.weight{end}", patches, std=0.2) for end in ("", ".1")]  # of two frames
    n_merged = MERGED**2 * N_EMBD
    for weight in _layers("v", shape):
        is_norm = ".ln" in weight.name
        if not (is_25 and is_norm and weight.name.endswith("bias")) and not (is_3 and "attn_" in weight.name):
            weights.append(weight)
    for i in range(shape.n_layer):
        if is_25:
            weights += [matrix(f"v.blk.{i}.ffn_gate", N_FF, N_EMBD, 2.0), Weight(f"v.blk.{i}.ffn_gate.bias", (N_FF,))]
        if is_3:
            for name, n in (("attn_qkv", 3 * N_EMBD), ("attn_out", N_EMBD)):
                weights += [matrix(f"v.blk.{i}.{name}", n, N_EMBD, 2.0), Weight(f"v.blk.{i}.{name}.bias", (n,))]
    if is_3:
        weights += [Weight("v.patch_embd.bias", (N_EMBD,)), Weight("v.position_embd.weight", (256, N_EMBD), std=0.2)]
    for i in range(n_deepstack):
        weights += [norm(f"v.deepstack.{i}.norm", n_merged), Weight(f"v.deepstack.{i}.norm.bias", (n_merged,))]
        for name, n in (("fc1", n_merged), ("fc2", n_embd)):
            weights += [matrix(f"v.deepstack.{i}.{name}", n, n_merged), Weight(f"v.deepstack.{i}.{name}.bias", (n,))]
    weights += [norm("v.post_ln", N_EMBD), *([] if is_25 else [Weight("v.post_ln.bias", (N_EMBD,))])]
    for name, n in (("mm.0", n_merged), ("mm.2", n_embd)):
        weights += [matrix(name, n, n_merged, 2.0), Weight(f"{name}.bias", (n,))]
    return write_gguf(path, writer, _left(weights, without), seed=seed)


def audio(path: PathLike, *, n_embd: int = 64, seed: int = 0) -> Path:
    """Ultravox, with Whisper's encoder: each half minute of audio becomes 6 tokens."""
    writer = _writer(path, "audio", n_embd, "ultravox")
    weights = [
        Weight("a.position_embd.weight", (SOUND_POSITIONS, N_EMBD), std=0.5),
        Weight("a.conv1d.1.weight", (N_EMBD, N_MEL, 3), std=0.1),
        Weight("a.conv1d.1.bias", (N_EMBD, 1)),
        Weight("a.conv1d.2.weight", (N_EMBD, N_EMBD, 3), std=0.1),
        Weight("a.conv1d.2.bias", (N_EMBD, 1)),
        *_layers("a"),
        norm("a.post_ln", N_EMBD),
        Weight("a.post_ln.bias", (N_EMBD,)),
        norm("mm.a.norm_pre", N_EMBD * STACK),
        matrix("mm.a.mlp.1", 2 * N_FF, N_EMBD * STACK),
        norm("mm.a.norm_mid", N_FF),
        matrix("mm.a.mlp.2", n_embd, N_FF),
    ]
    return write_gguf(path, writer, weights, seed=seed)


def _left(weights: list[Weight], without: str) -> list[Weight]:
    assert not without or without in {weight.name for weight in weights}
    return [weight for weight in weights if weight.name != without]


def _writer(path: PathLike, kind: str, n_embd: int, projector: str, shape: EncoderShape = TINY) -> Any:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("general.type", "mmproj")
    writer.add_string("clip.projector_type", projector)
    writer.add_bool(f"clip.has_{kind}_encoder", True)
    for name, value in (
        ("embedding_length", shape.n_embd), ("feed_forward_length", shape.n_ff), ("block_count", shape.n_layer),
        ("projection_dim", n_embd), ("attention.head_count", shape.n_head),
    ):  # fmt: skip
        writer.add_uint32(f"clip.{kind}.{name}", value)
    writer.add_float32(f"clip.{kind}.attention.layer_norm_epsilon", 1e-5)
    if kind == "audio":
        writer.add_uint32("clip.audio.num_mel_bins", N_MEL)
        writer.add_uint32("clip.audio.projector.stack_factor", STACK)
        return writer
    writer.add_bool("clip.use_silu" if projector == QWEN_PROJECTORS["qwen2.5vl"] else "clip.use_gelu", True)
    writer.add_uint32("clip.vision.image_size", shape.image_size)
    writer.add_uint32("clip.vision.patch_size", shape.patch_size)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    return writer


def _vision_layers(shape: EncoderShape = TINY) -> list[Weight]:
    return [
        Weight("v.patch_embd.weight", (shape.n_embd, 3, shape.patch_size, shape.patch_size), std=0.2),
        Weight("v.position_embd.weight", (shape.n_tokens, shape.n_embd), std=0.2),
        *_layers("v", shape),
    ]


def _layers(prefix: str, shape: EncoderShape = TINY) -> list[Weight]:
    n_embd, n_ff = shape.n_embd, shape.n_ff
    weights = []
    for i in range(shape.n_layer):
        blk = f"{prefix}.blk.{i}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            weights.append(matrix(f"{blk}.{name}", n_embd, n_embd, 2.0))
            if name != "attn_k" or prefix == "v":  # Whisper's keys have none
                weights.append(Weight(f"{blk}.{name}.bias", (n_embd,)))
        for name in ("ln1", "ln2"):
            weights += [norm(f"{blk}.{name}", n_embd), Weight(f"{blk}.{name}.bias", (n_embd,))]
        weights += [matrix(f"{blk}.ffn_up", n_ff, n_embd, 2.0), Weight(f"{blk}.ffn_up.bias", (n_ff,))]
        weights += [matrix(f"{blk}.ffn_down", n_embd, n_ff), Weight(f"{blk}.ffn_down.bias", (n_embd,))]
    return weights
