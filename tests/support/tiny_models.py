"""Small GGUF files for tests: one of each kind of model the engine must run or refuse, and broken ones.

Every builder takes the path to write and returns it; each takes well under a second.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from msgspec.structs import replace

from cppbatch.models.synthetic import (
    GgufVocab,
    Weight,
    add_vocab,
    byte_vocab,
    copy_vocab,
    matrix,
    norm,
    write_gguf,
    write_llama,
)

N_EMBD, N_HEAD, N_HEAD_KV, N_FF, N_CTX_TRAIN = 64, 4, 2, 128, 4096
N_KV = N_EMBD // N_HEAD * N_HEAD_KV
WINDOW = 32  # cells of the sliding window

PathLike = str | os.PathLike[str]


def llama(path: PathLike, **kwargs: Any) -> Path:
    """A plain transformer with F32 weights; keyword arguments go to `write_llama`."""
    return write_llama(path, **kwargs)


def writing(path: PathLike, pieces: Sequence[str], **kwargs: Any) -> Path:
    """A plain transformer that reads any text, writes these pieces and nothing else, and never ends by itself."""
    read, user_defined = byte_vocab(), gguf.TokenType.USER_DEFINED
    vocab = GgufVocab(
        pieces=[*read.pieces, *pieces],
        scores=[*read.scores, *[-1e6] * len(pieces)],
        types=[*read.types, *[user_defined] * len(pieces)],
    )
    return llama(path, vocab=vocab, silent=[each for each in gguf.TokenType if each != user_defined], **kwargs)


def patched(path: PathLike, key: str, value: float) -> Path:
    """A plain transformer with another value of `llama.{key}` in its metadata."""
    written = llama(path)
    reader = gguf.GGUFReader(written, "r+")
    field = reader.get_field(f"llama.{key}")
    assert field
    field.parts[field.data[0]][:] = value
    return written


def ending_with_eos(path: PathLike) -> Path:
    """A plain transformer whose file says that a text ends with EOS."""
    vocab = copy_vocab(llama(path), len(byte_vocab().pieces))
    vocab.copied["tokenizer.ggml.add_eos_token"] = vocab.copied["tokenizer.ggml.add_bos_token"]  # both are true
    return llama(path, vocab=vocab)


def experts(path: PathLike, *, n_layers: int = 4, n_experts: int = 4) -> Path:
    """A transformer whose feed-forward parts are experts, of which two compute each token (Mixtral)."""
    writer = _writer(path, "llama", n_layers=n_layers)
    _add_attention(writer, N_HEAD_KV)
    writer.add_expert_count(n_experts)
    writer.add_expert_used_count(2)
    weights = [_embedding(), norm("output_norm", N_EMBD), _output()]
    for i in range(n_layers):
        blk = f"blk.{i}"
        weights += [*_plain_attention(blk), norm(f"{blk}.ffn_norm", N_EMBD)]
        weights.append(matrix(f"{blk}.ffn_gate_inp", n_experts, N_EMBD))
    arrays = {}
    rng = np.random.default_rng(0)
    for i in range(n_layers):
        for name, shape in {"gate": (N_FF, N_EMBD), "up": (N_FF, N_EMBD), "down": (N_EMBD, N_FF)}.items():
            values = rng.normal(0, shape[1] ** -0.5, (n_experts, *shape)).astype(np.float32)
            arrays[f"blk.{i}.ffn_{name}_exps.weight"] = values
    return _write_arrays(path, writer, weights, arrays)


def mamba(path: PathLike) -> Path:
    """A recurrent model: one state per sequence instead of KV cells, which cannot be partly removed."""
    n_inner, n_state, n_conv, n_rank = 2 * N_EMBD, 8, 4, 8
    writer = _writer(path, "mamba")
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(n_conv)
    writer.add_ssm_inner_size(n_inner)
    writer.add_ssm_state_size(n_state)
    writer.add_ssm_time_step_rank(n_rank)
    weights = [_embedding()]
    for i in range(2):
        blk = f"blk.{i}"
        weights += [
            norm(f"{blk}.attn_norm", N_EMBD),
            matrix(f"{blk}.ssm_in", 2 * n_inner, N_EMBD, 2.0),
            Weight(f"{blk}.ssm_conv1d.weight", (n_inner, n_conv), std=0.5),
            Weight(f"{blk}.ssm_conv1d.bias", (n_inner,)),
            matrix(f"{blk}.ssm_x", n_rank + 2 * n_state, n_inner, 2.0),
            matrix(f"{blk}.ssm_dt", n_inner, n_rank),
            Weight(f"{blk}.ssm_dt.bias", (n_inner,)),
            Weight(f"{blk}.ssm_a", (n_inner, n_state), std=0.1, mean=-1.0),  # negative: the state decays
            Weight(f"{blk}.ssm_d", (n_inner,), mean=1.0),
            matrix(f"{blk}.ssm_out", N_EMBD, n_inner, 2.0),
        ]
    return write_gguf(path, writer, [*weights, norm("output_norm", N_EMBD), _output()])


def sliding_window(path: PathLike, *, n_layers: int = 2) -> Path:
    """Gemma 3: the first of each two layers sees only the last WINDOW tokens, the second all of them."""
    writer = _writer(path, "gemma3", n_layers=n_layers)
    _add_attention(writer, N_HEAD_KV)
    writer.add_key_length(N_EMBD // N_HEAD)
    writer.add_value_length(N_EMBD // N_HEAD)
    writer.add_sliding_window(WINDOW)
    writer.add_sliding_window_pattern([i % 2 == 0 for i in range(n_layers)])
    weights = [matrix("token_embd", len(byte_vocab().pieces), N_EMBD, 0.5)]  # the model scales it by sqrt(n_embd)
    for i in range(n_layers):
        weights += _attention(f"blk.{i}") + _feed_forward(f"blk.{i}")
        weights += [norm(f"blk.{i}.{name}", N_EMBD) for name in ("post_attention_norm", "post_ffw_norm")]
    return write_gguf(path, writer, [*weights, norm("output_norm", N_EMBD), _output()])


def unused_window(path: PathLike) -> Path:
    """EXAONE 4 with few layers: its file names a window, but all layers see all tokens."""
    writer = _writer(path, "exaone4")
    _add_attention(writer, N_HEAD_KV)
    writer.add_key_length(N_EMBD // N_HEAD)
    writer.add_value_length(N_EMBD // N_HEAD)
    writer.add_sliding_window(WINDOW)
    weights = [_embedding(), norm("output_norm", N_EMBD), _output()]
    for i in range(2):
        layer = _attention(f"blk.{i}") + _feed_forward(f"blk.{i}")
        weights += [each for each in layer if not each.name.endswith(("attn_norm.weight", "ffn_norm.weight"))]
        weights += [norm(f"blk.{i}.{name}", N_EMBD) for name in ("post_attention_norm", "post_ffw_norm")]
    return write_gguf(path, writer, weights)


def two_dimensional(path: PathLike, *, architecture: str = "qwen2vl", n_deepstack: int = 0) -> Path:
    """Qwen2-VL, or Qwen3-VL ("qwen3vl"): tokens of images have positions of two dimensions (M-RoPE).

    `n_deepstack`: the number of layers that add a part of an image's vectors, which are that much longer.
    """
    writer = _mrope_writer(path, architecture)
    if n_deepstack:
        writer.add_uint32(f"{architecture}.n_deepstack_layers", n_deepstack)
    weights = [_embedding()]
    for i in range(2):
        biases = [Weight(f"blk.{i}.attn_{name}.bias", (n,)) for name, n in (("q", N_EMBD), ("k", N_KV), ("v", N_KV))]
        attention = [*_plain_attention(f"blk.{i}"), *biases] if architecture == "qwen2vl" else _attention(f"blk.{i}")
        weights += [*attention, *_feed_forward(f"blk.{i}")]
    return write_gguf(path, writer, [*weights, norm("output_norm", N_EMBD), _output()])


def two_dimensional_hybrid(path: PathLike, *, n_layers: int = 2, has_head: bool = False) -> Path:
    """Qwen 3.5: the first of each two layers is a gated delta net with a state, the second attention, with M-RoPE.
    `has_head`: one more is a draft head."""
    n_state, n_heads, n_groups = 16, 4, 2
    n_inner, n_keys = n_heads * n_state, n_groups * n_state
    writer = _mrope_writer(path, "qwen35", n_layers)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(n_inner)
    writer.add_ssm_state_size(n_state)
    writer.add_ssm_time_step_rank(n_heads)
    writer.add_ssm_group_count(n_groups)
    writer.add_full_attention_interval(2)
    weights = [_embedding()]
    for blk in [f"blk.{i}" for i in range(0, n_layers, 2)]:
        weights += [
            norm(f"{blk}.attn_norm", N_EMBD),
            matrix(f"{blk}.attn_qkv", n_inner + 2 * n_keys, N_EMBD, 2.0),
            matrix(f"{blk}.attn_gate", n_inner, N_EMBD, 2.0),
            matrix(f"{blk}.ssm_beta", n_heads, N_EMBD),
            matrix(f"{blk}.ssm_alpha", n_heads, N_EMBD),
            Weight(f"{blk}.ssm_conv1d.weight", (n_inner + 2 * n_keys, 4), std=0.5),
            Weight(f"{blk}.ssm_dt.bias", (n_heads,), std=0.1),
            Weight(f"{blk}.ssm_a", (n_heads,), std=0.1, mean=-1.0),  # negative: the state decays
            norm(f"{blk}.ssm_norm", n_state),
            matrix(f"{blk}.ssm_out", N_EMBD, n_inner, 2.0),
        ]
    for i in [*range(1, n_layers, 2), *[n_layers] * has_head]:
        attention = [weight for weight in _attention(f"blk.{i}") if weight.name != f"blk.{i}.attn_q.weight"]
        attention.append(matrix(f"blk.{i}.attn_q", 2 * N_EMBD, N_EMBD, 2.0))  # queries, and gates of the output
        weights += attention
    if has_head:
        weights += _head(writer, "qwen35", n_layers)
    for i in range(n_layers + has_head):
        weights += [each._replace(name=each.name.replace("ffn_norm", "post_attention_norm"))
                    for each in _feed_forward(f"blk.{i}")]  # fmt: skip
    return write_gguf(path, writer, [*weights, norm("output_norm", N_EMBD), _output()])


def _mrope_writer(path: PathLike, architecture: str, n_layers: int = 2) -> Any:
    """With pairs of rotated numbers for time, row and column, and the tokens around an image."""
    writer = _writer(path, architecture, vision_vocab(), n_layers=n_layers)
    _add_attention(writer, N_HEAD_KV)
    writer.add_rope_dimension_sections([2, 3, 3, 0])
    return writer


def vision_vocab() -> GgufVocab:
    """`byte_vocab` with the tokens around an image as its last ones."""
    vocab = byte_vocab()
    marks = ["<|vision_start|>", "<|vision_end|>"]
    pieces, kinds = vocab.pieces[: -len(marks)] + marks, vocab.types[: -len(marks)] + [gguf.TokenType.CONTROL] * 2
    return replace(vocab, pieces=pieces, types=kinds)


def with_head(path: PathLike, *, head: str = "random", n_layers: int = 2, n_heads: int = 1, seed: int = 0) -> Path:
    """Hunyuan 3 (hy_v3), with dense layers, and draft heads in `n_heads` more layers.

    `head`: "random"; or "right" or "wrong" by construction: the layers change nothing, so the next token is a function
    of the last one, and the head computes the same function, or yields the least likely token of it.
    """
    writer = _writer(path, "hy_v3", n_layers=n_layers)
    _add_attention(writer, N_HEAD_KV)
    writer.add_expert_feed_forward_length(N_FF)
    weights = [_embedding(), *_head(writer, "hy_v3", n_layers, n_heads), norm("output_norm", N_EMBD), _output()]
    for i in range(n_layers + n_heads):
        weights += [*_attention(f"blk.{i}"), *_feed_forward(f"blk.{i}")]
    if head != "random":
        last = ("attn_output.weight", "ffn_down.weight")
        weights = [each._replace(std=0.0) if each.name.endswith(last) else each for each in weights]
    written = write_gguf(path, writer, weights, seed=seed)
    if head != "random":
        reader = gguf.GGUFReader(written, "r+")
        token_only = np.concatenate([np.eye(N_EMBD), np.zeros((N_EMBD, N_EMBD))], axis=1)
        for projection in (tensor for tensor in reader.tensors if tensor.name.endswith("eh_proj.weight")):
            projection.data[:] = token_only if head == "right" else -token_only
    return written


def _head(writer: Any, architecture: str, n_layers: int = 2, n_heads: int = 1) -> list[Weight]:
    """What draft heads have beside the matrices of a layer. Writes the number of layers again, heads included."""
    writer.kv_data[0].pop(f"{architecture}.block_count")
    writer.add_block_count(n_layers + n_heads)
    writer.add_nextn_predict_layers(n_heads)
    weights = []
    for nextn in [f"blk.{i}.nextn" for i in range(n_layers, n_layers + n_heads)]:
        weights += [matrix(f"{nextn}.eh_proj", N_EMBD, 2 * N_EMBD, 1.0)]
        weights += [norm(f"{nextn}.{name}", N_EMBD) for name in ("enorm", "hnorm", "shared_head_norm")]
    return weights


def echo(path: PathLike, *, n_layers: int = 4) -> Path:
    """A plain transformer with layers that change nothing and the embeddings as output matrix: the most likely next
    token is the last one."""
    writer = _writer(path, "llama", n_layers=n_layers)
    _add_attention(writer, N_HEAD_KV)
    layers = [each for i in range(n_layers) for each in (*_plain_attention(f"blk.{i}"), *_feed_forward(f"blk.{i}"))]
    table = _random(_embedding(), seed=1)
    return _write_arrays(
        path, writer, [*map(_without_effect, layers), norm("output_norm", N_EMBD)],
        {"token_embd.weight": table, "output.weight": 4 * table},
    )  # fmt: skip


def eagle3(
    path: PathLike,
    *,
    own: bool = True,
    echoes: bool = False,
    layers: Sequence[int] = (1, 2, 3),
    n_target: int = N_EMBD,
    d2t: Sequence[int] | None = None,
    vocab: GgufVocab | None = None,
    n_layers: int = 1,
    seed: int = 3,
) -> Path:
    """EAGLE-3 for a model with vectors of `n_target` numbers: one layer, which reads the rows that enter `layers`.

    `own`: vectors of its own length, embeddings of its own, and logits of the tokens `d2t` only (None: of every third
    one); else all of these are the target's. `echoes`: right by construction for `echo`.
    """
    n_embd = N_EMBD // 2 if own and not echoes else n_target
    writer = _draft_writer(path, "eagle3", layers, vocab, n_embd=n_embd, n_layers=n_layers)
    writer.add_uint32("eagle3.target_hidden_size", n_target)
    weights = [
        norm("output_norm", n_embd),
        norm("blk.0.attn_norm_2", n_embd),
        *_draft_layer("blk.0", n_embd, 2 * n_embd),
        *([] if echoes else [matrix("fc", n_embd, len(layers) * n_target)]),
    ]
    n_vocab, arrays = len((vocab or byte_vocab()).pieces), {}
    if echoes:
        weights, table = [*map(_without_effect, weights)], _random(_embedding(), seed=1)
        arrays = {"token_embd.weight": table, "output.weight": 4 * table}
        arrays["fc.weight"] = np.eye(n_embd, len(layers) * n_target, dtype=np.float32)  # the row of the first layer
    elif own:
        arrays["d2t"] = np.array(range(0, n_vocab, 3) if d2t is None else d2t, np.int64)
        weights += [Weight("token_embd.weight", (n_vocab, n_embd), std=0.5)]
        weights += [matrix("output", len(arrays["d2t"]), n_embd, 4.0)]
    return _write_arrays(path, writer, weights, arrays, seed=seed)


def gemma4(path: PathLike, *, echoes: bool = False, n_layers: int = 4, n_per_layer: int = 0) -> Path:
    """Gemma 4: the first of each two layers sees only the last WINDOW tokens. `echoes`: as `echo`. `n_per_layer`: the
    length of the vectors that each layer has for each token."""
    writer = _gemma4_writer(path, "gemma4", n_layers, N_EMBD, n_per_layer=n_per_layer)
    weights = [norm("output_norm", N_EMBD)]
    for i in range(n_layers):
        weights += _attention(f"blk.{i}") + _feed_forward(f"blk.{i}")
        weights += [norm(f"blk.{i}.{name}", N_EMBD) for name in ("post_attention_norm", "post_ffw_norm")]
        if n_per_layer:
            weights += [matrix(f"blk.{i}.inp_gate", n_per_layer, N_EMBD), norm(f"blk.{i}.post_norm", N_EMBD)]
            weights += [matrix(f"blk.{i}.proj", N_EMBD, n_per_layer)]
    if n_per_layer:
        n_all = n_per_layer * n_layers
        weights += [matrix("per_layer_token_embd", len(byte_vocab().pieces), n_all, 4.0)]
        weights += [matrix("per_layer_model_proj", n_all, N_EMBD), norm("per_layer_proj_norm", n_per_layer)]
    table = _random(_embedding(), seed=1)
    arrays = {"token_embd.weight": table, "rope_freqs.weight": np.ones(N_EMBD // N_HEAD // 2, np.float32)}
    if echoes:
        weights, arrays["output.weight"] = [*map(_without_effect, weights)], 4 * table
    else:
        weights.append(_output())
    return _write_arrays(path, writer, weights, arrays)


def gemma4_assistant(
    path: PathLike, *, echoes: bool = False, n_target: int = N_EMBD, n_head_kv: int = N_HEAD_KV, seed: int = 3
) -> Path:
    """The assistant of `gemma4`: two layers of vectors half as long, or of `echoes`, twice as long."""
    n_embd, n_layers = 2 * N_EMBD if echoes else N_EMBD // 2, 2
    writer = _gemma4_writer(path, "gemma4-assistant", n_layers, n_embd, n_head_kv)
    writer.add_embedding_length_out(n_target)
    writer.add_nextn_predict_layers(n_layers)
    weights = [norm("output_norm", n_embd), matrix("nextn.post_projection", n_target, n_embd)]
    arrays: dict[str, Any] = {"rope_freqs.weight": np.ones(N_EMBD // N_HEAD // 2, np.float32)}
    for i in range(n_layers):
        blk = f"blk.{i}"
        layer = _draft_layer(blk, n_embd, n_embd)
        weights += [each for each in layer if each.name not in (f"{blk}.attn_k.weight", f"{blk}.attn_v.weight")]
        weights += [norm(f"{blk}.{name}", n_embd) for name in ("post_attention_norm", "post_ffw_norm")]
        weights += [Weight(f"{blk}.attn_q_norm.weight", (N_EMBD // N_HEAD,), mean=1.5)]
        arrays[f"{blk}.layer_output_scale.weight"] = np.ones(1, np.float32)
    if echoes:
        weights = [*map(_without_effect, weights)]
        arrays["nextn.pre_projection.weight"] = np.eye(n_embd, 2 * n_target, dtype=np.float32)
        arrays["token_embd.weight"] = np.pad(_random(_embedding(), seed=1), [(0, 0), (0, N_EMBD)])
    else:
        weights += [matrix("nextn.pre_projection", n_embd, 2 * n_target)]
        weights += [matrix("token_embd", len(byte_vocab().pieces), n_embd, 4.0)]
    return _write_arrays(path, writer, weights, arrays, seed=seed)


def _gemma4_writer(
    path: PathLike, architecture: str, n_layers: int, n_embd: int, n_head_kv: int = N_HEAD_KV, *, n_per_layer: int = 0
) -> Any:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layers)
    writer.add_layer_norm_rms_eps(1e-5)
    add_vocab(writer, byte_vocab())
    _add_attention(writer, n_head_kv)
    for kind in ("", "_swa"):
        for part in ("key", "value"):
            writer.add_uint32(f"{architecture}.attention.{part}_length{kind}", N_EMBD // N_HEAD)
    writer.add_uint32(f"{architecture}.embedding_length_per_layer_input", n_per_layer)
    writer.add_sliding_window(WINDOW)
    writer.add_sliding_window_pattern([i % 2 == 0 for i in range(n_layers)])
    return writer


BLOCK = 6


def dflash(
    path: PathLike,
    *,
    kind: str = "dflash",
    own: bool = True,
    echoes: bool = False,
    layers: Sequence[int] = (1, 2, 3),
    mask: int | None = 3,
    block: int = BLOCK,
    is_causal: bool = False,
    vocab: GgufVocab | None = None,
    seed: int = 3,
) -> Path:
    """DFlash of two layers, which reads the rows that enter `layers` of a model with vectors of N_EMBD numbers.

    `kind`: "dflash"; "swa", with a sliding window in its first layer; "dflash2", with a selector; "dspark", with a
    Markov head; or "dspark-bonus", in which the newest token drafts none itself. `own`: separate embeddings and output
    matrix. `echoes`: right by construction for `echo`, if the text repeats one token.
    """
    writer = _draft_writer(path, "dflash", layers, vocab, n_embd=N_EMBD, n_layers=2)
    if mask is not None:
        writer.add_mask_token_id(mask)
    writer.add_uint32("dflash.block_size", block)
    writer.add_bool("dflash.attention.causal", is_causal)
    weights = [norm("enc.output_norm", N_EMBD), norm("output_norm", N_EMBD)]
    for i in range(2):
        head_norms = [norm(f"blk.{i}.attn_{x}_norm", N_EMBD // N_HEAD) for x in "qk"]
        weights += [*_draft_layer(f"blk.{i}", N_EMBD, N_EMBD), *head_norms]
    n_vocab, arrays = len((vocab or byte_vocab()).pieces), {}
    if kind.startswith("dspark"):
        writer.add_bool("dflash.sample_from_anchor", kind == "dspark")
        weights += [matrix("markov_w1", n_vocab, 8), matrix("markov_w2", n_vocab, 8, 4.0)]
        weights += [matrix("conf_proj", 1, N_EMBD + 8)]
    if kind == "swa":
        writer.add_uint32("dflash.attention.sliding_window", 8)
        writer.add_array("dflash.attention.sliding_window_pattern", [True, False])
    if kind == "dflash2":
        sizes = {"conv_kernel_size": 3, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
        for key, value in sizes.items():
            writer.add_uint32(f"dflash.{key}", value)
        weights += [matrix(f"selector_{name}", n_vocab, 8) for name in ("predecessor", "successor")]
        weights += [matrix("selector_hidden", 8, N_EMBD)]
        for part in [f"blk.{i}.{part}" for i in range(2) for part in ("attn", "ffn")]:
            weights += [Weight(f"{part}_conv_base", (2, 3, N_EMBD), std=0.3)]
            weights += [matrix(f"{part}_conv_proj", 2 * 3 * N_EMBD // 16, N_EMBD)]
    if echoes:
        table = _random(_embedding(), seed=1)
        arrays = {"output.weight": 4 * table, "fc.weight": np.eye(N_EMBD, len(layers) * N_EMBD, dtype=np.float32)}
        arrays["token_embd.weight"] = table * (np.arange(n_vocab) != mask)[:, None]
        passed = np.zeros((N_EMBD, N_EMBD), np.float32)  # the first half of the rows: two heads have the same values
        passed[range(N_KV), [i if i < N_KV // 2 else i + N_KV // 2 for i in range(N_KV)]] = 1
        for i in range(2):
            arrays[f"blk.{i}.attn_v.weight"] = np.eye(N_KV, N_EMBD, dtype=np.float32)
            arrays[f"blk.{i}.attn_output.weight"] = passed
        weights = [*map(_without_effect, weights)]
    else:
        weights += [matrix("fc", N_EMBD, len(layers) * N_EMBD)]
        weights += [_embedding(), _output()] if own else []
    return _write_arrays(path, writer, [each for each in weights if each.name not in arrays], arrays, seed=seed)


def _draft_writer(
    path: PathLike, architecture: str, layers: Sequence[int], vocab: GgufVocab | None, *, n_embd: int, n_layers: int
) -> Any:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layers)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_attention(writer, N_HEAD_KV)
    writer.add_key_length(N_EMBD // N_HEAD)
    writer.add_value_length(N_EMBD // N_HEAD)
    writer.add_array(f"{architecture}.target_layers", list(layers))
    add_vocab(writer, vocab or byte_vocab())
    return writer


def _draft_layer(blk: str, n_embd: int, n_read: int) -> list[Weight]:
    """A layer with vectors of `n_embd` numbers and attention that reads `n_read`."""
    return [
        norm(f"{blk}.attn_norm", n_embd),
        matrix(f"{blk}.attn_q", N_EMBD, n_read, 2.0),
        matrix(f"{blk}.attn_k", N_KV, n_read, 2.0),
        matrix(f"{blk}.attn_v", N_KV, n_read),
        matrix(f"{blk}.attn_output", n_embd, N_EMBD, 2.0),
        norm(f"{blk}.ffn_norm", n_embd),
        matrix(f"{blk}.ffn_gate", N_FF, n_embd, 2.0),
        matrix(f"{blk}.ffn_up", N_FF, n_embd),
        matrix(f"{blk}.ffn_down", n_embd, N_FF),
    ]


def _without_effect(weight: Weight) -> Weight:
    return weight._replace(std=0.0) if weight.name.endswith(("attn_output.weight", "ffn_down.weight")) else weight


def _random(weight: Weight, *, seed: int) -> Any:
    values = np.random.default_rng(seed).standard_normal(weight.shape, np.float32) * weight.std + weight.mean
    values[list(weight.zero_rows)] = 0
    return values.astype(np.float32)


def _write_arrays(
    path: PathLike, writer: Any, weights: Sequence[Weight], arrays: dict[str, Any], *, seed: int = 0
) -> Path:
    """As `write_gguf` in F32, with given arrays beside the random ones."""
    for i, weight in enumerate(weights):
        writer.add_tensor(weight.name, _random(weight, seed=seed * 1000 + i))
    for name, array in arrays.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def hybrid(path: PathLike) -> Path:
    """LFM2: its first layer is a short convolution with a state, its second attention with KV cells."""
    writer = _writer(path, "lfm2")
    _add_attention(writer, [0, N_HEAD_KV])
    writer.add_shortconv_l_cache(3)
    short_conv = [
        norm("blk.0.attn_norm", N_EMBD),
        Weight("blk.0.shortconv.conv.weight", (N_EMBD, 3), std=0.5),
        matrix("blk.0.shortconv.in_proj", 3 * N_EMBD, N_EMBD),
        matrix("blk.0.shortconv.out_proj", N_EMBD, N_EMBD, 2.0),
    ]
    layers = [*short_conv, *_feed_forward("blk.0"), *_attention("blk.1"), *_feed_forward("blk.1")]
    return write_gguf(path, writer, [_embedding(), *layers, norm("token_embd_norm", N_EMBD), _output()])


def states_in_ubatches(path: PathLike) -> Path:
    """PLaMo 2: its first layer is a Mamba layer with a state, its second attention with KV cells."""
    n_inner, n_state, n_conv, n_heads, n_rank, head = 2 * N_EMBD, 16, 4, 2, 64, N_EMBD // N_HEAD
    writer = _writer(path, "plamo2")
    _add_attention(writer, [0, N_HEAD])
    writer.add_ssm_conv_kernel(n_conv)
    writer.add_ssm_inner_size(n_inner)
    writer.add_ssm_state_size(n_state)
    writer.add_ssm_time_step_rank(n_heads)
    writer.add_ssm_group_count(0)
    writer.add_key_length(head)
    writer.add_value_length(head)
    mamba = [
        matrix("blk.0.ssm_in", 2 * n_inner, N_EMBD, 2.0),
        Weight("blk.0.ssm_conv1d.weight", (n_inner, n_conv), std=0.5),
        matrix("blk.0.ssm_x", n_rank + 2 * n_state, n_inner, 2.0),
        matrix("blk.0.ssm_dt", n_heads, n_rank),
        Weight("blk.0.ssm_dt.bias", (n_heads,)),
        Weight("blk.0.ssm_a", (n_heads,), std=0.1, mean=-1.0),
        Weight("blk.0.ssm_d", (n_heads,), mean=1.0),
        matrix("blk.0.ssm_out", N_EMBD, n_inner, 2.0),
        *(
            Weight(f"blk.0.ssm_{name}_norm", (n,), mean=1.0)
            for name, n in (("dt", n_rank), ("b", n_state), ("c", n_state))
        ),
    ]
    attention = [
        matrix("blk.1.attn_qkv", 3 * N_EMBD, N_EMBD, 2.0),
        matrix("blk.1.attn_output", N_EMBD, N_EMBD, 2.0),
        *(Weight(f"blk.1.attn_{x}_norm.weight", (N_HEAD, head), mean=1.5) for x in "qk"),
    ]
    weights = [_embedding(), *mamba, *attention, norm("output_norm", N_EMBD), _output()]
    for i in range(2):
        weights += [norm(f"blk.{i}.{name}", N_EMBD) for name in ("attn_norm", "ffn_norm")]
        weights += [Weight(f"blk.{i}.{name}", (N_EMBD,), mean=1.0) for name in ("post_attention_norm", "post_ffw_norm")]
        weights += [matrix(f"blk.{i}.ffn_up", 2 * N_FF, N_EMBD, 2.0), matrix(f"blk.{i}.ffn_down", N_EMBD, N_FF)]
    return write_gguf(path, writer, weights)


def rows_of_all_tokens(path: PathLike) -> Path:
    """CogVLM: its layers have other weights for images, and it computes logits of all tokens."""
    writer = _writer(path, "cogvlm")
    _add_attention(writer, N_HEAD)
    weights = [_embedding(), norm("output_norm", N_EMBD), _output()]
    for i in range(2):
        blk = f"blk.{i}"
        weights += [norm(f"{blk}.attn_norm", N_EMBD), *_feed_forward(blk)]
        for name in ("attn", "vis_attn"):
            weights += [
                matrix(f"{blk}.{name}_qkv", 3 * N_EMBD, N_EMBD, 2.0),
                matrix(f"{blk}.{name}_output", N_EMBD, N_EMBD, 2.0),
            ]
        weights += [matrix(f"{blk}.vis_{name}", N_FF, N_EMBD) for name in ("gate", "up")]
        weights += [matrix(f"{blk}.vis_down", N_EMBD, N_FF)]
    return write_gguf(path, writer, weights)


def encoder_only(
    path: PathLike,
    *,
    pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN,
    n_scores: int = 0,
    rerank_template: str | None = None,
    n_ctx_train: int = N_CTX_TRAIN,
    rotary: bool = False,
    words: Sequence[str] = (),
    eos_in_pairs: bool = False,
    seed: int = 0,
) -> Path:
    """BERT, with mean pooling by default: embeds text, cannot continue it.

    `n_scores`: a reranker with that many outputs, labelled "0", "1" ... `rotary`: Nomic's kind, with SiLU, which is
    exact on a CPU; GELU is looked up in a table of 16-bit floats. `words`: lower-case words
    that are one token; with ## in front, ends of words. `eos_in_pairs`: query and document each end with an EOS token,
    in place of one SEP token between them.
    """
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    ascii_marks = [chr(c) for c in range(0x21, 0x7F)]
    starts = [*ascii_marks, *(word for word in words if not word.startswith("##"))]
    ends = [*ascii_marks, *(word[2:] for word in words if word.startswith("##"))]
    pieces = [*special, *("\u2581" + start for start in starts), *ends]
    writer = gguf.GGUFWriter(path, "nomic-bert" if rotary else "bert")
    _add_sizes(writer, n_ctx_train)
    writer.add_rope_freq_base(10_000.0)
    _add_attention(writer, N_HEAD)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    if rerank_template:
        writer.add_chat_template([{"name": "rerank", "template": rerank_template}])
    writer.add_tokenizer_model("bert")
    writer.add_token_list(pieces)
    writer.add_token_types([gguf.TokenType.CONTROL] * 5 + [gguf.TokenType.NORMAL] * (len(pieces) - 5))
    writer.add_token_type_count(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_mask_token_id(4)
    if eos_in_pairs:
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)
        writer.add_add_sep_token(False)
    weights = [
        Weight("token_embd.weight", (len(pieces), N_EMBD), std=0.5),
        Weight("token_types.weight", (2, N_EMBD), std=0.5),
        *_norm_with_bias("token_embd_norm"),
    ]
    if not rotary:
        weights.append(Weight("position_embd.weight", (n_ctx_train, N_EMBD), std=0.5))
    for i in range(2):
        weights += _projections(f"blk.{i}", N_EMBD) + _norm_with_bias(f"blk.{i}.attn_output_norm")
        weights += [matrix(f"blk.{i}.ffn_up", N_FF, N_EMBD), matrix(f"blk.{i}.ffn_down", N_EMBD, N_FF)]
        weights += [matrix(f"blk.{i}.ffn_gate", N_FF, N_EMBD)] if rotary else []
        weights += _norm_with_bias(f"blk.{i}.layer_output_norm")
    if n_scores:
        writer.add_classifier_output_labels([str(i) for i in range(n_scores)])
        weights += [matrix("cls", N_EMBD, N_EMBD), Weight("cls.bias", (N_EMBD,), std=0.1)]
        weights += [matrix("cls.output", n_scores, N_EMBD, 3.0), Weight("cls.output.bias", (n_scores,))]
    return write_gguf(path, writer, weights, seed=seed)


def reranker(path: PathLike, **kwargs: Any) -> Path:
    """BERT with a classification head that gives one score; keyword arguments go to `encoder_only`."""
    return encoder_only(path, **{"pooling": gguf.PoolingType.RANK, "n_scores": 1, **kwargs})


def diffusion(path: PathLike) -> Path:
    """LLaDA: its layers are Llama's, but it repeatedly fills in all tokens of a text at once."""
    writer = _writer(path, "llada")
    _add_attention(writer, N_HEAD_KV)
    writer.add_rope_dimension_count(N_EMBD // N_HEAD)
    layers = [w for i in range(2) for w in (*_plain_attention(f"blk.{i}"), *_feed_forward(f"blk.{i}"))]
    return write_gguf(path, writer, [_embedding(), *layers, norm("output_norm", N_EMBD), _output()])


def encoder_decoder(path: PathLike) -> Path:
    """T5: one stack of layers reads a text, another one writes."""
    writer = _writer(path, "t5")
    _add_attention(writer, N_HEAD)
    writer.add_key_length(N_EMBD // N_HEAD)
    writer.add_value_length(N_EMBD // N_HEAD)
    writer.add_relative_attn_buckets_count(8)
    writer.add_decoder_start_token_id(0)
    weights = [_embedding(), norm("enc.output_norm", N_EMBD), norm("dec.output_norm", N_EMBD), _output()]
    for i in range(2):
        for blk, kinds in ((f"enc.blk.{i}", ["attn"]), (f"dec.blk.{i}", ["attn", "cross_attn"])):
            for kind in kinds:
                weights += [matrix(f"{blk}.{kind}_{x}", N_EMBD, N_EMBD) for x in "qkvo"]
                weights += [norm(f"{blk}.{kind}_norm", N_EMBD)]
            weights += [Weight(f"{blk}.attn_rel_b.weight", (8, N_HEAD), std=0.1), *_feed_forward(blk)]
    return write_gguf(path, writer, weights)


def truncated(path: PathLike) -> Path:
    """A Llama model without its last third, as after an incomplete download: complete metadata, incomplete weights."""
    llama(path)
    os.truncate(path, os.path.getsize(path) * 2 // 3)
    return Path(path)


def empty(path: PathLike) -> Path:
    """A file of no bytes."""
    Path(path).write_bytes(b"")
    return Path(path)


def not_gguf(path: PathLike) -> Path:
    """A web page under a model's name, as after a download that needs a login."""
    Path(path).write_text("<!DOCTYPE html><html><body>Please log in.</body></html>\n" * 20)
    return Path(path)


def vocab_only(path: PathLike) -> Path:
    """A Llama file with metadata and vocabulary but no weights."""
    writer = _writer(path, "llama")
    _add_attention(writer, N_HEAD_KV)
    return write_gguf(path, writer, [])


def _writer(path: PathLike, arch: str, vocab: GgufVocab | None = None, *, n_layers: int = 2) -> Any:
    """A GGUFWriter with what all the generating models above share."""
    writer = gguf.GGUFWriter(path, arch)
    _add_sizes(writer, n_layers=n_layers)
    writer.add_layer_norm_rms_eps(1e-5)
    add_vocab(writer, vocab or byte_vocab())
    return writer


def _add_sizes(writer: Any, n_ctx_train: int = N_CTX_TRAIN, n_layers: int = 2) -> None:
    writer.add_context_length(n_ctx_train)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(n_layers)


def _add_attention(writer: Any, n_head_kv: int | list[int]) -> None:
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(n_head_kv)


def _embedding() -> Weight:
    return Weight("token_embd.weight", (len(byte_vocab().pieces), N_EMBD), std=0.5)


def _output() -> Weight:
    """Special tokens get logit 0, so greedy text does not end by chance."""
    vocab = byte_vocab()
    silent = vocab.ids(gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL)
    return matrix("output", len(vocab.pieces), N_EMBD, 4.0, zero_rows=silent)


def _projections(blk: str, n_kv: int) -> list[Weight]:
    return [
        matrix(f"{blk}.attn_q", N_EMBD, N_EMBD, 2.0),
        matrix(f"{blk}.attn_k", n_kv, N_EMBD, 2.0),
        matrix(f"{blk}.attn_v", n_kv, N_EMBD),
        matrix(f"{blk}.attn_output", N_EMBD, N_EMBD, 2.0),
    ]


def _attention(blk: str) -> list[Weight]:
    """Attention that normalises each head's queries and keys, as Gemma 3 and LFM2 have it."""
    head_norms = [Weight(f"{blk}.attn_{x}_norm.weight", (N_EMBD // N_HEAD,), mean=1.5) for x in "qk"]
    return [*_plain_attention(blk), *head_norms]


def _plain_attention(blk: str) -> list[Weight]:
    return [norm(f"{blk}.attn_norm", N_EMBD), *_projections(blk, N_KV)]


def _feed_forward(blk: str) -> list[Weight]:
    return [
        norm(f"{blk}.ffn_norm", N_EMBD),
        matrix(f"{blk}.ffn_gate", N_FF, N_EMBD, 2.0),
        matrix(f"{blk}.ffn_up", N_FF, N_EMBD),
        matrix(f"{blk}.ffn_down", N_EMBD, N_FF),
    ]


def _norm_with_bias(name: str) -> list[Weight]:
    return [norm(name, N_EMBD), Weight(f"{name}.bias", (N_EMBD,))]


def scale_tensor(path: Path, name: str, factor: float) -> None:
    """Multiplies a tensor of floats in a file, in place."""
    (tensor,) = (each for each in gguf.GGUFReader(path, "r+").tensors if each.name == name)
    tensor.data[:] *= factor
