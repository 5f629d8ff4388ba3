"""Resolves `auto` for the KV layout and flash attention. Measurements: docs/decisions/0006."""

from __future__ import annotations

from cppbatch.config import FLOAT_CACHES, CacheType, EngineConfig, FlashAttention, KvLayout

CELL_STEP = 256  # llama.cpp rounds the cells of a stream up to a multiple of this


def choose_layout(config: EngineConfig, *, n_ctx_train: int, has_kv_cells: bool) -> KvLayout:
    """The layout of the KV cache when the engine starts.

    The per-sequence layout is faster for distinct prompts, because attention reads no cells of other sequences, but it
    limits a sequence to n_ctx / n_parallel cells. `auto` chooses it if that limit does not matter: if the engine
    switches layouts, or if the limit is at least the model's context length.
    """
    if config.deterministic:
        return "per-sequence"  # in the unified layout, sums depend on the location of a sequence's cells
    if config.kv_layout != "auto":
        return config.kv_layout
    long_enough = config.n_ctx // config.n_parallel >= n_ctx_train
    streams = long_enough or switches_layout(config, has_kv_cells=has_kv_cells)
    return "per-sequence" if streams and has_kv_cells else "unified"


def switches_layout(config: EngineConfig, *, has_kv_cells: bool) -> bool:
    """Whether the engine switches layouts at runtime (`LayoutPolicy`).

    `has_kv_cells`: whether the model keeps KV cells, also of windows, and no states.
    """
    is_free = config.kv_layout == "auto" and not config.deterministic
    return is_free and has_kv_cells and 1 < config.n_parallel <= config.n_ctx // CELL_STEP


def unified_cells(config: EngineConfig) -> int:
    """n_ctx of the unified layout, rounded as in llama.cpp."""
    return -(-config.n_ctx // CELL_STEP) * CELL_STEP


def stream_cells(config: EngineConfig) -> int:
    """Cells per stream of an engine that switches: rounded down, so that it does not need more memory than unified."""
    return config.n_ctx // config.n_parallel // CELL_STEP * CELL_STEP


def flash_attn_settings(config: EngineConfig) -> list[FlashAttention]:
    """The flash attention settings that work with the cache. If there are two, `auto` means the faster one.

    - Quantised values need flash attention.
    - So does `deterministic`: without it, one row is summed in a different order than several.
    - An f32 cache requires it off: llama.cpp casts it to f16 for flash attention on every device (`build_attn_mha`),
      and a CPU also sums values in f16, unless a stream computes 64 tokens or more. So recomputing a text after a crash
      would change logits by 0.01 rather than 0.00002.
    """
    if config.flash_attn != "auto":
        return [config.flash_attn]
    if config.deterministic or config.cache_type_v not in FLOAT_CACHES:
        return ["on"]
    return ["off"] if "f32" in (config.cache_type_k, config.cache_type_v) else ["on", "off"]


def choose_flash_attn(config: EngineConfig, layout: KvLayout, *, on_gpu: bool, has_amx: bool) -> FlashAttention:
    """The flash attention setting for llama.cpp. If both work with the cache, llama.cpp's own `auto` is right in the
    unified layout, where flash attention skips the cells of other sequences, and on a GPU. In the per-sequence layout
    on a CPU, the measured choice is used; without a measurement, off with AMX, which multiplies matrices faster.
    """
    settings = flash_attn_settings(config)
    if len(settings) == 1:
        return settings[0]
    if layout == "unified" or on_gpu:
        return "auto"
    return "off" if has_amx and config.stream_flash_attn == "auto" else config.stream_flash_attn


def choose_cache_type(config: EngineConfig, given: CacheType) -> CacheType:
    """The type of keys or values in the cache.

    For f16 and f32, ggml's flash attention sums in a different order for a single row over 512 or more cells, and for
    64 or more tokens of a prompt (ggml-cpu `ops.cpp`, `ggml_compute_forward_flash_attn_ext_f16`). `deterministic`
    replaces these types by bf16, for which it never does.
    """
    return "bf16" if config.deterministic and given in ("f16", "f32") else given
