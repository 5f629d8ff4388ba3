"""The settings of an engine: one struct, declared and validated once, here.

The options of the commands, `--help`, error messages and docs/settings.md follow from the declarations.
"""

import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import psutil

from cppbatch.errors import ConfigError
from cppbatch.model_changes import MOST_SCALE, ModelChanges, parse_override
from cppbatch.rpc_endpoint import parse_endpoint
from cppbatch.setting import INT32_MAX, Range, Setting

KvLayout = Literal["auto", "unified", "per-sequence"]
FlashAttention = Literal["auto", "on", "off"]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
FLOAT_CACHES: tuple[CacheType, ...] = ("f32", "f16", "bf16")
"""The types of KV caches that need no flash attention."""
LoadMode = Literal["auto", "none", "mmap", "mlock", "mmap+mlock", "dio"]
LazyMode = Literal["auto", "on", "off"]
Numa = Literal["off", "distribute", "isolate", "numactl"]  # ggml_numa_strategy
Sampling = Literal["auto", "host", "backend"]
Repacking = Literal["auto", "on", "off"]
SplitMode = Literal["none", "layer", "row", "tensor"]
Preference = Literal["throughput", "balanced", "latency"]
Speculation = Literal["auto", "off", "suffix", "draft", "mtp", "eagle3", "dflash"]
DRAFT_MODELS: tuple[Speculation, ...] = ("draft", "eagle3", "dflash")
"""The sources of drafts that need a separate model file."""
Pooling = Literal["none", "mean", "cls", "last", "rank"]
"""How a sequence becomes one vector: the mean of its tokens, its first or last token, or a reranker's scores. none: one
vector per token."""
Sharing = Literal["cells", "copy", "checkpoints", "whole", "none"]
"""How a sequence can reuse the prefix of another one, which depends on the type of the model's memory.

cells: any prefix; both hold the same cells. copy: any prefix, by copying. checkpoints: a prefix that ends at a
checkpoint, or all computed tokens of the other sequence; the cells are shared in the unified layout, else copied.
whole: all computed tokens of the other sequence, by copying, because they cannot be removed in part. none: not
possible.
"""

SCALED_FILES = ("lora", "control_vectors")
"""The settings that are files with scales."""
CPU_PARTS = ("cpu_moe", "n_cpu_moe", "n_cpu_ffn")
"""The settings that keep parts of layers on the CPU."""
PLACEMENT = (
    "n_gpu_layers", "device", "device_names", "rpc", "tensor_split", "split_mode", "main_gpu", "override_tensor",
    *CPU_PARTS, "no_host", "load_mode", "lazy_mode",
)  # fmt: skip
"""The settings that say where the weights of a model are."""
DRAFT_SETTINGS = (
    "spec", "draft_max", "draft_model", "draft_gpu_layers", "draft_device_names", "draft_override_tensor",
    "draft_cpu_moe", "draft_n_cpu_moe", "draft_cache_type_k", "draft_cache_type_v",
)  # fmt: skip
"""The settings of speculative decoding."""
MEDIA_SETTINGS = (
    "mmproj", "mmproj_offload", "mmproj_device", "image_min_tokens", "image_max_tokens", "media_batch",
)  # fmt: skip
"""The settings of images and audio."""
_MAX_THREADS = 512  # ggml's GGML_MAX_N_THREADS: more would abort the process
_DISK_GB, _GB = 16, 10**9  # the default limit of cached prefixes on disk
_LAYERS = "-1 (all layers), 0 (none) or more"
MAX_LAYERS = 512  # llama.cpp's LLAMA_MAX_LAYERS
_MAX_DEVICES = 16  # llama_max_devices
_MAX_RPC_WORKERS = 15  # ggml's GGML_SCHED_MAX_BACKENDS is 16, and the CPU is one: more would abort the process
MAX_DRAFT = 64
"""Maximum draft tokens per sequence and step."""
DRAFT_LOGITS_BYTES = 32 << 20
"""Maximum bytes of the logits in a decode with drafts: 170 rows with a vocabulary of 49,152."""
MAX_SEQ_IDS = 256  # llama.cpp's LLAMA_MAX_SEQ


def setting_name(setting: str) -> str:
    """A setting in an error message, by its name in Python and its flag: "n_ctx (-c)", "max_queue (--max-queue)"."""
    flag = flag_of(setting)
    return f"{setting} ({flag})" if flag else setting


def flag_of(setting: str) -> str:
    """The flag of a setting in messages; "" without a flag."""
    return SETTINGS[setting].flags.partition(" ")[0].partition("/")[0]


_memory, _speed = partial(Setting, "Batch and memory"), partial(Setting, "Speed")
_drafts, _devices = partial(Setting, "Speculative decoding"), partial(Setting, "Workers and devices")
_model = partial(Setting, "Model")


class _Model(ModelChanges, frozen=True):
    model_path: str


class EngineConfig(_Model, frozen=True, kw_only=True):
    """A model file and the settings of one engine, named as llama.cpp's flags (docs/settings.md).

    Raises `ConfigError` for values that are out of range or contradict each other.
    """

    # fmt: off
    n_parallel: Annotated[int, _memory(
        "-np --parallel", "Maximum number of sequences that run at the same time.", "LLAMA_ARG_N_PARALLEL",
        range=Range(1, MAX_SEQ_IDS), range_words=f"from 1 to {MAX_SEQ_IDS}, the number of sequence ids in llama.cpp",
    )] = 16
    n_ctx: Annotated[int, _memory(
        "-c --ctx-size", "Total KV cells for all sequences; 0 on the command line: the model's context length.",
        "LLAMA_ARG_CTX_SIZE", range=Range(1),
    )] = 16384
    n_ctx_seq: Annotated[int, _memory(
        "--kv-unified-per-slot",
        "Maximum tokens of a request, prompt and completion together; 0: what --ctx-size and the model allow. On the "
        "command line, --parallel without --ctx-size then gets as many cells as its requests may need.",
        "LLAMA_ARG_KV_UNIFIED_PER_SLOT", range=Range(0), range_words="0 (no limit) or more",
    )] = 0
    n_batch: Annotated[int, _memory(
        "-b --batch-size", "Maximum tokens per step.", "LLAMA_ARG_BATCH", range=Range(1),
    )] = 2048
    n_ubatch: Annotated[int, _memory(
        "-ub --ubatch-size", "Maximum tokens that llama.cpp computes at once within a step.", "LLAMA_ARG_UBATCH",
        range=Range(1),
    )] = 512
    prefix_cache: Annotated[bool, _memory(
        "--prefix-cache/--no-prefix-cache --cache-prompt/--no-cache-prompt",
        "Share the KV cells of common prompt prefixes between requests.", "LLAMA_ARG_CACHE_PROMPT",
    )] = True
    prefix_cache_ram: Annotated[int, _memory(
        "--prefix-cache-ram -cram --cache-ram", "MiB of host memory for cached prefixes evicted from KV cells.",
        "LLAMA_ARG_CACHE_RAM", range=Range(0), range_words="0 (none) or more MiB",
    )] = 1024
    prefix_cache_disk: Annotated[str, _memory(
        "--prefix-cache-disk",
        "Folder for cached prefixes that persist across restarts, limited to 16 GB or the given number of GB.",
        metavar="DIR[,GB]",
    )] = ""
    """All engines on the machine may share it (docs/decisions/0043)."""
    ctx_checkpoints: Annotated[int, _memory(
        "-ctxcp --ctx-checkpoints --swa-checkpoints",
        "Maximum checkpoints per prompt, for models with sliding windows or recurrent states.",
        "LLAMA_ARG_CTX_CHECKPOINTS", range=Range(0), range_words="0 (none) or more",
    )] = 32
    """Positions up to which other requests can reuse the prompt. Stored in host memory, within `prefix_cache_ram`."""
    checkpoint_min_step: Annotated[int, _memory(
        "-cms --checkpoint-min-step",
        "Minimum tokens between two checkpoints; 0: automatic, based on the cost of a checkpoint.",
        "LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT", range=Range(0), range_words="0 (automatic) or more",
    )] = 0
    swa_full: Annotated[bool, _memory(
        "--swa-full",
        "Keep all cells of sliding windows: uses more memory, but any prefix can be shared without checkpoints.",
        "LLAMA_ARG_SWA_FULL",
    )] = False
    swap_space: Annotated[int, _memory(
        "--swap-space", "MiB of host memory for preempted sequences; 0: recompute them instead.",
        range=Range(0), range_words="0 (none) or more MiB",
    )] = 1024
    cache_type_k: Annotated[CacheType, _memory(
        "-ctk --cache-type-k",
        "Data type of keys in the KV cache. On a CPU the commands may choose a faster one if its effect on texts was "
        "measured (`cppbatch models cache-types`).",
        "LLAMA_ARG_CACHE_TYPE_K",
    )] = "f16"
    """Rounding in f16 can flip near-tied tokens between batches; f32 with f32 weights practically never does."""
    cache_type_v: Annotated[CacheType, _memory(
        "-ctv --cache-type-v",
        "Data type of values in the KV cache, chosen as for keys. Quantised types need flash attention.",
        "LLAMA_ARG_CACHE_TYPE_V",
    )] = "f16"
    context_shift: Annotated[bool, _memory(
        "--context-shift/--no-context-shift",
        "When the context is full, drop its oldest half and continue (approximate).", "LLAMA_ARG_CONTEXT_SHIFT",
    )] = False
    """The model no longer sees the dropped tokens, so the output is approximate from then on."""
    n_keep: Annotated[int, _memory(
        "--keep", "Initial tokens to keep in a context shift; -1: the whole prompt.",
        range=Range(-1), range_words="-1 (the prompt), 0 or more",
    )] = 0
    """Not counting BOS."""

    n_threads: Annotated[int, _speed(
        "-t --threads",
        "Maximum compute threads; 0: one per core. Steps use fewer while other programs keep cores busy.",
        "LLAMA_ARG_THREADS", range=Range(0, _MAX_THREADS), range_words=f"0 (automatic) or up to {_MAX_THREADS}",
    )] = 0
    """0: one per physical core available to this process (docs/decisions/0032)."""
    cpu_mask: Annotated[str, _speed(
        "-C --cpu-mask", "The cores of the compute threads, as bits of a hexadecimal number: 0xF for the first four.",
        metavar="HEX",
    )] = ""
    cpu_range: Annotated[str, _speed(
        "-Cr --cpu-range", "The cores of the compute threads, as their first and last number, besides --cpu-mask.",
        metavar="FIRST-LAST",
    )] = ""
    n_gpu_layers: Annotated[int, _speed(
        "-ngl --gpu-layers --n-gpu-layers",
        "Layers on the GPU; auto (-1): all, or what fits into its memory; all (-2): all, or an error; 0: none.",
        "LLAMA_ARG_N_GPU_LAYERS", range=Range(-2), range_words="-2 (all layers), -1 (automatic), 0 (none) or more",
    )] = -1
    """The commands choose for -1; an engine in Python puts all layers on the GPU."""
    kv_layout: Annotated[KvLayout, _speed(
        "--kv-layout",
        "unified: all sequences share the KV cells; per-sequence: each sequence has its own ctx-size / parallel cells; "
        "auto: per-sequence, and unified while a sequence needs more cells (on a CPU also while a long prefix is "
        "shared).",
        "LLAMA_ARG_KV_UNIFIED",
    )] = "auto"
    """For auto, see docs/decisions/0006."""
    flash_attn: Annotated[FlashAttention, _speed(
        "-fa --flash-attn", "Flash attention.", "LLAMA_ARG_FLASH_ATTN",
    )] = "auto"
    """auto: whichever is faster for the layout and device (docs/decisions/0006); off with an f32 cache, which flash
    attention casts to f16."""
    stream_flash_attn: Annotated[FlashAttention, _speed(
        "", "Measured choice for flash_attn auto in the per-sequence layout on a CPU; auto: not measured.",
    )] = "auto"
    """The choice measured for this machine (docs/decisions/0048)."""
    repack: Annotated[Repacking, _speed(
        "--repack",
        "Repack weights for this CPU. auto: on, unless timing shows that --parallel sequences run faster without it.",
        "LLAMA_ARG_REPACK",
    )] = "auto"
    """For AMX, AVX-512 ...; auto: also off if llama.cpp's build crashes with it (docs/decisions/0028)."""
    sampling: Annotated[Sampling, _speed(
        "--sampling",
        "Where the most likely tokens are selected. backend: on the GPU; host: on the CPU; auto: backend if there is a "
        "GPU, no drafts are requested, and the vocabulary has more than 32,768 tokens (with --rpc: any vocabulary).",
    )] = "auto"
    """backend: rows of logits are copied only for requests that need them."""
    prefer: Annotated[Preference, _speed(
        "--prefer",
        "throughput: compute prompts first; latency: compute prompts in small pieces, so running sequences keep "
        "generating; balanced: a compromise.",
    )] = "balanced"
    """Limits the time of a step while a sequence decodes, unless `target_itl_ms` is set. latency: 2.5 times a step
    without prompts; balanced: 7 times."""
    target_itl_ms: Annotated[float, _speed(
        "--target-itl-ms",
        "Target inter-token latency while prompts are being computed, in ms; 0: set by --prefer.",
        range=Range(0, 60_000), range_words="0 (automatic) to 60000",
    )] = 0
    max_wait_ms: Annotated[float, _speed(
        "--max-wait-ms",
        "How long an idle server waits for more requests before starting the first one. Useful if clients send "
        "requests in bursts; 0: no waiting.",
        range=Range(0, 10_000), range_words="0 (no waiting) to 10000",
    )] = 0
    """Starts earlier if `n_parallel` requests are waiting. While a request runs, others join immediately."""
    deterministic: Annotated[bool, _speed(
        "--deterministic",
        "Compute bit-identical logits regardless of what else is in the batch. CPU only; slows down prefill.",
    )] = False
    """With the per-sequence layout, flash attention and bf16 or quantised caches (docs/decisions/0030)."""
    step_ms: Annotated[tuple[tuple[int, float], ...], _speed(
        "", "Pairs of decode rows and ms per step on this machine, from the profile of cppbatch tune.",
    )] = ()
    """The engine learns other batch sizes, and changes, from its steps."""

    spec: Annotated[Speculation, _drafts(
        "--spec --spec-type",
        "Source of drafts for speculative decoding. suffix: earlier text; draft: the draft model (-md); eagle3, "
        "dflash: a draft model of this kind; mtp: the draft head in the model's file, or Gemma 4's assistant (-md); "
        "auto: suffix plus draft or mtp, on a GPU only with -md; off: none. Drafts change the output only by rounding.",
        "LLAMA_ARG_SPEC_TYPE",
    )] = "auto"
    draft_max: Annotated[int, _drafts(
        "--draft-max --draft --draft-n --spec-draft-n-max", "Maximum draft tokens per sequence and step.",
        "LLAMA_ARG_SPEC_DRAFT_N_MAX LLAMA_ARG_DRAFT_MAX", range=Range(1, MAX_DRAFT),
    )] = 16
    draft_model: Annotated[str, _drafts(
        "-md --draft-model --model-draft --spec-draft-model",
        "Draft model for speculative decoding, a GGUF file: a smaller model with the same vocabulary, or an EAGLE-3, "
        "DFlash or Gemma 4 assistant draft model of this model.",
        "LLAMA_ARG_SPEC_DRAFT_MODEL", metavar="FILE",
    )] = ""
    draft_gpu_layers: Annotated[int, _drafts(
        "--draft-gpu-layers -ngld --spec-draft-ngl --gpu-layers-draft --n-gpu-layers-draft",
        "Layers of the draft model on the GPU; -1: all, 0: none.",
        "LLAMA_ARG_N_GPU_LAYERS_DRAFT", range=Range(-1), range_words=_LAYERS,
    )] = -1

    draft_cache_type_k: Annotated[CacheType | None, _drafts(
        "-ctkd --cache-type-k-draft --spec-draft-type-k",
        "Data type of keys in the draft model's KV cache. Default: as --cache-type-k.",
        "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
    )] = None
    draft_cache_type_v: Annotated[CacheType | None, _drafts(
        "-ctvd --cache-type-v-draft --spec-draft-type-v",
        "Data type of values in the draft model's KV cache. Default: as --cache-type-v.",
        "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
    )] = None
    draft_device_names: Annotated[tuple[str, ...], _drafts(
        "-devd --device-draft --spec-draft-device",
        "As --device, for the draft model. Default: as for the model, but no devices of RPC workers.",
        metavar="NAME,...",
    )] = ()
    draft_override_tensor: Annotated[tuple[str, ...], _drafts(
        "-otd --override-tensor-draft --spec-draft-override-tensor", "As --override-tensor, for the draft model.",
        metavar="PATTERN=DEVICE,...",
    )] = ()
    draft_cpu_moe: Annotated[bool, _drafts(
        "-cmoed --cpu-moe-draft --spec-draft-cpu-moe", "As --cpu-moe, for the draft model.",
        "LLAMA_ARG_SPEC_DRAFT_CPU_MOE LLAMA_ARG_CPU_MOE_DRAFT",
    )] = False
    draft_n_cpu_moe: Annotated[int, _drafts(
        "-ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe", "As --n-cpu-moe, for the draft model.",
        "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE LLAMA_ARG_N_CPU_MOE_DRAFT", metavar="N", range=Range(0, MAX_LAYERS),
    )] = 0

    device: Annotated[int | None, _devices(
        "--devices", "The only GPU to use, by llama.cpp's number. On the command line, one worker for each GPU.",
    )] = None
    """None: all GPUs."""
    rpc: Annotated[tuple[str, ...], _devices(
        "--rpc",
        "RPC workers (`cppbatch rpc-worker` on other machines). The model is split over their devices first, then over "
        "this machine's GPUs. Use only on networks where you trust every machine: docs/rpc.md.",
        "LLAMA_ARG_RPC", metavar="HOST:PORT,...",
    )] = ()
    tensor_split: Annotated[tuple[float, ...], _devices(
        "-ts --tensor-split",
        "Share of the layers for each device: the --rpc devices in order, then this machine's GPUs; devices without a "
        "share get none. Default: proportional to free memory.",
        "LLAMA_ARG_TENSOR_SPLIT", metavar="N0,N1,...",
    )] = ()

    device_names: Annotated[tuple[str, ...], _devices(
        "-dev --device", "Devices to use, by llama.cpp's names (`cppbatch doctor`), in this order; none: only the CPU.",
        "LLAMA_ARG_DEVICE", metavar="NAME,...",
    )] = ()
    """(): all GPUs, after the devices of the RPC workers."""
    split_mode: Annotated[SplitMode, _devices(
        "-sm --split-mode",
        "How a model is split over several GPUs. layer: each has some of the layers; row, tensor: each has a part of "
        "every matrix; none: one GPU (--main-gpu).",
        "LLAMA_ARG_SPLIT_MODE",
    )] = "layer"
    main_gpu: Annotated[int, _devices(
        "-mg --main-gpu", "The number of the GPU for --split-mode none; with row, of that for small tensors.",
        "LLAMA_ARG_MAIN_GPU", range=Range(0, _MAX_DEVICES - 1),
    )] = 0
    override_tensor: Annotated[tuple[str, ...], _devices(
        "-ot --override-tensor",
        "Put tensors whose name matches a regular expression on a device, or on the CPU: `exps=CPU`. The first match "
        "counts.",
        "LLAMA_ARG_OVERRIDE_TENSOR", metavar="PATTERN=DEVICE,...",
    )] = ()
    cpu_moe: Annotated[bool, _devices(
        "-cmoe --cpu-moe", "Keep the experts of all layers on the CPU.", "LLAMA_ARG_CPU_MOE",
    )] = False
    n_cpu_moe: Annotated[int, _devices(
        "-ncmoe --n-cpu-moe", "Keep the experts of the first N layers on the CPU.", "LLAMA_ARG_N_CPU_MOE",
        metavar="N", range=Range(0, MAX_LAYERS),
    )] = 0
    n_cpu_ffn: Annotated[int, _devices(
        "-ncffn --n-cpu-ffn",
        "Keep the feed-forward weights of the first N layers on the CPU, for models without experts.",
        "LLAMA_ARG_N_CPU_FFN", metavar="N", range=Range(0, MAX_LAYERS),
    )] = 0
    kv_offload: Annotated[bool, _devices(
        "-kvo/-nkvo --kv-offload/--no-kv-offload", "Keep the KV cells of layers on the GPU there.",
        "LLAMA_ARG_KV_OFFLOAD",
    )] = True
    op_offload: Annotated[bool, _devices(
        "--op-offload/--no-op-offload",
        "Compute large batches on the GPU also with weights that are on the CPU, by copying the weights.",
    )] = True
    load_mode: Annotated[LoadMode, _devices(
        "-lm --load-mode",
        "How weights that stay on the CPU are read. auto, mmap: mapped from the file; none: copied; mlock, mmap+mlock: "
        "the same, and never swapped out; dio: copied past the file cache.",
        "LLAMA_ARG_LOAD_MODE",
    )] = "auto"
    lazy_mode: Annotated[LazyMode, _devices(
        "-lzm --lazy-mode",
        "Read the rows of some tensors, such as per-layer embeddings, from the file when they are needed, instead of "
        "keeping them in memory. auto: of tensors above 4 GiB.",
        "LLAMA_ARG_LAZY_MODE",
    )] = "auto"
    no_host: Annotated[bool, _devices(
        "--no-host", "Repack weights that stay on the CPU; by default the GPU can read them.", "LLAMA_ARG_NO_HOST",
    )] = False
    numa: Annotated[Numa, _devices(
        "--numa",
        "Where compute threads run, with several NUMA nodes. distribute: evenly over all nodes; isolate: on the node "
        "where the process started; numactl: on the CPUs that numactl set.",
        "LLAMA_ARG_NUMA",
    )] = "off"
    """For all models of a process, as the first one sets it."""
    fit_params: Annotated[bool, _devices(
        "-fit --fit",
        "Without -np, -c and a placement, choose those that fit into the free memory; off: the largest sizes, all "
        "layers on the GPU, or an error.",
        "LLAMA_ARG_FIT", metavar="on|off",
    )] = True
    """The commands choose; an engine in Python does not."""
    fit_target: Annotated[tuple[int, ...], _devices(
        "-fitt --fit-target",
        "MiB of each device that --fit leaves free; one number is for all devices, or without a device for the host. "
        "Default: a tenth of the free memory.",
        "LLAMA_ARG_FIT_TARGET", metavar="MIB0,MIB1,...",
    )] = ()
    fit_ctx: Annotated[int, _devices(
        "-fitc --fit-ctx", "Minimum KV cells that --fit chooses.", "LLAMA_ARG_FIT_CTX", range=Range(0),
        range_words="0 (automatic) or more",
    )] = 0

    mmproj: Annotated[str, _model(
        "--mmproj -mm", "GGUF file with the image or audio encoder for this model (llama.cpp's mmproj).",
        "LLAMA_ARG_MMPROJ", metavar="FILE",
    )] = ""
    mmproj_offload: Annotated[bool, _model(
        "--mmproj-offload/--no-mmproj-offload", "Encode images and audio on the GPU, if layers of the model are there.",
        "LLAMA_ARG_MMPROJ_OFFLOAD",
    )] = True
    mmproj_device: Annotated[str, _model(
        "-mmdev --mmproj-device",
        "The device that encodes images and audio, by llama.cpp's name (`cppbatch doctor`); none: the CPU. Default: "
        "the first one of --device, or the first GPU.",
        "MTMD_BACKEND_DEVICE", metavar="NAME",
    )] = ""
    media_batch: Annotated[int, _model(
        "--mtmd-batch-max-tokens", "Maximum tokens of the images that are encoded at once.",
        "LLAMA_ARG_MTMD_BATCH_MAX_TOKENS", range=Range(1),
    )] = 1024
    lora: Annotated[tuple[tuple[str, float], ...], _model(
        "--lora --lora-scaled",
        "LoRA adapters, each with scale 1 by default; may be repeated. Requests can override the scales.",
        metavar="FILE[:SCALE],...",
    )] = ()
    """Requests name an adapter by its file name without the suffix."""
    lora_init_without_apply: Annotated[bool, _model(
        "--lora-init-without-apply", "Load LoRA adapters with scale 0: requests and POST /lora-adapters apply them.",
    )] = False
    pooling: Annotated[Pooling | None, _model(
        "--pooling",
        "Return embeddings with this pooling instead of text. Automatic for embedding models and rerankers.",
        "LLAMA_ARG_POOLING",
    )] = None
    """None: as set in the model's file; models that generate text do not pool. A pooling engine computes every
    sequence whole, in one step: -ub, --kv-layout, --sampling and all settings for cached or swapped sequences do not
    apply."""

    max_queue: Annotated[int, Setting(
        "Limits", "--max-queue", "Maximum waiting requests; further requests are refused with 429.", range=Range(1),
    )] = 4096
    trace: Annotated[str, Setting(
        "Log and debugging", "--trace",
        "Write a trace of every step to this file (open it in ui.perfetto.dev). For debugging: the file grows quickly.",
        metavar="FILE.json",
    )] = ""
    # fmt: on

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            if name in SCALED_FILES:  # `_check_scales` does
                continue
            value = _convert(name, getattr(self, name))
            if setting.range and not setting.range.low <= value <= setting.range.high:
                raise ConfigError(f"{setting_name(name)} is {value!r}; it must be {setting.range_text}")
            if KINDS[name] is not float:  # a default of 0 stays 0 in --help
                msgspec.structs.force_setattr(self, name, value)
        if self.n_batch < self.n_parallel:
            raise ConfigError(
                f"{setting_name('n_batch')} is {self.n_batch}, less than {setting_name('n_parallel')}, which is "
                f"{self.n_parallel}; a step needs one token for each running sequence: raise the former or lower the "
                "latter"
            )
        if self.n_ctx < self.n_parallel:
            raise ConfigError(
                f"{setting_name('n_ctx')} is {self.n_ctx}, less than {setting_name('n_parallel')}, which is "
                f"{self.n_parallel}: raise the former or lower the latter"
            )
        if self.device is not None and not 0 <= self.device <= INT32_MAX:
            raise ConfigError(f"{setting_name('device')} is {self.device}; devices are numbered from 0")
        disk_folder(self.prefix_cache_disk)
        if self.prefix_cache_disk and self.prefix_cache and not self.prefix_cache_ram:
            raise ConfigError(
                f"{setting_name('prefix_cache_disk')} needs host memory, but {setting_name('prefix_cache_ram')} is 0: "
                "set it above 0"
            )
        self._check_kernels()
        self._check_rpc()
        self._check_placement()
        self._check_speculation()
        self._check_lora()
        self._check_model_changes()
        if self.mmproj and self.pooling:
            raise ConfigError(
                f"{setting_name('mmproj')} requires a model that generates text, but {setting_name('pooling')} is "
                f"{self.pooling!r}; leave one of them out"
            )

    def _check_kernels(self) -> None:
        if self.deterministic and (self.kv_layout == "unified" or self.flash_attn == "off"):
            raise ConfigError(
                f"{setting_name('deterministic')} requires the per-sequence layout and flash attention: leave out "
                f"{setting_name('kv_layout')} and {setting_name('flash_attn')}"
            )
        if self.flash_attn == "off" and self.cache_type_v not in FLOAT_CACHES:
            raise ConfigError(
                f"{setting_name('cache_type_v')} is {self.cache_type_v!r}, and quantised values require flash "
                f"attention: leave out {setting_name('flash_attn')}, or use f16"
            )

    def _check_rpc(self) -> None:
        endpoints = [parse_endpoint(each) for each in self.rpc]
        if len(set(endpoints)) != len(endpoints):
            raise ConfigError(f"{setting_name('rpc')} lists a worker twice: {', '.join(self.rpc)}")
        if len(endpoints) > _MAX_RPC_WORKERS:
            raise ConfigError(
                f"{setting_name('rpc')} lists {len(endpoints)} workers; llama.cpp supports at most {_MAX_RPC_WORKERS}"
            )
        if self.rpc and self.device is not None:
            raise ConfigError(
                f"{setting_name('device')} selects a single local GPU and cannot be combined with "
                f"{setting_name('rpc')}: leave it out, and set the share of each device with "
                f"{setting_name('tensor_split')}"
            )
        if self.rpc and self.deterministic:
            raise ConfigError(
                f"{setting_name('deterministic')} works on this machine's CPU only, but {setting_name('rpc')} computes "
                "on other machines; leave one of them out"
            )
        if len(self.tensor_split) > _MAX_DEVICES:
            raise ConfigError(
                f"{setting_name('tensor_split')} has {len(self.tensor_split)} shares; the limit is {_MAX_DEVICES}"
            )
        if any(not (math.isfinite(share) and share >= 0) for share in self.tensor_split) or (
            self.tensor_split and not any(self.tensor_split)
        ):
            shares = ",".join(f"{share:g}" for share in self.tensor_split)
            raise ConfigError(
                f"{setting_name('tensor_split')} is {shares}; shares must be at least 0, and at least one must be "
                "above 0"
            )

    def _check_placement(self) -> None:
        for names, layers in (("device_names", "n_gpu_layers"), ("draft_device_names", "draft_gpu_layers")):
            if getattr(self, names) == ("none",):
                msgspec.structs.force_setattr(self, names, ())
                msgspec.structs.force_setattr(self, layers, 0)
                if names == "device_names" and not self.draft_device_names:
                    msgspec.structs.force_setattr(self, "draft_gpu_layers", 0)
        if len(self.fit_target) > _MAX_DEVICES or any(n < 0 for n in self.fit_target):
            given = ",".join(map(str, self.fit_target))
            raise ConfigError(
                f"{setting_name('fit_target')} is {given}; it must be 0 or more MiB for each device, at most "
                f"{_MAX_DEVICES} numbers"
            )
        if self.mmproj_device == "none":
            msgspec.structs.force_setattr(self, "mmproj_device", "")
            msgspec.structs.force_setattr(self, "mmproj_offload", False)
        if self.device_names and self.device is not None:
            raise ConfigError(
                f"{setting_name('device_names')} and {setting_name('device')} cannot be combined: the first "
                "names devices, the second numbers GPUs with a worker each"
            )
        for name in ("override_tensor", "draft_override_tensor"):
            for given in getattr(self, name):
                pattern, _, place = given.rpartition("=")
                if not pattern or not place:
                    raise ConfigError(
                        f"{setting_name(name)} contains {given!r:.200}; it must be PATTERN=DEVICE, such as exps=CPU"
                    )
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ConfigError(
                        f"{setting_name(name)} has the pattern {pattern!r:.200}, which is not a regular expression "
                        f"({error})"
                    ) from None

    @property
    def tensor_places(self) -> list[tuple[str, str]]:
        """`override_tensor` as pairs of a pattern and a device."""
        return [(pattern, place) for pattern, _, place in (each.rpartition("=") for each in self.override_tensor)]

    @property
    def is_placed(self) -> bool:
        """Whether it says which layers and tensors are on a GPU. Otherwise the commands may choose
        (`cppbatch.sizing.placement`)."""
        parts = any(getattr(self, name) for name in ("override_tensor", *CPU_PARTS))
        return parts or self.n_gpu_layers != -1 or not self.fit_params

    def _check_speculation(self) -> None:
        if self.spec in DRAFT_MODELS and not self.draft_model:
            raise ConfigError(
                f"{setting_name('spec')} is '{self.spec}', which requires a draft model: set "
                f"{setting_name('draft_model')}, or leave out this setting"
            )

    def _check_scales(self, name: str) -> tuple[tuple[str, float], ...]:
        try:
            given = tuple((str(path), float(scale)) for path, scale in getattr(self, name))
        except (TypeError, ValueError):
            raise ConfigError(
                f"{setting_name(name)} is {getattr(self, name)!r:.200}; it must be a list of (file, scale) pairs"
            ) from None
        for path, scale in given:
            if not math.isfinite(scale) or abs(scale) > MOST_SCALE:
                message = f"it must be from {-MOST_SCALE:g} to {MOST_SCALE:g}"
                raise ConfigError(f"{setting_name(name)}: the scale of {path} is {scale}; {message}")
        names: dict[str, str] = {}
        for path, _ in given:
            if other := names.get(adapter_name(path)):
                raise ConfigError(
                    f"{setting_name(name)}: {other} and {path} have the same name {adapter_name(path)!r}; rename one "
                    "of the files"
                )
            names[adapter_name(path)] = path
        return given

    def _check_lora(self) -> None:
        lora = self._check_scales("lora")
        if self.lora_init_without_apply:
            lora = tuple((path, 0.0) for path, _ in lora)
        msgspec.structs.force_setattr(self, "lora", lora)

    def _check_model_changes(self) -> None:
        msgspec.structs.force_setattr(self, "control_vectors", self._check_scales("control_vectors"))
        if self.rope_scale:
            if self.rope_freq_scale:
                raise ConfigError(
                    f"{setting_name('rope_scale')} and {setting_name('rope_freq_scale')} set the same; leave one out"
                )
            msgspec.structs.force_setattr(self, "rope_freq_scale", 1 / self.rope_scale)
            msgspec.structs.force_setattr(self, "rope_scale", 0.0)
        for each in self.kv_overrides:
            try:
                parse_override(each)
            except ValueError as error:
                raise ConfigError(f"{setting_name('kv_overrides')} contains {each!r:.200}; {error}") from None
        layers = self.control_vector_layers
        if layers and not (len(layers) == 2 and 1 <= layers[0] <= layers[1] <= MAX_LAYERS):
            raise ConfigError(
                f"{setting_name('control_vector_layers')} is {' '.join(map(str, layers))}; it must be the numbers of "
                "the first and the last layer, from 1"
            )
        if 0 < self.image_max_tokens < self.image_min_tokens:
            raise ConfigError(
                f"{setting_name('image_min_tokens')} is {self.image_min_tokens}, more than "
                f"{setting_name('image_max_tokens')}, which is {self.image_max_tokens}; lower the former"
            )
        for name, parse in (("cpu_mask", cpus_of_mask), ("cpu_range", cpus_of_range)):
            try:
                parse(getattr(self, name))
            except ValueError:
                raise ConfigError(
                    f"{setting_name(name)} is {getattr(self, name)!r:.80}; it must be {SETTINGS[name].metavar}, such "
                    f"as {'0xF' if name == 'cpu_mask' else '0-3'}"
                ) from None


_DECLARED = {
    name: hint for name, hint in get_type_hints(EngineConfig, include_extras=True).items() if name != "model_path"
}
SETTINGS: dict[str, Setting] = {name: hint.__metadata__[0] for name, hint in _DECLARED.items()}
"""The declarations of all fields of `EngineConfig` except `model_path`."""
OPTIONS = tuple(name for name, setting in SETTINGS.items() if setting.flags and name != "device")
"""The settings that have an option. --devices belongs to the deployment, and sets the `device` of each worker."""
KINDS: dict[str, Any] = {name: hint.__origin__ for name, hint in _DECLARED.items()}
"""Their types."""


def _words(kind: Any) -> tuple[str, ...]:
    """The values of a `Literal`, optionally with None."""
    return next((get_args(each) for each in (kind, *get_args(kind)) if get_origin(each) is Literal), ())


CHOICES: dict[str, tuple[str, ...]] = {name: words for name, kind in KINDS.items() if (words := _words(kind))}
"""The allowed values of the settings that are `Literal`s."""


_FORMS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    KINDS["device"]: "a whole number, or None",
    KINDS["rpc"]: "a list of strings",
    KINDS["tensor_split"]: "a list of numbers, like [3, 1]",
    KINDS["fit_target"]: "a list of whole numbers, like [1024, 2048]",
    KINDS["step_ms"]: "a list of (rows, ms) pairs",
}
"""What a value of each type must be, in messages."""


def _convert(name: str, value: Any) -> Any:
    """The value of a setting in its type, if it has another one that means the same: paths, None for an empty string,
    lists, addresses with commas as --rpc has them. Raises `ConfigError`."""
    kind, given = KINDS[name], value
    if kind is str and value is None:
        value = ""
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if kind == KINDS["rpc"] and isinstance(value, str):
        value = [each.strip() for each in value.split(",")]
    try:
        return msgspec.convert(value, kind, strict=kind is not bool)
    except msgspec.ValidationError:
        form = f"one of {', '.join(CHOICES[name])}" if name in CHOICES else _FORMS[kind]
        must = ", ".join(filter(None, (form, SETTINGS[name].range_text)))
        raise ConfigError(f"{setting_name(name)} is {given!r:.200}; it must be {must}") from None


def cpus_of_mask(given: str) -> set[int]:
    """The cores whose bits are set in a hexadecimal number; empty for "". Raises `ValueError`."""
    bits = int(given, 16) if given else 0
    return {i for i in range(bits.bit_length()) if bits >> i & 1}


def cpus_of_range(given: str) -> set[int]:
    """The cores from the first to the last of `FIRST-LAST`, of which either may be missing; empty for "".

    Raises `ValueError`.
    """
    first, dash, last = given.partition("-")
    if given and not dash:
        raise ValueError
    low, high = int(first or 0), int(last or _MAX_THREADS - 1)
    return set(range(low, min(high, _MAX_THREADS - 1) + 1)) if given else set()


def disk_folder(setting: str) -> tuple[Path, int] | None:
    """The folder of `prefix_cache_disk`, and the maximum bytes of its files; None: no folder.

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
        raise ConfigError(
            f"{setting_name('prefix_cache_disk')} is {setting!r}; it must be DIR or DIR,GB with more than 0 GB"
        )
    return Path(folder).expanduser().absolute(), round(gb * _GB)


def adapter_name(path: str) -> str:
    """The name of a LoRA adapter or control vector in requests."""
    return Path(path).stem


def available_threads() -> int:
    """Physical cores that this process may use. More compute threads than cores only slow each other down."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical: int | None = psutil.cpu_count(logical=False)
    return max(1, min(usable, physical or usable))


def cells_for(n_ctx: int, n_parallel: int, most: int) -> int:
    """KV cells of an engine whose requests may have `n_ctx` tokens each, as in APIs for one request at a time.

    `most`, but at least `n_ctx`, and no more than all sequences could use: so short requests run together whatever
    `n_ctx` is.
    """
    return max(n_ctx, min(n_ctx * n_parallel, most))
