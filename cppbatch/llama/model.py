"""A loaded GGUF model."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from cppbatch.config import LazyMode, LoadMode, Numa, Pooling, SplitMode
from cppbatch.errors import LlamaError, ModelError
from cppbatch.interrupts import interrupts_deferred
from cppbatch.llama.backend import Backend
from cppbatch.llama.batch_parts import ALL_ROWS
from cppbatch.llama.control_vector import Directions, read_control_vector
from cppbatch.llama.library import C
from cppbatch.llama.lora import load_adapter
from cppbatch.llama.owned import Owned
from cppbatch.llama.placement import ModelDevices, check_gpu, set_no_alloc
from cppbatch.llama.sequence_state import SNAPSHOTS
from cppbatch.llama.vocab import Vocab
from cppbatch.model_changes import Override, parse_override
from cppbatch.models.check import check_model
from cppbatch.models.file_header import read_header

Progress = Callable[[float], bool]

_LAYERS_WITH_WINDOWS = {"exaone4": 64}  # with any other number of layers, llama.cpp ignores the window in the file
_LOAD_MODES: tuple[LoadMode, ...] = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")  # llama_load_mode + 1
_LAZY_MODES: tuple[LazyMode, ...] = ("off", "auto", "on")  # llama_lazy_mode
_SPLIT_MODES: tuple[SplitMode, ...] = ("none", "layer", "row", "tensor")  # llama_split_mode
_MROPE_TYPES = {8, 40}  # llama_rope_type: MROPE, IMROPE
_POOLING: dict[str, Pooling] = {"1": "mean", "2": "cls", "3": "last", "4": "rank"}  # llama_pooling_type in metadata


class _Closeable(Protocol):
    def close(self) -> None: ...


class Model:
    """A loaded GGUF model: weights, vocabulary, metadata. A context manager; `close` frees its contexts first."""

    control_vector_layers: tuple[int, ...] = ()
    """The first and the last layer that control vectors apply to; (): all."""
    on_gpu: bool
    """Whether layers run on a GPU. RPC workers count as GPUs: there, too, rows are cheap relative to ubatches."""

    def __init__(
        self,
        path: str | Path,
        *,
        n_gpu_layers: int = -1,
        device: int | None = None,
        repack: bool = True,
        rpc: Sequence[str] = (),
        tensor_split: Sequence[float] = (),
        devices: Sequence[str] = (),
        split_mode: SplitMode = "layer",
        main_gpu: int = 0,
        overrides: Sequence[tuple[str, str]] = (),
        no_host: bool = False,
        load_mode: LoadMode = "auto",
        lazy_mode: LazyMode = "auto",
        numa: Numa = "off",
        progress: Progress | None = None,
        no_alloc: bool = False,
        load_head: bool = False,
        kv_overrides: Sequence[str] = (),
        check_tensors: bool = False,
    ) -> None:
        """Loads `path`.

        `n_gpu_layers`: layers on the GPU, below 0 for all. `device`: the number of the only GPU to use, None for all.
        `rpc`: addresses of RPC workers. Their devices come before this machine's GPUs. `devices`: names of those to
        use; (): all. `tensor_split`: the share of layers for each of these devices; (): in proportion to free memory.
        `overrides`: the places of tensors, pairs of a regular expression for names and a buffer type. `split_mode`,
        `main_gpu`, `load_mode`, `lazy_mode`, `no_host`, `numa`: the settings of `EngineConfig`.
        `repack`: llama.cpp may repack weights for this CPU (its `use_extra_bufts`). `progress` is called with 0.0 to
        1.0 while loading; loading stops when it returns False.
        `no_alloc`: llama.cpp plans the model and its contexts and logs the sizes of all buffers, but only allocates
        recurrent states; nothing can be decoded. The log is needed because llama.cpp's function for these sizes,
        `llama_get_memory_breakdown`, returns a C++ map, which ctypes cannot read.
        `load_head`: also loads the draft head (MTP) in the file, which must have one.
        `kv_overrides`: values in place of those in the file's metadata. `check_tensors`: refuses
        weights that are not numbers.
        Raises `ModelError` with llama.cpp's reason if the file cannot be loaded, `OutOfMemory`, and as `ModelDevices`.
        """
        self.path, self.repack = Path(path), repack
        """Whether llama.cpp may have repacked weights."""
        self._owned: Owned | None = None
        self.context_params: dict[str, Any] = {}
        """Fields of `llama_context_params` for every new context, for example those of RoPE."""
        self.adapters: list[Any] = []
        """llama.cpp's pointers to the LoRA adapters; `Context.use_adapters` takes indices into this list."""
        self.control_vectors: list[Directions] = []
        """For `Context.use_adapters`, their indices follow those of the LoRA adapters."""
        self._overrides = [parse_override(each) for each in kv_overrides]
        self._contexts: weakref.WeakSet[_Closeable] = weakref.WeakSet()
        if not self.path.is_file():
            raise ModelError(f"model file not found: {self.path}")
        params = C.llama_model_default_params()
        params.n_gpu_layers, params.use_extra_bufts, params.load_mtp = n_gpu_layers, repack, load_head
        self.has_head = load_head
        """Whether the draft head of the file is loaded (`HeadContext`)."""
        params.split_mode, params.main_gpu = _SPLIT_MODES.index(split_mode), main_gpu
        params.no_host, params.check_tensors = no_host, check_tensors
        params.kv_overrides = _override_array(self._overrides)
        params.load_mode, params.lazy_mode = _LOAD_MODES.index(load_mode) - 1, _LAZY_MODES.index(lazy_mode)
        if device is not None:
            check_gpu(device)
            params.split_mode, params.main_gpu = C.LLAMA_SPLIT_MODE_NONE, device
        check_model(self.path)
        self.no_alloc, self.on_gpu = no_alloc, Backend.get().offloads(n_gpu_layers, rpc)
        self._devices = ModelDevices(rpc, devices, tensor_split, overrides)
        self._devices.set_in(params)
        if no_alloc:
            set_no_alloc(params, on_cpu=not rpc and not Backend.get().supports_gpu)
        try:
            Backend.get().use_numa(numa)
            with interrupts_deferred() as interrupted, Backend.get().errors() as lines:
                reporter = _Reporter(progress, interrupted)
                params.progress_callback = reporter.callback
                if handle := C.llama_model_load_from_file(os.fsencode(self.path), params):
                    self._owned = Owned(handle, _free, self._devices)
        except KeyboardInterrupt:
            self.close()
            self._devices.close()
            raise
        if not self._owned:
            error = Backend.get().failure(ModelError(f"{self.path} cannot be loaded: {_reason(lines)}"), lines)
            self._devices.close()
            if reporter.error:
                raise reporter.error
            if reporter.stopped:
                raise ModelError(f"loading {self.path.name} was stopped")
            raise error

    @property
    def handle(self) -> Any:
        """llama.cpp's pointer. Raises `LlamaError` when the model is closed."""
        return self.owned.pointer

    @property
    def owned(self) -> Owned:
        """The model itself, for objects that need it as long as they live. Raises as `handle`."""
        if self._owned is None or self._owned.pointer is None:
            raise LlamaError(f"the model {self.path.name} is closed")
        return self._owned

    def add_adapter(self, path: str | Path) -> None:
        """Loads a LoRA adapter. Must be called before a context is created, which reserves space for it in its graph.

        Raises `ModelError`, with llama.cpp's reason if it logs one.
        """
        n_experts = int(self._architecture_metadata("expert_count") or 0)
        self.adapters.append(load_adapter(Path(path), self.handle, self.path, n_experts))

    def add_control_vector(self, path: str | Path) -> None:
        """Loads a control vector. Must be called before a context is created. Raises `ModelError`."""
        n_embd = int(C.llama_model_n_embd(self.handle))
        self.control_vectors.append(read_control_vector(Path(path), n_embd=n_embd, n_layers=self.n_layers))

    def adopt(self, context: _Closeable) -> None:
        """Registers a context, to be closed before the model is freed."""
        self._contexts.add(context)

    @cached_property
    def vocab(self) -> Vocab:
        """The vocabulary. Raises `ModelError` if the file does not contain a tokenizer."""
        return Vocab(C.llama_model_get_vocab(self.handle), self.path, self.owned, self._overrides)

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The scalar metadata of the GGUF file with the overrides, values as text."""
        read = _read_string
        of_file = {
            read(C.llama_model_meta_key_by_index, self.handle, i): read(
                C.llama_model_meta_val_str_by_index, self.handle, i
            )
            for i in range(C.llama_model_meta_count(self.handle))
        }
        return of_file | {each.key: str(each.value).lower() for each in self._overrides if each.key in of_file}

    @cached_property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture: llama, qwen3moe ..."""
        return self.metadata.get("general.architecture", "")

    @property
    def chat_template(self) -> str | None:
        """The chat template of the GGUF file (Jinja), None if it contains none."""
        return self._template(None)

    @property
    def rerank_template(self) -> str | None:
        """The prompt of a reranker, with placeholders {query} and {document}; None if the file contains none."""
        return self._template(b"rerank")

    def _template(self, name: bytes | None) -> str | None:
        template = C.llama_model_chat_template(self.handle, name)
        return template.decode("utf-8", "replace") if template else None

    @property
    def description(self) -> str:
        """Architecture, number of weights, and their type, for example "llama 135M Q4_1"."""
        buffer = ctypes.create_string_buffer(256)
        C.llama_model_desc(self.handle, buffer, len(buffer))
        architecture, _, kind = buffer.value.decode("utf-8", "replace").split(" ", 2)  # size: guessed from the layers
        n = self.n_params
        size = f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.0f}M" if n >= 1e6 else f"{n / 1e3:.0f}K"
        return f"{architecture} {size} {kind}"

    @property
    def size_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return int(C.llama_model_size(self.handle))

    @property
    def n_params(self) -> int:
        """Number of weights."""
        return int(C.llama_model_n_params(self.handle))

    @property
    def n_heads(self) -> int:
        """Attention heads of a layer (of the first one that has any)."""
        return int(C.llama_model_n_head(self.handle))

    @property
    def n_layers(self) -> int:
        """Number of layers, without the output layer (which -ngl counts too)."""
        return int(C.llama_model_n_layer(self.handle))

    @property
    def n_ctx_train(self) -> int:
        """The longest sequence the model was trained for, in tokens."""
        return int(C.llama_model_n_ctx_train(self.handle))

    @property
    def n_swa(self) -> int:
        """Size of the sliding attention window in tokens; 0 if there is none."""
        if _LAYERS_WITH_WINDOWS.get(self.architecture, self.n_layers) != self.n_layers:
            return 0
        return int(C.llama_model_n_swa(self.handle))

    @property
    def n_dimensions(self) -> int:
        """Positions per vector in a batch: 4 with M-RoPE (Qwen2-VL and later), where an image has rows and columns;
        else 1, as for text tokens."""
        return 4 if C.llama_model_rope_type(self.handle) in _MROPE_TYPES else 1

    @property
    def is_recurrent(self) -> bool:
        """Whether the model has a recurrent state, instead of a KV cache or (hybrid) in addition to it."""
        return bool(C.llama_model_is_recurrent(self.handle) or C.llama_model_is_hybrid(self.handle))

    @property
    def has_cells(self) -> bool:
        """Whether attention has cells, with or without recurrent states."""
        return not C.llama_model_is_recurrent(self.handle)

    @property
    def can_sample_on_device(self) -> bool:
        """Whether top-k on the device gives each sequence its own candidates.

        Not with a recurrent state. One token of it takes another graph than several do, so a graph is planned with the
        sequences that have a row in some batch; in a later one llama.cpp writes ids over those of other sequences
        (`BackendSampling`). Nor where its graph computes rows that were not requested.
        """
        return not self.is_recurrent and self.architecture not in ALL_ROWS

    @property
    def most_snapshots(self) -> int:
        """The maximum number of tokens by which a recurrent state can be rolled back (`n_rollback` of `Context`)."""
        return SNAPSHOTS.get(self.architecture, 0) if self.is_recurrent else 0

    @property
    def is_one_stack(self) -> bool:
        """Whether one forward pass over a text is enough: not an encoder-decoder (T5) and not a diffusion model."""
        handle = self.handle
        one = C.llama_model_has_decoder(handle) and not C.llama_model_has_encoder(handle)
        return bool(one and not C.llama_model_is_diffusion(handle))

    @property
    def can_generate(self) -> bool:
        """Whether it generates text: the file does not specify pooling, and attention is causal."""
        is_causal = self._architecture_metadata("attention.causal") in (None, "true")
        return self.is_one_stack and self.pooling is None and is_causal

    @property
    def can_embed(self) -> bool:
        """Whether llama.cpp can return embeddings. For some models with hyper-connections it reads too much and
        aborts."""
        return self.architecture not in ("deepseek4", "qwen4exp")  # n_embd_out is the size of the MTP head's input

    @property
    def pooling(self) -> Pooling | None:
        """How a sequence becomes one vector, according to the file; None if the file does not specify pooling."""
        return _POOLING.get(self._architecture_metadata("pooling_type") or "")

    @property
    def can_rank(self) -> bool:
        """Whether it has the classification head of a reranker. Rereads the header of the file."""
        if self.metadata.get("split.count", "1") not in ("0", "1"):
            return True  # a split model: the file that contains the head is unknown, and split rerankers are rare
        names = {tensor.name for tensor in read_header(self.path).tensors}
        return not names.isdisjoint({"cls.weight", "cls.output.weight"})

    @property
    def rope_depends_on_context(self) -> bool:
        """Whether longer contexts may use different RoPE factors (LongRoPE, as in Phi-3)."""
        return self._architecture_metadata("rope.scaling.original_context_length") is not None

    @property
    def n_draft_heads(self) -> int:
        """Draft heads in the file."""
        return int(C.llama_model_n_layer_nextn(self.handle))

    @property
    def n_embd(self) -> int:
        """Length of an embedding vector."""
        return int(C.llama_model_n_embd_out(self.handle))

    @cached_property
    def n_embd_inp(self) -> int:
        """Length of an input vector that replaces a token (`EmbeddingBatch`)."""
        return int(C.llama_model_n_embd_inp(self.handle))

    @property
    def n_scores(self) -> int:
        """Number of outputs of the classification head, if there is one."""
        return int(C.llama_model_n_cls_out(self.handle))

    @property
    def labels(self) -> list[str]:
        """The labels of these outputs; empty if the file contains none."""
        found = [C.llama_model_cls_label(self.handle, i) for i in range(self.n_scores)]
        return [label.decode("utf-8", "replace") for label in found if label]

    def _architecture_metadata(self, key: str) -> str | None:
        """The metadata value of a key that starts with the architecture, for example "llama.context_length"."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def close(self) -> None:
        """Frees the model's contexts, then the model. A second call does nothing."""
        if self._owned is None or self._owned.pointer is None:
            return
        for context in list(self._contexts):
            context.close()
        if "vocab" in self.__dict__:  # the cached property was used
            self.vocab.close()
        self._owned.close()  # also frees the adapters
        self.adapters = []
        self._devices.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def _free(handle: Any) -> None:
    C.llama_model_free(handle)
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)  # glibc keeps 10 MB of it for each thread that has loaded a model


_DAMAGED = ("corrupted or incomplete", "failed to read", "exceeds remaining file size")  # in llama.cpp's reasons


class _Reporter:
    """Adapts a Python progress function to llama.cpp's callback.

    An exception in the function cannot pass through C: it stops loading and is raised afterwards. So does Ctrl-C
    (`interrupted` returns True), which would be lost in the callback.
    """

    def __init__(self, progress: Progress | None, interrupted: Callable[[], bool]) -> None:
        self._progress = progress
        self._interrupted = interrupted
        self.stopped = False
        self.error: BaseException | None = None
        self.callback = C.llama_progress_callback(self._report)

    def _report(self, fraction: float, _user: object) -> bool:
        try:
            self.stopped = self._progress is not None and self._progress(fraction) is False
        except BaseException as error:
            self.error = error
        return not (self.stopped or self.error or self._interrupted())


def _reason(lines: list[str]) -> str:
    """llama.cpp's first error line, without the name of the C++ function: the others are consequences of it."""
    if not lines:
        return "llama.cpp gave no reason"
    first = lines[0].split(": ", 1)[-1] if lines[0].split(": ", 1)[0].isidentifier() else lines[0]
    reason = first.removeprefix("error loading model: ")
    return f"{reason}. Download it again" if any(each in reason for each in _DAMAGED) else reason


def _read_string(function: Any, *args: Any) -> str:
    """Calls a llama.cpp function that fills a buffer and returns the length of the whole string."""
    size = 256
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = function(*args, buffer, size)
        if n < size:
            return buffer.value.decode("utf-8", "replace")
        size = n + 1


def _override_array(overrides: Sequence[Override]) -> Any:
    """llama.cpp's `kv_overrides`, which end with an empty key; None: no overrides."""
    if not overrides:
        return None
    array = (C.llama_model_kv_override * (len(overrides) + 1))()
    for entry, (key, value) in zip(array, overrides, strict=False):
        entry.key = key.encode()
        if isinstance(value, bool):
            entry.tag, entry.value.val_bool = C.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
        elif isinstance(value, int):
            entry.tag, entry.value.val_i64 = C.LLAMA_KV_OVERRIDE_TYPE_INT, value
        elif isinstance(value, float):
            entry.tag, entry.value.val_f64 = C.LLAMA_KV_OVERRIDE_TYPE_FLOAT, value
        else:
            entry.tag, entry.value.val_str = C.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode()
    return array
