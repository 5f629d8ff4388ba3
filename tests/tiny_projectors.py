"""Small GGUF files with random encoders of pictures and sound and their projectors (llama.cpp's mmproj), for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from cppbatch.models.synthetic import Weight, matrix, norm, write_gguf
from tests.tiny_models import PathLike

N_EMBD, N_HEAD, N_FF, N_LAYER = 64, 4, 128, 2
IMAGE_SIZE, PATCH_SIZE = 32, 8
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
"""Tokens of any picture with `vision`."""
N_MEL, SOUND_POSITIONS, STACK = 80, 1500, 250
SOUND_TOKENS = SOUND_POSITIONS // STACK
"""Tokens of each half minute of sound with `audio`."""
SAMPLE_RATE = 16_000


def vision(path: PathLike, *, n_embd: int = 64, projector: str = "mlp", seed: int = 0, gain: float = 1.0) -> Path:
    """LLaVA: a picture becomes 16 tokens of a text model with `n_embd`, without control tokens around them."""
    writer = _writer(path, "vision", n_embd, projector)
    weights = [*_vision_layers(), matrix("mm.0", n_embd, N_EMBD), Weight("mm.0.bias", (n_embd,))]
    weights += [matrix("mm.2", n_embd, n_embd, gain), Weight("mm.2.bias", (n_embd,))]
    return write_gguf(path, writer, weights, seed=seed)


def non_causal_vision(path: PathLike, *, n_embd: int = 64, seed: int = 0) -> Path:
    """Gemma 3: all 16 tokens of a picture see each other. Texts stand around it."""
    writer = _writer(path, "vision", n_embd, "gemma3")
    writer.add_uint32("clip.vision.projector.scale_factor", 1)
    projector = [norm("mm.soft_emb_norm", N_EMBD), matrix("mm.input_projection", N_EMBD, n_embd, 4.0)]
    post = [norm("v.post_ln", N_EMBD), Weight("v.post_ln.bias", (N_EMBD,))]
    return write_gguf(path, writer, [*_vision_layers(), *post, *projector], seed=seed)


def tiled_vision(path: PathLike, *, n_embd: int = 64, seed: int = 0) -> Path:
    """SmolVLM (Idefics 3): a large picture becomes several tiles, with control tokens around each."""
    writer = _writer(path, "vision", n_embd, "idefics3")
    writer.add_uint32("clip.vision.projector.scale_factor", 2)
    writer.add_uint32("clip.vision.preproc_image_size", 2 * IMAGE_SIZE)
    post = [norm("v.post_ln", N_EMBD), Weight("v.post_ln.bias", (N_EMBD,))]
    return write_gguf(path, writer, [*_vision_layers(), *post, matrix("mm.model.fc", n_embd, 4 * N_EMBD)], seed=seed)


def audio(path: PathLike, *, n_embd: int = 64, seed: int = 0) -> Path:
    """Ultravox, with Whisper's encoder: each half minute of sound becomes 6 tokens."""
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


def _writer(path: PathLike, kind: str, n_embd: int, projector: str) -> Any:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("general.type", "mmproj")
    writer.add_string("clip.projector_type", projector)
    writer.add_bool(f"clip.has_{kind}_encoder", True)
    for name, value in (
        ("embedding_length", N_EMBD), ("feed_forward_length", N_FF), ("block_count", N_LAYER),
        ("projection_dim", n_embd), ("attention.head_count", N_HEAD),
    ):  # fmt: skip
        writer.add_uint32(f"clip.{kind}.{name}", value)
    writer.add_float32(f"clip.{kind}.attention.layer_norm_epsilon", 1e-5)
    if kind == "audio":
        writer.add_uint32("clip.audio.num_mel_bins", N_MEL)
        writer.add_uint32("clip.audio.projector.stack_factor", STACK)
        return writer
    writer.add_bool("clip.use_gelu", True)
    writer.add_uint32("clip.vision.image_size", IMAGE_SIZE)
    writer.add_uint32("clip.vision.patch_size", PATCH_SIZE)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    return writer


def _vision_layers() -> list[Weight]:
    n_positions = (IMAGE_SIZE // PATCH_SIZE) ** 2
    return [
        Weight("v.patch_embd.weight", (N_EMBD, 3, PATCH_SIZE, PATCH_SIZE), std=0.2),
        Weight("v.position_embd.weight", (n_positions, N_EMBD), std=0.2),
        *_layers("v"),
    ]


def _layers(prefix: str) -> list[Weight]:
    weights = []
    for i in range(N_LAYER):
        blk = f"{prefix}.blk.{i}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            weights.append(matrix(f"{blk}.{name}", N_EMBD, N_EMBD, 2.0))
            if name != "attn_k" or prefix == "v":  # Whisper's keys have none
                weights.append(Weight(f"{blk}.{name}.bias", (N_EMBD,)))
        for name in ("ln1", "ln2"):
            weights += [norm(f"{blk}.{name}", N_EMBD), Weight(f"{blk}.{name}.bias", (N_EMBD,))]
        weights += [matrix(f"{blk}.ffn_up", N_FF, N_EMBD, 2.0), Weight(f"{blk}.ffn_up.bias", (N_FF,))]
        weights += [matrix(f"{blk}.ffn_down", N_EMBD, N_FF), Weight(f"{blk}.ffn_down.bias", (N_EMBD,))]
    return weights
