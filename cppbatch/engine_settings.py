"""The settings of an engine as keyword arguments, for type checkers, which need them spelled out."""

from pathlib import Path
from typing import TypedDict

import msgspec

from cppbatch.config import (
    CacheType,
    EngineConfig,
    FlashAttention,
    KvLayout,
    LazyMode,
    LoadMode,
    Numa,
    Pooling,
    Preference,
    Repacking,
    Sampling,
    Speculation,
    SplitMode,
)
from cppbatch.model_changes import RopeScaling


class EngineSettings(TypedDict, total=False):
    """All fields of `EngineConfig` except `model_path`, as keyword arguments."""

    n_ctx: int
    n_ctx_seq: int
    n_parallel: int
    n_batch: int
    n_ubatch: int
    n_gpu_layers: int
    device: int | None
    rpc: tuple[str, ...]
    tensor_split: tuple[float, ...]
    device_names: tuple[str, ...]
    split_mode: SplitMode
    main_gpu: int
    override_tensor: tuple[str, ...]
    cpu_moe: bool
    n_cpu_moe: int
    n_cpu_ffn: int
    kv_offload: bool
    op_offload: bool
    load_mode: LoadMode
    lazy_mode: LazyMode
    no_host: bool
    numa: Numa
    fit_params: bool
    fit_target: tuple[int, ...]
    fit_ctx: int
    n_threads: int
    repack: Repacking
    flash_attn: FlashAttention
    stream_flash_attn: FlashAttention
    kv_layout: KvLayout
    cache_type_k: CacheType
    cache_type_v: CacheType
    prefix_cache: bool
    prefix_cache_ram: int
    ctx_checkpoints: int
    checkpoint_min_step: int
    swa_full: bool
    prefix_cache_disk: str
    max_queue: int
    swap_space: int
    target_itl_ms: float
    prefer: Preference
    max_wait_ms: float
    sampling: Sampling
    deterministic: bool
    spec: Speculation
    draft_max: int
    pooling: Pooling | None
    draft_model: str
    draft_gpu_layers: int
    draft_device_names: tuple[str, ...]
    draft_override_tensor: tuple[str, ...]
    draft_cpu_moe: bool
    draft_n_cpu_moe: int
    mmproj: str
    mmproj_offload: bool
    mmproj_device: str
    lora: tuple[tuple[str, float], ...]
    rope_scaling: RopeScaling
    rope_scale: float
    rope_freq_base: float
    rope_freq_scale: float
    yarn_orig_ctx: int
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_slow: float
    yarn_beta_fast: float
    kv_overrides: tuple[str, ...]
    check_tensors: bool
    control_vectors: tuple[tuple[str, float], ...]
    control_vector_layers: tuple[int, ...]
    lora_init_without_apply: bool
    image_min_tokens: int
    image_max_tokens: int
    media_batch: int
    draft_cache_type_k: CacheType | None
    draft_cache_type_v: CacheType | None
    cpu_mask: str
    cpu_range: str
    step_ms: tuple[tuple[int, float], ...]
    context_shift: bool
    n_keep: int
    trace: str


def engine_config(model: str | Path | EngineConfig, settings: EngineSettings) -> EngineConfig:
    """Builds the config from a model file and settings, or from an `EngineConfig` with some settings replaced."""
    if not isinstance(model, EngineConfig):
        return EngineConfig(model_path=str(model), **settings)
    return msgspec.structs.replace(model, **settings)
