"""What `auto` means for the KV layout and flash attention. Measurements: docs/decisions/0006."""

from __future__ import annotations

from cppbatch.config import CacheType, EngineConfig, FlashAttention, KvLayout

_CELL_STEP = 256  # llama.cpp rounds the cells of a stream up to a multiple of this


def choose_layout(config: EngineConfig, *, n_ctx_train: int, has_kv_cells: bool) -> KvLayout:
    """The layout of the KV cache when the engine starts.

    The per-sequence layout is faster for distinct prompts, because attention reads no cells of other sequences, but it
    limits a sequence to n_ctx / n_parallel cells. `auto` chooses it where that limit is no loss: where the engine
    switches, or where it is at least the longest sequence that the model knows.
    """
    if config.deterministic:
        return "per-sequence"  # in the unified layout, sums depend on where the cells of a sequence lie
    if config.kv_layout != "auto":
        return config.kv_layout
    long_enough = config.n_ctx // config.n_parallel >= n_ctx_train
    streams = long_enough or switches_layout(config, has_kv_cells=has_kv_cells)
    return "per-sequence" if streams and has_kv_cells else "unified"


def switches_layout(config: EngineConfig, *, has_kv_cells: bool) -> bool:
    """Whether the engine switches between the layouts while it runs (`LayoutPolicy`).

    `has_kv_cells`: the model's memory consists of KV cells only.
    """
    is_free = config.kv_layout == "auto" and not config.deterministic
    return is_free and has_kv_cells and 1 < config.n_parallel <= config.n_ctx // _CELL_STEP


def unified_cells(config: EngineConfig) -> int:
    """n_ctx of the unified layout, as llama.cpp rounds it."""
    return -(-config.n_ctx // _CELL_STEP) * _CELL_STEP


def stream_cells(config: EngineConfig) -> int:
    """Cells of each stream of an engine that switches: rounded down, so that it takes no more memory than unified."""
    return config.n_ctx // config.n_parallel // _CELL_STEP * _CELL_STEP


def flash_attn_settings(config: EngineConfig) -> list[FlashAttention]:
    """The settings of flash attention that suit the cache. If there are two, `auto` means the faster one.

    - Quantised values need flash attention.
    - So does `deterministic`: without it, one row adds in another order than several.
    - An f32 cache is computed without: llama.cpp casts it to f16 for flash attention on every device
      (`build_attn_mha`), and a CPU also sums values in f16, unless a stream computes 64 tokens and more. So a text that
      is computed again after a crash would get logits that differ by 0.01 rather than 0.00002.
    """
    if config.flash_attn != "auto":
        return [config.flash_attn]
    if config.deterministic or config.cache_type_v in ("q8_0", "q4_0"):
        return ["on"]
    return ["off"] if "f32" in (config.cache_type_k, config.cache_type_v) else ["on", "off"]


def choose_flash_attn(config: EngineConfig, layout: KvLayout, *, on_gpu: bool, has_amx: bool) -> FlashAttention:
    """The flash attention setting for llama.cpp. Where both suit the cache, llama.cpp's own `auto` is right in the
    unified layout, where flash attention skips the cells of other sequences, and on a GPU. In the per-sequence layout
    of a CPU it is what was measured, and unmeasured off with AMX, which multiplies matrices faster.
    """
    settings = flash_attn_settings(config)
    if len(settings) == 1:
        return settings[0]
    if layout == "unified" or on_gpu:
        return "auto"
    return "off" if has_amx and config.stream_flash_attn == "auto" else config.stream_flash_attn


def choose_cache_type(config: EngineConfig, given: CacheType) -> CacheType:
    """The type of keys or values in the cache.

    For f16 and f32, ggml's flash attention adds in another order for a single row over 512 and more cells, and for 64
    and more tokens of a prompt (ggml-cpu `ops.cpp`, `ggml_compute_forward_flash_attn_ext_f16`). `deterministic`
    replaces these types by bf16, for which it never does.
    """
    return "bf16" if config.deterministic and given in ("f16", "f32") else given
