"""The settings of an engine: one struct, validated once, here."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict, get_args

import msgspec
import psutil

from cppbatch.errors import ConfigError
from cppbatch.rpc_endpoint import parse_endpoint

KvLayout = Literal["auto", "unified", "per-sequence"]
FlashAttention = Literal["auto", "on", "off"]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
Sampling = Literal["auto", "host", "backend"]
Repacking = Literal["auto", "on", "off"]
Preference = Literal["throughput", "balanced", "latency"]
Speculation = Literal["auto", "off", "suffix", "draft", "mtp", "eagle3", "dflash"]
DRAFT_MODELS: tuple[Speculation, ...] = ("draft", "eagle3", "dflash")
"""The sources of drafts that are a file of their own."""
Pooling = Literal["none", "mean", "cls", "last", "rank"]
"""How a sequence becomes one vector: the mean of its tokens, its first or its last token, or a reranker's scores. none:
it has a vector for each of its tokens."""
Sharing = Literal["cells", "copy", "checkpoints", "whole", "none"]
"""How a sequence can take the prefix of another one, which depends on the model's memory.

cells: any prefix; both hold the same cells. copy: any prefix, by copying. checkpoints: a prefix that ends at a
checkpoint, or all tokens that the other sequence has computed; the cells are shared in the unified layout, else copied.
whole: all tokens that the other sequence has computed, by copying, because no part of them can be removed. none: not at
all.
"""

_INT32_MAX = 2**31 - 1
_MAX_THREADS = 512  # ggml's GGML_MAX_N_THREADS: more would abort the process
_MAX_STEP_MS = 60_000
_MAX_WAIT_MS = 10_000
_DISK_GB, _GB = 16, 10**9  # of cached prefixes on disk, unless given
_MAX_DEVICES = 16  # llama_max_devices
_MAX_RPC_WORKERS = 15  # ggml's GGML_SCHED_MAX_BACKENDS is 16, and the CPU is one: more would abort the process
MAX_DRAFT = 64
"""Maximum draft tokens per sequence and step."""
MAX_SEQ_IDS = 256  # llama.cpp's LLAMA_MAX_SEQ
MOST_LORA_SCALE = 1000.0
"""The largest scale of a LoRA adapter, positive or negative: far beyond use, but no float32 overflows."""


_FLAGS = {
    "n_ctx": "-c", "n_parallel": "-np", "n_batch": "-b", "n_ubatch": "-ub", "n_gpu_layers": "-ngl", "n_threads": "-t",
    "flash_attn": "-fa", "cache_type_k": "-ctk", "cache_type_v": "-ctv", "device": "--devices", "draft_model": "-md",
    "n_keep": "--keep", "tensor_split": "-ts", "ctx_checkpoints": "-ctxcp", "checkpoint_min_step": "-cms",
}  # fmt: skip


def named(setting: str) -> str:
    """A setting in an error message, by its name in Python and its flag: "n_ctx (-c)", "max_queue (--max-queue)"."""
    return f"{setting} ({_FLAGS.get(setting, '--' + setting.replace('_', '-'))})"


class _Model(msgspec.Struct, frozen=True):
    model_path: str


class EngineConfig(_Model, frozen=True, kw_only=True):
    """A model file and the settings of one engine, named as llama.cpp's flags.

    Raises `ConfigError` for values that are out of range or contradict each other.
    """

    n_ctx: int = 16384
    """Total KV cells for all sequences (-c)."""
    n_parallel: int = 16
    """Maximum number of sequences that run at the same time (-np)."""
    n_batch: int = 2048
    """Maximum tokens per step (-b)."""
    n_ubatch: int = 512
    """Maximum tokens that llama.cpp computes at once within a step (-ub)."""
    n_gpu_layers: int = -1
    """Layers kept on the GPU; -1: all, 0: none (-ngl)."""
    device: int | None = None
    """The only GPU to use, by llama.cpp's number; None: all GPUs (--devices)."""
    rpc: tuple[str, ...] = ()
    """RPC workers as HOST:PORT. The model is split over their devices first, then over this machine's GPUs (--rpc,
    docs/rpc.md)."""
    tensor_split: tuple[float, ...] = ()
    """Share of the layers for each device: the devices of `rpc` in order, then this machine's GPUs. (): proportional to
    free memory (--tensor-split)."""
    n_threads: int = 0
    """Maximum compute threads; 0: one per physical core available to this process (-t). On a CPU, steps use one fewer
    for each core that other programs keep busy (docs/decisions/0032)."""
    repack: Repacking = "auto"
    """Let llama.cpp repack weights for this CPU (AMX, AVX-512 ...), unless its build crashes with it. auto: on, except
    where timed kernels are clearly faster without it for `n_parallel` sequences (--repack, docs/decisions/0028)."""
    flash_attn: FlashAttention = "auto"
    """auto: the faster one for the layout and the device (docs/decisions/0006), and off with an f32 cache, which flash
    attention casts to f16 (-fa)."""
    stream_flash_attn: FlashAttention = "auto"
    """What `flash_attn` auto means in the per-sequence layout on a CPU, by measured times (docs/decisions/0048). auto:
    not measured."""
    kv_layout: KvLayout = "auto"
    """unified: any sequence may take any of the n_ctx cells; per-sequence: each has n_ctx / n_parallel cells; auto: on
    a CPU per-sequence, and unified while a request needs more or a long prefix is shared (docs/decisions/0006)."""
    cache_type_k: CacheType = "f16"
    """The type of keys in the cache (-ctk). Rounding in f16 can flip near-tied tokens between batches; f32 with f32
    weights practically never does."""
    cache_type_v: CacheType = "f16"
    """The type of values in the cache (-ctv). Quantised types need flash attention."""
    prefix_cache: bool = True
    """Share prefixes between requests that begin with the same tokens (--prefix-cache/--no-prefix-cache)."""
    prefix_cache_ram: int = 1024
    """Host memory, in MiB, for cached prefixes evicted from KV cells (--prefix-cache-ram)."""
    ctx_checkpoints: int = 32
    """Maximum checkpoints per prompt, for models with sliding windows or recurrent states: positions up to which other
    requests can reuse the prompt (-ctxcp). Stored in host memory, within `prefix_cache_ram`. 0: none."""
    checkpoint_min_step: int = 0
    """Minimum tokens between two checkpoints; 0: automatic, more if a checkpoint is expensive (-cms)."""
    swa_full: bool = False
    """Keep all cells of sliding windows, so that any prefix can be shared without a checkpoint (--swa-full). They take
    as much memory as those of full attention."""
    prefix_cache_disk: str = ""
    """A folder for cached prefixes that persist across restarts, as `DIR` or `DIR,GB`, where GB limits the size of its
    files (default 16). All engines on the machine may share it. "": none (--prefix-cache-disk, docs/decisions/0043)."""
    max_queue: int = 4096
    """Maximum waiting requests; further requests are refused (--max-queue)."""
    swap_space: int = 1024
    """Host memory, in MiB, for preempted sequences; sequences that do not fit are recomputed (--swap-space)."""
    target_itl_ms: float = 0
    """Target inter-token latency in ms: prompts are computed in pieces sized for steps of this length. 0: set by
    `prefer` (--target-itl-ms)."""
    prefer: Preference = "balanced"
    """How long a step may take while a sequence decodes, unless `target_itl_ms` says it: latency: 2.5 times a step
    without prompts; balanced: 8 times; throughput: prompts are computed first (--prefer)."""
    max_wait_ms: float = 0
    """How long an idle server waits for more requests before starting the first one, in ms, unless n_parallel requests
    are waiting (--max-wait-ms). While a request runs, others join immediately. 0: no waiting."""
    sampling: Sampling = "auto"
    """Where the most likely tokens are selected. backend: on the device, so rows of logits are copied only for requests
    that need them; host: on the CPU; auto: backend if the GPU supports it, otherwise host (--sampling)."""
    deterministic: bool = False
    """The logits of a sequence are the same bit for bit, whatever else is in the batch (--deterministic). On a CPU
    only, with the per-sequence layout, flash attention and bf16 or quantised caches (docs/decisions/0030)."""
    spec: Speculation = "auto"
    """Source of drafts for speculative decoding. suffix: earlier text of the request or of similar requests; draft: the
    draft model, of any kind; eagle3, dflash: the draft model, which must be of this kind; mtp: the draft head in the
    model's file; auto: suffix with the draft model if there is one, else with the head if there is one, on a GPU only
    the draft model; off: no drafts (--spec, docs/speculation.md)."""
    draft_max: int = 16
    """Maximum draft tokens per sequence and step (--draft-max)."""
    pooling: Pooling | None = None
    """Return vectors instead of text, pooled this way. None: as the model's file says; models that generate text do not
    pool (--pooling). Such an engine computes every sequence whole, in one step: -ub, --kv-layout, --sampling and
    everything about cached or swapped sequences do not apply."""
    draft_model: str = ""
    """A GGUF file that drafts tokens for speculative decoding: a smaller model with the same vocabulary, or an EAGLE-3
    or DFlash draft model that was made for this one; "": none (-md)."""
    draft_gpu_layers: int = -1
    """Layers of the draft model kept on the GPU; -1: all, 0: none (--draft-gpu-layers)."""
    mmproj: str = ""
    """A GGUF file with the image or audio encoder and its projector for this model, llama.cpp's mmproj; "": text only
    (--mmproj, docs/media.md)."""
    lora: tuple[tuple[str, float], ...] = ()
    """LoRA adapters: GGUF files with the scale for requests without `lora` (--lora FILE=SCALE). Requests name an
    adapter by its file name without the suffix."""
    step_ms: tuple[tuple[int, float], ...] = ()
    """Decode rows with the milliseconds that a step of them takes here, as `cppbatch tune` has measured them (from the
    profile). The engine learns the others, and changes, from its steps."""
    context_shift: bool = False
    """When the context is full, drop half of the tokens after the first `n_keep` and continue (--context-shift). The
    model no longer sees the dropped tokens, so the output is approximate from then on."""
    n_keep: int = 0
    """Initial tokens to keep in a context shift, not counting BOS; -1: the prompt (--keep)."""
    trace: str = ""
    """A file for a trace of every step in Chrome's format, about 2 KB a step (--trace). "": no trace."""

    def __post_init__(self) -> None:
        for name in ("n_ctx", "n_parallel", "n_batch", "n_ubatch", "max_queue"):
            self._check(name, 1, _INT32_MAX, f"from 1 to {_INT32_MAX}")
        self._check("n_parallel", 1, MAX_SEQ_IDS, f"at most {MAX_SEQ_IDS}, the number of sequence ids in llama.cpp")
        if self.n_batch < self.n_parallel:
            raise ConfigError(
                f"{named('n_batch')} is {self.n_batch}, less than {named('n_parallel')}, which is {self.n_parallel}; a "
                "step needs one token for each running sequence: raise the former or lower the latter"
            )
        if self.n_ctx < self.n_parallel:
            raise ConfigError(
                f"{named('n_ctx')} is {self.n_ctx}, less than {named('n_parallel')}, which is {self.n_parallel}: raise "
                "the former or lower the latter"
            )
        self._check("n_threads", 0, _MAX_THREADS, f"0 (automatic) or up to {_MAX_THREADS}")
        for name in ("n_gpu_layers", "draft_gpu_layers"):
            self._check(name, -1, _INT32_MAX, "-1 (all layers), 0 (none) or more")
        if self.device is not None and not 0 <= self.device <= _INT32_MAX:
            raise ConfigError(f"{named('device')} is {self.device}; devices are numbered from 0")
        for name in ("swap_space", "prefix_cache_ram"):
            self._check(name, 0, _INT32_MAX, "0 (none) or more MiB")
        self._check("ctx_checkpoints", 0, _INT32_MAX, "0 (none) or more")
        self._check("checkpoint_min_step", 0, _INT32_MAX, "0 (automatic) or more")
        disk_folder(self.prefix_cache_disk)
        if self.prefix_cache_disk and self.prefix_cache and not self.prefix_cache_ram:
            raise ConfigError(
                f"{named('prefix_cache_disk')} needs host memory, but {named('prefix_cache_ram')} is 0: set it above 0"
            )
        self._check("n_keep", -1, _INT32_MAX, "-1 (the prompt), 0 or more")
        self._check("target_itl_ms", 0, _MAX_STEP_MS, f"0 (automatic) to {_MAX_STEP_MS}")
        self._check("max_wait_ms", 0, _MAX_WAIT_MS, f"0 (no waiting) to {_MAX_WAIT_MS}")
        self._check_choices()
        self._check_rpc()
        self._check_speculation()
        self._check_lora()
        if self.mmproj and self.pooling:
            raise ConfigError(
                f"{named('mmproj')} requires a model that generates text, but {named('pooling')} is {self.pooling!r}; "
                "leave one of them out"
            )

    def _check(self, name: str, low: float, high: float, wanted: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or not low <= value <= high:
            raise ConfigError(f"{named(name)} is {value!r}; it must be {wanted}")

    def _check_choices(self) -> None:
        if self.deterministic and (self.kv_layout == "unified" or self.flash_attn == "off"):
            raise ConfigError(
                f"{named('deterministic')} requires the per-sequence layout and flash attention: leave out "
                f"{named('kv_layout')} and {named('flash_attn')}"
            )
        choices = {
            "flash_attn": FlashAttention,
            "stream_flash_attn": FlashAttention,
            "kv_layout": KvLayout,
            "prefer": Preference,
            "repack": Repacking,
            "sampling": Sampling,
            "spec": Speculation,
            "cache_type_k": CacheType,
            "cache_type_v": CacheType,
        }
        if self.pooling is not None:
            choices["pooling"] = Pooling
        if self.flash_attn == "off" and self.cache_type_v in ("q8_0", "q4_0"):
            raise ConfigError(
                f"{named('cache_type_v')} is {self.cache_type_v!r}, and quantised values require flash attention: "
                f"leave out {named('flash_attn')}, or use f16"
            )
        for name, kind in choices.items():
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"{named(name)} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(kind))}"
                )

    def _check_rpc(self) -> None:
        if isinstance(self.rpc, str):  # as --rpc has them
            msgspec.structs.force_setattr(self, "rpc", tuple(each.strip() for each in self.rpc.split(",")))
        if not isinstance(self.rpc, Sequence):
            raise ConfigError(f"{named('rpc')} is {self.rpc!r}; it must be a list of addresses, like ['HOST:PORT']")
        endpoints = [parse_endpoint(each) for each in self.rpc]
        if len(set(endpoints)) != len(endpoints):
            raise ConfigError(f"{named('rpc')} lists a worker twice: {', '.join(self.rpc)}")
        if len(endpoints) > _MAX_RPC_WORKERS:
            raise ConfigError(
                f"{named('rpc')} lists {len(endpoints)} workers; llama.cpp supports at most {_MAX_RPC_WORKERS}"
            )
        if self.rpc and self.device is not None:
            raise ConfigError(
                f"{named('device')} selects a single local GPU and cannot be combined with {named('rpc')}: leave it "
                f"out, and set the share of each device with {named('tensor_split')}"
            )
        if self.rpc and self.deterministic:
            raise ConfigError(
                f"{named('deterministic')} works on this machine's CPU only, but {named('rpc')} computes on other "
                "machines; leave one of them out"
            )
        if len(self.tensor_split) > _MAX_DEVICES:
            raise ConfigError(
                f"{named('tensor_split')} has {len(self.tensor_split)} shares; the limit is {_MAX_DEVICES}"
            )
        if any(not (math.isfinite(share) and share >= 0) for share in self.tensor_split) or (
            self.tensor_split and not any(self.tensor_split)
        ):
            shares = ",".join(f"{share:g}" for share in self.tensor_split)
            raise ConfigError(
                f"{named('tensor_split')} is {shares}; shares must be at least 0, and at least one must be above 0"
            )

    def _check_speculation(self) -> None:
        self._check("draft_max", 1, MAX_DRAFT, f"from 1 to {MAX_DRAFT}")
        if self.spec in DRAFT_MODELS and not self.draft_model:
            raise ConfigError(
                f"{named('spec')} is '{self.spec}', which requires a draft model: set {named('draft_model')}, or leave "
                "out this setting"
            )

    def _check_lora(self) -> None:
        try:
            lora = tuple((str(path), float(scale)) for path, scale in self.lora)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{named('lora')} is {self.lora!r:.200}; it must be a list of (file, scale) pairs"
            ) from None
        msgspec.structs.force_setattr(self, "lora", lora)
        names: dict[str, str] = {}
        for path, scale in lora:
            if not math.isfinite(scale) or abs(scale) > MOST_LORA_SCALE:
                message = f"it must be from {-MOST_LORA_SCALE:g} to {MOST_LORA_SCALE:g}"
                raise ConfigError(f"{named('lora')}: the scale of {path} is {scale}; {message}")
            name = adapter_name(path)
            if name in names:
                raise ConfigError(
                    f"{named('lora')}: {names[name]} and {path} have the same name {name!r}; rename one of the files"
                )
            names[name] = path


class EngineSettings(TypedDict, total=False):
    """Fields of `EngineConfig`, all but `model_path`, as keyword arguments."""

    n_ctx: int
    n_parallel: int
    n_batch: int
    n_ubatch: int
    n_gpu_layers: int
    device: int | None
    rpc: tuple[str, ...]
    tensor_split: tuple[float, ...]
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
    mmproj: str
    lora: tuple[tuple[str, float], ...]
    step_ms: tuple[tuple[int, float], ...]
    context_shift: bool
    n_keep: int
    trace: str


def disk_folder(setting: str) -> tuple[Path, int] | None:
    """The folder of `prefix_cache_disk`, and the bytes that its files may take; None: there is none.

    Raises `ConfigError`.
    """
    if not setting:
        return None
    folder, comma, size = setting.rpartition(",")
    if not comma:
        return Path(setting).expanduser().absolute(), _DISK_GB * _GB
    try:
        gb = float(size)
    except ValueError:
        gb = math.nan
    if not folder or not 0 < gb < math.inf:
        raise ConfigError(f"{named('prefix_cache_disk')} is {setting!r}; it must be DIR or DIR,GB with more than 0 GB")
    return Path(folder).expanduser().absolute(), round(gb * _GB)


def adapter_name(path: str) -> str:
    """The name of a LoRA adapter in requests."""
    return Path(path).stem


def engine_config(model: str | Path | EngineConfig, settings: EngineSettings) -> EngineConfig:
    """One struct of a model file and settings, or of an `EngineConfig` with some settings replaced."""
    if not isinstance(model, EngineConfig):
        return EngineConfig(model_path=str(model), **settings)
    return msgspec.structs.replace(model, **settings)


def available_threads() -> int:
    """Physical cores that this process may use. More compute threads than cores only slow each other down."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical: int | None = psutil.cpu_count(logical=False)
    return max(1, min(usable, physical or usable))


def cells_for(n_ctx: int, n_parallel: int, most: int) -> int:
    """KV cells of an engine whose requests may have `n_ctx` tokens each, as programs for one request at a time say it.

    At least that many, and no more than all sequences could use; between these `most`, so that short requests run
    together whatever `n_ctx` is.
    """
    return max(n_ctx, min(n_ctx * n_parallel, most))
