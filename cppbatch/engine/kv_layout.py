"""What `auto` means for the KV layout and flash attention. The measurements behind it: docs/architecture.md."""

from __future__ import annotations

from cppbatch.config import EngineConfig, FlashAttention, KvLayout


def choose_layout(config: EngineConfig, *, on_gpu: bool, n_ctx_train: int, has_kv_cells: bool) -> KvLayout:
    """The layout to use.

    On a CPU, streams of their own are as fast or faster, because attention reads no cells of others; but a sequence is
    then limited to n_ctx / n_parallel cells. `auto` takes them where that costs nobody anything: where each stream
    holds the longest sequence the model knows.
    """
    if config.kv_layout != "auto":
        return config.kv_layout
    long_enough = config.n_ctx // config.n_parallel >= n_ctx_train
    return "per-sequence" if not on_gpu and long_enough and has_kv_cells else "unified"


def choose_flash_attn(config: EngineConfig, layout: KvLayout, *, on_gpu: bool, has_amx: bool) -> FlashAttention:
    """The flash attention setting for llama.cpp, whose own `auto` is right everywhere but for two cases.

    Quantised values need it.

    In streams of their own, a CPU with AMX multiplies matrices faster than the flash attention kernel runs. In the
    unified layout that kernel skips the cells of others, which the plain one does not.
    """
    if config.flash_attn == "auto" and config.cache_type_v in ("q8_0", "q4_0"):
        return "on"
    if config.flash_attn == "auto" and layout == "per-sequence" and has_amx and not on_gpu:
        return "off"
    return config.flash_attn
