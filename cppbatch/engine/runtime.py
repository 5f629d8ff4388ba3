"""Loads a model and creates its context from an `EngineConfig`: the native part of an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Protocol, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from cppbatch.config import (
    CPU_PARTS,
    DRAFT_MODELS,
    EngineConfig,
    FlashAttention,
    KvLayout,
    Pooling,
    Sharing,
    adapter_name,
    available_threads,
    setting_name,
)
from cppbatch.engine.compute_threads import ComputeThreads, usable_cpus, use_cpus
from cppbatch.engine.kv.layout import (
    choose_cache_type,
    choose_flash_attn,
    choose_layout,
    stream_cells,
    switches_layout,
    unified_cells,
)
from cppbatch.engine.kv.memory import Memory
from cppbatch.engine.kv.prefix_cache import REUSE_COSTS, ReuseCosts
from cppbatch.engine.kv.prefix_memory import CACHED_SHARE
from cppbatch.engine.kv.sharing import SHARING
from cppbatch.engine.load_check import check_loads, check_projector
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.media.input import MediaInput
from cppbatch.engine.model_info import AdapterInfo, FillIn, ModelInfo
from cppbatch.engine.speculation.proposer import GrammarProposer, Proposer
from cppbatch.engine.speculation.row_proposer import RowProposer
from cppbatch.engine.speculation.runtimes import (
    SPECS,
    choose_row_draft,
    draft_config,
    open_draft_model,
    open_head,
    open_row_draft,
    uses_head,
)
from cppbatch.engine.speculation.suffix_proposer import SuffixProposer
from cppbatch.engine.vocabulary import Vocabulary
from cppbatch.errors import LlamaError, ModelError
from cppbatch.llama import (
    MIN_ROWS,
    Backend,
    BackendSampling,
    Batch,
    Context,
    EmbeddingBatch,
    ImageSizes,
    MediaEncoder,
    Model,
    cpu_overrides,
    find_prefix_sharing,
    least_rows_for_equal_bits,
    media_device,
    probe_prefix_sharing,
)
from cppbatch.llama.library import PINNED_VERSION
from cppbatch.llama.probes import find_sampling_crash
from cppbatch.llama.selfcheck import repacking_works
from cppbatch.llama.vocab import Vocab

log = logging.getLogger("cppbatch.engine")

_MAX_HOST_TOKENS = 32_768  # of a vocabulary: copying and reading such rows takes less time than selecting on the GPU


class Computation(Memory, Protocol):
    """The part of `cppbatch.llama.Context` that the engine uses."""

    n_batch: int
    n_ubatch: int
    backend_sampling: BackendSampling | None

    @property
    def is_closed(self) -> bool: ...
    def use_adapters(self, adapters: AdapterSet) -> None: ...
    def use_threads(self, n: int) -> None: ...
    def decode(self, batch: Batch) -> None: ...
    def decode_vectors(self, batch: EmbeddingBatch, *, causal: bool) -> None: ...
    def logits(self, n_outputs: int) -> npt.NDArray[np.float32]: ...
    def embedding(self, seq_id: int) -> npt.NDArray[np.float32]: ...
    def token_embeddings(self, n_outputs: int) -> npt.NDArray[np.float32]: ...


class Layouts(msgspec.Struct, frozen=True):
    """The two layouts of an engine that switches layouts."""

    change: Callable[[KvLayout], Sharing]
    """Recreates the context in a layout, without sequences, and returns how sequences share prefixes in it."""
    stream_cells: int
    """Maximum tokens of a sequence in the per-sequence layout."""
    n_cached: int | None = None
    """Maximum cells of cached prefixes in the unified layout; None: unified is never faster, because sequences cannot
    share cells, or a GPU reads repeated cells of streams faster than other sequences' cells in the unified layout."""


class Runtime(msgspec.Struct, frozen=True):
    """The model and context of an engine. Tests create one with a fake context."""

    context: Computation
    vocab: Vocabulary
    info: ModelInfo
    sharing: Sharing
    close: Callable[[], None]
    cached_share: float = CACHED_SHARE
    """Fraction of the cells that cached prefixes may hold."""
    reuse_costs: ReuseCosts = REUSE_COSTS
    may_pad: bool = False
    """Whether steps may have padding rows; False only in tests."""
    min_rows: int = 1
    """Minimum tokens, and rows of logits if any, of a ubatch. With `deterministic`, above 1 if fewer would use another
    kernel, which adds in a different order."""
    threads: ComputeThreads | None = None
    """Compute threads per step; None on a GPU."""
    layouts: Layouts | None = None
    """None: the layout is fixed."""
    proposers: Sequence[Proposer] = ()
    """Sources of drafts; empty without speculation."""
    head: RowProposer | None = None
    """The proposer that drafts from hidden rows, which must see the model's computations."""
    media: MediaInput | None = None
    """Encodes images and audio; None: prompts are text only."""
    state_settings: Mapping[str, str] = msgspec.field(default_factory=dict)
    """What keys and values depend on besides the files of weights and cache types: the version of llama.cpp, and
    settings that affect them. Saved states are only valid for engines with the same value."""
    n_rollback: int = 0
    """The number of a sequence's draft tokens that can be removed if memory is not only cells
    (`Context.n_rollback`)."""


def load_runtime(
    config: EngineConfig, progress: Callable[[float], bool] | None = None, *, survives_crash: bool = False
) -> Runtime:
    """Loads the model and creates a context. Closing the runtime frees both. `progress` is
    called with 0.0 to 1.0; loading stops when it returns False. `survives_crash`: this process is a worker, in which no
    model needs to be tried first.

    Raises `ModelError`, `LibraryError` or `LlamaError`.
    """
    use_cpus(config)
    threads = _compute_threads(config)
    model = load_model(config, progress, survives_crash=survives_crash)
    try:
        return open_runtime(config, model, model.close, threads)
    except BaseException:
        model.close()
        raise


def load_model(
    config: EngineConfig,
    progress: Callable[[float], bool] | None = None,
    *,
    no_alloc: bool = False,
    survives_crash: bool = False,
) -> Model:
    """Loads the model of an engine, without its adapters. `progress`, `no_alloc`: those of `Model`.

    The first time, its files are tried in a child process (`check_loads`), except with `no_alloc`. Weights are repacked
    according to `config.repack`, unless a self-check in a child process shows that this build crashes with it. Raises
    `ModelError` or `LibraryError`.
    """
    if not no_alloc:
        check_loads(config, survives_crash=survives_crash)
    if config.n_gpu_layers > 0 and not _on_gpu(config):
        log.warning(
            "%s is %d, but this build of llama.cpp is CPU-only: all layers run on the CPU. See docs/gpu.md for how to "
            "build it for a GPU",
            setting_name("n_gpu_layers"),
            config.n_gpu_layers,
        )
    is_translated = config.n_gpu_layers != 0 and Backend.get().supports_openvino and not no_alloc
    if is_translated and (config.kv_layout, config.flash_attn) != ("unified", "on"):
        log.warning(
            "OpenVINO devices compute only with %s unified and %s on; set both, or %s to 0",
            setting_name("kv_layout"),
            setting_name("flash_attn"),
            setting_name("n_gpu_layers"),
        )
    parts = {name: getattr(config, name) for name in CPU_PARTS}
    model = Model(
        config.model_path,
        n_gpu_layers=config.n_gpu_layers,
        device=config.device,
        repack=repacks(config),
        rpc=config.rpc,
        tensor_split=config.tensor_split,
        devices=config.device_names,
        split_mode=config.split_mode,
        main_gpu=config.main_gpu,
        overrides=[*config.tensor_places, *cpu_overrides(**parts)],
        load_mode=config.load_mode,
        lazy_mode=config.lazy_mode,
        numa=config.numa,
        no_host=config.no_host,
        progress=progress,
        no_alloc=no_alloc,
        load_head=uses_head(config),
        kv_overrides=config.kv_overrides,
        check_tensors=config.check_tensors,
    )
    model.context_params |= config.rope_params
    if config.control_vectors and not no_alloc:
        try:
            model.control_vector_layers = config.control_vector_layers
            for path, _ in config.control_vectors:
                model.add_control_vector(path)
        except BaseException:
            model.close()
            raise
    on_gpu_too = config.op_offload and not config.deterministic  # large batches of layers on the CPU
    given = {"offload_kqv": config.kv_offload, "op_offload": on_gpu_too}
    model.context_params |= {name: False for name, value in given.items() if not value}
    return model


def repacks(config: EngineConfig) -> bool:
    """Whether llama.cpp may repack the weights of an engine. Raises `LibraryError`."""
    return config.repack != "off" and repacking_works() and _why_not_repacked(config) is None


def _why_not_repacked(config: EngineConfig) -> str | None:
    """With `repack` auto, a sentence if the weights are faster without repacking.

    Not of a deterministic engine: its bits depend neither on measured times nor on its number of sequences.
    """
    if config.repack != "auto" or config.deterministic or _on_gpu(config):
        return None
    from cppbatch.models.kernels import why_not_repacked  # imports gguf, which is slow

    try:
        return why_not_repacked(Path(config.model_path), config.n_parallel)
    except ModelError:  # loading reports what is wrong with the file
        return None


def open_runtime(
    config: EngineConfig,
    model: Model,
    close: Callable[[], None] | None = None,
    threads: ComputeThreads | None = None,
) -> Runtime:
    """Creates a context for a loaded model. A model may have several contexts at the same time.

    If the settings name a draft model, it is loaded too; closing the runtime frees it. `close`: closes the rest of the
    runtime; None: closing only frees the context. `threads`: created before the model was loaded; None: now. Raises
    `ModelError` or `LlamaError`.
    """
    threads = threads or _compute_threads(config)
    runtime = _open_runtime(config, model, close, threads)
    if config.mmproj:
        runtime = _with_media(config, model, runtime)
    if model.has_head and runtime.proposers:
        assert isinstance(runtime.context, Context)
        return _with_head(runtime, open_head(config, runtime.context, runtime.threads))
    draft_settings = draft_config(config)
    if draft_settings is None:
        return runtime
    if not _can_remove_drafts(model) or runtime.context.backend_sampling:
        if config.spec in SPECS:
            reason = (
                "sampling on the GPU"
                if runtime.context.backend_sampling
                else "a model whose state cannot be rolled back"
            )
            raise ModelError(
                f"{setting_name('spec')} is '{config.spec}', but drafts are not possible with {reason}; leave it out"
            )
        return runtime
    if runtime.info.pooling:
        raise ModelError(
            f"{setting_name('draft_model')} requires a model that generates text, but {model.path} returns vectors. "
            "Leave it out"
        )
    row_draft, is_left_out = choose_row_draft(config)
    if is_left_out:
        return runtime
    draft = load_model(draft_settings)
    try:
        if row_draft:
            assert isinstance(runtime.context, Context)
            head = open_row_draft(draft_settings, row_draft, draft, runtime.context, runtime.threads)
            return _with_row_draft(replace(runtime, close=partial(_close_both, draft.close, runtime.close)), head)
        proposer = open_draft_model(draft_settings, draft, model, runtime.threads)
    except BaseException:
        draft.close()
        raise

    close = partial(_close_both, draft.close, runtime.close)
    return replace(runtime, proposers=(*runtime.proposers, proposer), close=close)


def _close_both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def _with_head(runtime: Runtime, head: RowProposer) -> Runtime:
    close = partial(_close_both, head.close_context, runtime.close)
    return replace(runtime, proposers=(*runtime.proposers, head), head=head, close=close)


def _with_row_draft(runtime: Runtime, head: RowProposer) -> Runtime:
    """Adds a draft model that reads hidden rows: its context refers to that of the model, which a switch recreates."""
    layouts = runtime.layouts
    if layouts:
        change = layouts.change

        def change_both(layout: KvLayout) -> Sharing:
            head.close_context()
            sharing = change(layout)
            head.open_again()
            return sharing

        layouts = replace(layouts, change=change_both)
    return _with_head(replace(runtime, layouts=layouts), head)


def _with_media(config: EngineConfig, model: Model, runtime: Runtime) -> Runtime:
    """The runtime with the encoder of images and audio. Raises `ModelError` for settings that do not support it."""
    if runtime.info.pooling:
        raise ModelError(
            f"{setting_name('mmproj')} requires a model that generates text, but {model.path.name} returns vectors. "
            "Leave it out"
        )
    if config.deterministic:
        raise ModelError(
            f"{setting_name('deterministic')} works for text only, because image vectors are computed in pieces of "
            f"varying size; leave out {setting_name('mmproj')}, or this setting"
        )
    n_threads = max(1, (config.n_threads or available_threads()) // 2)
    encoder = open_encoder(config, model, n_threads)
    n_ubatch = runtime.context.n_ubatch
    if encoder.images_are_whole and (n := encoder.image_tokens()) > n_ubatch:
        raise ModelError(
            f"an image has {n} tokens, which this model must compute at once, but {setting_name('n_ubatch')} is "
            f"{n_ubatch}; set it to {n}"
        )
    lent = nullcontext if runtime.threads is None else partial(runtime.threads.lent, n_threads)
    media = MediaInput(encoder, compute=lent)
    return replace(runtime, media=media, info=replace(runtime.info, modalities=encoder.modalities))


def open_encoder(config: EngineConfig, model: Model, n_threads: int) -> MediaEncoder:
    """Loads the projector of an engine after testing it. Raises `ModelError`, `LibraryError`."""
    check_projector(config.mmproj, config.model_path)
    device = None
    if config.mmproj_device or (config.mmproj_offload and config.n_gpu_layers):
        device = media_device(config.mmproj_device, config.device_names, config.device or 0)
    sizes = ImageSizes(config.image_min_tokens, config.image_max_tokens, config.media_batch)
    return MediaEncoder(model, config.mmproj, n_threads=n_threads, device=device, sizes=sizes)


def _compute_threads(config: EngineConfig) -> ComputeThreads | None:
    """The object that chooses the threads of each step; None on a GPU, where they hardly matter."""
    if _on_gpu(config):
        return None
    return ComputeThreads(config.n_threads or available_threads(), len(usable_cpus()))


def _open_runtime(
    config: EngineConfig, model: Model, close: Callable[[], None] | None, threads: ComputeThreads | None
) -> Runtime:
    """The runtime without a draft model."""
    context = make_context(config, model)
    close = close or context.close
    if threads:
        context.use_threads(threads.now())  # also for the probes below
    if pooling := _pooling(config, model):
        return Runtime(context, model.vocab, _info(model, context, config, pooling), "none", close, threads=threads)
    min_rows = _min_rows(context) if config.deterministic else 1
    sharing = _sharing(config, context)
    wants_drafts = may_draft(config, model)
    if samples_on_device(config, model):
        _sample_on_device(config, context)
    # on the CPU, attention is more expensive, and restoring a prefix from host memory is cheap
    share = CACHED_SHARE if model.on_gpu else 1 / 16
    info = _info(model, context, config, min_rows=min_rows)
    runtime = Runtime(
        context,
        model.vocab,
        info,
        sharing,
        close,
        share,
        may_pad=True,
        min_rows=min_rows,
        threads=threads,
        proposers=_proposers(config, model) if wants_drafts and not _samples_one_row(context) else [],
        n_rollback=context.n_rollback,
        state_settings=_state_settings(config, model),
    )
    if not switches(config, model):
        return runtime
    shares_prefixes = SHARING[sharing].shares_prefixes  # the unified layout is only probed when it is used
    n_cached = round(share * unified_cells(config)) if shares_prefixes and not model.on_gpu else None
    layouts = Layouts(_LayoutChanger(config, context, sharing), stream_cells(config), n_cached)
    return replace(runtime, layouts=layouts)


def _state_settings(config: EngineConfig, model: Model) -> dict[str, str]:
    settings = {"llama-cpp-python": PINNED_VERSION}
    if config.deterministic:  # only the same kernels give the same bits
        settings["deterministic"] = f"repack {model.repack}"
    if model.context_params:
        settings["context_params"] = repr(sorted(model.context_params.items()))
    if config.kv_overrides:
        settings["kv_overrides"] = repr(config.kv_overrides)
    if config.image_min_tokens or config.image_max_tokens:
        settings["image_tokens"] = f"{config.image_min_tokens} {config.image_max_tokens}"
    if model.rope_depends_on_context:
        settings["context"] = f"{config.n_ctx} {config.n_parallel} {config.kv_layout}"
    return settings


def may_draft(config: EngineConfig, model: Model) -> bool:
    """Whether to use drafts. On a GPU, only if requested: drafts from earlier text made repetitive texts up to 1.4
    times as fast there, but free text up to 16% slower, and they rule out sampling on the GPU."""
    return config.spec != "off" and (config.spec != "auto" or bool(config.draft_model) or not model.on_gpu)


def samples_on_device(config: EngineConfig, model: Model) -> bool:
    """Whether the most likely tokens are selected on the device, if llama.cpp can do that there. Raises `ModelError`
    if `sampling` demands it of a model with which it cannot."""
    if _pooling(config, model):
        return False
    if not model.can_sample_on_device:
        if config.sampling == "backend":
            raise ModelError(
                f"{setting_name('sampling')} is 'backend', but llama.cpp mixes up the candidates of sequences of "
                f"{model.path.name}; use 'host'"
            )
        return False
    has_long_rows = model.vocab.n_tokens > _MAX_HOST_TOKENS or bool(config.rpc)
    is_better = model.on_gpu and not may_draft(config, model) and has_long_rows
    return config.sampling == "backend" or (config.sampling == "auto" and is_better)


def _sharing(config: EngineConfig, context: Context) -> Sharing:
    """How sequences share prefixes. Over RPC, always probed, because the remote devices are unknown."""
    if not config.prefix_cache:
        return "none"
    return probe_prefix_sharing(context) if config.rpc else find_prefix_sharing(context, config)


def _sample_on_device(config: EngineConfig, context: Context) -> None:
    """Enables backend sampling, unless the device does not support it or its driver crashes. Raises `LlamaError` if it
    is not `auto`."""
    is_requested = config.sampling == "backend"
    crash = None
    if context.model.on_gpu and not config.rpc:  # on an RPC worker, only llama.cpp's server would crash
        n_vocab = context.model.vocab.n_tokens
        crash = find_sampling_crash(n_vocab, config.device, config.device_names, tries_again=is_requested)
    if not crash and context.enable_backend_sampling():
        return
    if is_requested:
        reason = f"crashes when it samples on this device ({crash})" if crash else "cannot sample on this device"
        raise LlamaError(f"{setting_name('sampling')} is 'backend', but llama.cpp {reason}; use 'host'")
    if crash:
        log.warning(
            "the CPU samples: llama.cpp crashed in a trial of sampling on the GPU (%s). %s backend tries it again",
            crash,
            setting_name("sampling"),
        )


def _samples_one_row(context: Context) -> bool:
    """Whether the device samples: only one row per sequence, so that drafts cannot be verified."""
    if context.backend_sampling:
        log.info(
            "no drafts: the GPU samples one token per sequence; use %s host to enable drafts", setting_name("sampling")
        )
    return context.backend_sampling is not None


def _proposers(config: EngineConfig, model: Model) -> list[Proposer]:
    """The sources of drafts, without a draft model or head."""
    if not _can_remove_drafts(model):
        return []
    grammars = GrammarProposer(model.vocab)
    return [grammars] if config.spec in ("mtp", *DRAFT_MODELS) else [grammars, SuffixProposer()]


def _can_remove_drafts(model: Model) -> bool:
    """Whether the last tokens of a sequence, those of wrong drafts, can be removed."""
    if not model.is_recurrent or model.most_snapshots:
        return True
    log.info("no drafts: the recurrent state of %s cannot be rolled back", model.path.name)
    return False


def switches(config: EngineConfig, model: Model) -> bool:
    """Whether an engine of this model switches layouts."""
    has_kv_cells = not model.is_recurrent and _pooling(config, model) is None
    return switches_layout(config, has_kv_cells=has_kv_cells)


class _LayoutChanger:
    """`Layouts.change` for a context. Prefix sharing is probed once per layout."""

    def __init__(self, config: EngineConfig, context: Context, sharing: Sharing) -> None:
        self._config = config
        self._context = context
        self._samples_on_device = context.backend_sampling is not None
        self._sharing: dict[KvLayout, Sharing] = {_layout(context): sharing}

    def __call__(self, layout: KvLayout) -> Sharing:
        context = self._context
        context.reopen(**_layout_settings(self._config, context.model, layout))
        if layout not in self._sharing:
            self._sharing[layout] = _sharing(self._config, context)
        if self._samples_on_device:
            context.enable_backend_sampling()
        return self._sharing[layout]


class _LayoutSettings(TypedDict):
    """The arguments of `Context.reopen`."""

    n_ctx: int
    kv_unified: bool
    flash_attn: FlashAttention


def _layout_settings(config: EngineConfig, model: Model, layout: KvLayout) -> _LayoutSettings:
    streams_of_a_switching_engine = layout == "per-sequence" and switches(config, model)
    n_ctx = stream_cells(config) * config.n_parallel if streams_of_a_switching_engine else config.n_ctx
    flash_attn = choose_flash_attn(config, layout, on_gpu=model.on_gpu, has_amx=Backend.get().has_amx)
    return _LayoutSettings(n_ctx=n_ctx, kv_unified=layout == "unified", flash_attn=flash_attn)


def make_context(config: EngineConfig, model: Model) -> Context:
    """Creates the context of an engine, and loads the adapters into the model. Raises `ModelError` or `LlamaError`."""
    if pooling := _pooling(config, model):
        if config.lora:
            raise ModelError(
                f"{setting_name('lora')} requires a model that generates text, but {model.path} returns vectors; leave "
                f"out {setting_name('lora')}, or use another model"
            )
        return _pooling_context(config, model, pooling)
    for path, _ in config.lora[len(model.adapters) :]:
        model.add_adapter(path)
    has_kv_cells = not model.is_recurrent
    layout = choose_layout(config, n_ctx_train=model.n_ctx_train, has_kv_cells=has_kv_cells)
    settings = _layout_settings(config, model, layout)
    n_batch, n_ubatch = config.n_batch, config.n_ubatch
    if switches(config, model):
        n_batch = min(n_batch, settings["n_ctx"])  # in both layouts
    if config.deterministic:  # a ubatch holds a row per sequence, and a batch also padding rows for each
        most = max(MIN_ROWS)
        n_batch = max(n_batch, 2 * most, most * config.n_parallel)
        n_ubatch = max(n_ubatch, 2 * most, config.n_parallel)
    return Context(
        model,
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        n_seq_max=config.n_parallel,
        n_threads=config.n_threads or available_threads(),
        type_k=choose_cache_type(config, config.cache_type_k),
        type_v=choose_cache_type(config, config.cache_type_v),
        n_rollback=config.draft_max if may_draft(config, model) else 0,
        swa_full=config.swa_full,
        n_outputs=_n_outputs(config, model) if model.on_gpu else 0,
        **settings,
    )


def _n_outputs(config: EngineConfig, model: Model) -> int:
    """Rows of logits for which a GPU reserves memory, in place of a row for each token of a ubatch: those of a step,
    and what little memory holds for scored prompts."""
    of_step = config.n_parallel * (1 + config.draft_max * may_draft(config, model))
    return max(of_step, (64 << 20) // (4 * model.vocab.n_tokens))  # 64 MiB of logits


def _min_rows(context: Context) -> int:
    """The minimum rows of a ubatch for the same bits in any batch. Raises `ModelError` if no number suffices."""
    name = context.model.path.name
    if context.model.on_gpu:
        raise ModelError(
            f"{setting_name('deterministic')} works on a CPU only; set {setting_name('n_gpu_layers')} to 0, or leave "
            "it out"
        )
    if context.model.is_recurrent:
        raise ModelError(
            f"{setting_name('deterministic')}: {name} has a recurrent state, whose results depend on the batch; leave "
            "it out"
        )
    found = least_rows_for_equal_bits(context)
    if found is None:
        raise ModelError(
            f"{setting_name('deterministic')}: the logits of {name} depend on the number of rows in a batch, as with "
            "Q4_K and Q2_K. Use a file with another type: `cppbatch models requantize FILE --type Q8_0 --lossy`"
        )
    return found


def _fill_in(vocab: Vocab) -> FillIn | None:
    if vocab.fill_in is None:
        return None
    prefix, suffix, middle = map(vocab.text, vocab.fill_in)
    repository, file = map(vocab.text, vocab.fill_in_files)
    return FillIn(prefix=prefix, suffix=suffix, middle=middle, repository=repository, file=file)


def _on_gpu(config: EngineConfig) -> bool:
    """`Model.on_gpu`, for what is decided before the model is loaded."""
    return Backend.get().offloads(config.n_gpu_layers, config.rpc)


def _pooling(config: EngineConfig, model: Model) -> Pooling | None:
    """The engine's pooling; None: it generates text. Raises `ModelError` for models that support neither."""
    name = f"{model.path} ({model.description})"
    if not model.is_one_stack:
        raise ModelError(f"{name} is an encoder-decoder or diffusion model, which is not supported. Use another model")
    pooling = config.pooling or model.pooling
    if pooling is None and not model.can_generate:
        raise ModelError(
            f"{name} is an embedding model, but its file does not specify the pooling. Check the model card and set "
            f"{setting_name('pooling')} to mean, cls or last, or to none for one vector per token"
        )
    if pooling and not model.can_embed:
        raise ModelError(
            f"{name} can only generate text: llama.cpp returns no vectors for it; leave out {setting_name('pooling')}"
        )
    if pooling == "rank" and not model.can_rank:
        raise ModelError(
            f"{name} has no classification head, so it is not a reranker. Use another {setting_name('pooling')}, or "
            "another model"
        )
    return pooling


def _pooling_context(config: EngineConfig, model: Model, pooling: Pooling) -> Context:
    """A context with cells for one step, because no sequence keeps its cells longer.

    llama.cpp reserves the same number of tokens per sequence, and aborts if the step is not a multiple of that.
    """
    step = min(config.n_batch, config.n_ctx)
    step -= step % config.n_parallel
    return Context(
        model,
        n_ctx=step,
        n_batch=step,
        n_seq_max=config.n_parallel,
        n_threads=config.n_threads or available_threads(),
        flash_attn=choose_flash_attn(config, "unified", on_gpu=model.on_gpu, has_amx=Backend.get().has_amx),
        type_k=config.cache_type_k,
        type_v=config.cache_type_v,
        pooling=pooling,
    )


def _layout(context: Context) -> KvLayout:
    return "unified" if context.kv_unified else "per-sequence"


def _info(
    model: Model, context: Context, config: EngineConfig, pooling: Pooling | None = None, *, min_rows: int = 1
) -> ModelInfo:
    is_switching = switches(config, model)
    n_ctx = unified_cells(config) if is_switching else context.n_ctx
    longest = context.n_batch if pooling else n_ctx if is_switching else context.n_ctx_seq
    return ModelInfo(
        name=model.path.stem,
        path=str(model.path),
        description=model.description,
        size_bytes=model.size_bytes,
        n_params=model.n_params,
        n_vocab=model.vocab.n_tokens,
        n_ctx=n_ctx,
        kv_layout="auto" if is_switching else _layout(context),
        not_repacked=None if model.repack else _why_not_repacked(config),
        on_gpu=model.on_gpu,
        sampling="backend" if context.backend_sampling else "host",
        n_ctx_train=model.n_ctx_train,
        max_sequence=min(
            min(longest, model.n_ctx_train) - max(0, min_rows - 2),  # padding rows take the cells after it
            config.n_ctx_seq or longest,
        ),
        bos=model.vocab.text(model.vocab.bos),
        eos=model.vocab.text(model.vocab.eos),
        end_tokens=tuple(sorted(model.vocab.eog)),
        control_tokens=model.vocab.control_texts,
        chat_template=model.chat_template,
        fill_in=_fill_in(model.vocab),
        pooling=pooling,
        n_embd=model.n_scores if pooling == "rank" else model.n_embd,
        rerank_template=model.rerank_template,
        labels=model.labels if pooling == "rank" else [],
        changes=config.model_changes,
        adapters=_adapter_infos(config.lora),
        control_vectors=_adapter_infos(config.control_vectors),
    )


def _adapter_infos(files: Iterable[tuple[str, float]]) -> tuple[AdapterInfo, ...]:
    return tuple(AdapterInfo(name=adapter_name(path), path=path, scale=scale) for path, scale in files)
