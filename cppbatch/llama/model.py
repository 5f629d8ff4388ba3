"""A GGUF model in memory."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cppbatch.config import Pooling
from cppbatch.errors import LlamaError, ModelError
from cppbatch.llama.backend import Backend
from cppbatch.llama.gguf_header import check_metadata, has_tensor
from cppbatch.llama.library import C
from cppbatch.llama.lora import load_adapter
from cppbatch.llama.simulation import simulate
from cppbatch.llama.vocab import Vocab

if TYPE_CHECKING:
    from cppbatch.llama.context import Context

Progress = Callable[[float], bool]

_POOLING: dict[str, Pooling] = {"1": "mean", "2": "cls", "3": "last", "4": "rank"}  # llama_pooling_type in metadata


def _check_device(device: int) -> None:
    """llama.cpp would take the CPU without a word."""
    gpus = [gpu.name for gpu in Backend.get().devices() if "GPU" in gpu.kind]
    if device >= len(gpus):
        raise ModelError(f"there is no GPU {device}: llama.cpp sees {', '.join(gpus) or 'none'} here (--devices)")


class Model:
    """A loaded GGUF model: weights, vocabulary, metadata. A context manager; `close` frees its contexts first."""

    def __init__(
        self,
        path: str | Path,
        *,
        n_gpu_layers: int = -1,
        device: int | None = None,
        use_extra_bufts: bool = True,
        progress: Progress | None = None,
        simulated: bool = False,
    ) -> None:
        """Loads `path`.

        `n_gpu_layers`: layers kept on the GPU, -1 for all. `device`: the one GPU to use, None for all.
        `use_extra_bufts`: let llama.cpp repack weights for this CPU. `progress` is called with 0.0 to 1.0 while
        loading; loading stops when it returns False.
        `simulated`: no weights are loaded, and contexts get no cells and nothing to compute in (only recurrent states
        are real), but llama.cpp logs what each would take: `cppbatch.llama.simulation`.
        Raises `ModelError` with llama.cpp's own reason when the file cannot be loaded.
        """
        self.path = Path(path)
        self._handle: Any = None
        self.adapters: list[Any] = []
        """llama.cpp's pointers to its LoRA adapters; `Context.use_adapters` names them by their place here."""
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        if not self.path.is_file():
            raise ModelError(f"there is no model file at {self.path}")
        params = C.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.use_extra_bufts = use_extra_bufts
        self.is_simulated = simulated
        if simulated:
            simulate(params)
        if device is not None:
            _check_device(device)
            params.split_mode, params.main_gpu = C.LLAMA_SPLIT_MODE_NONE, device
        with Backend.get().errors():  # of a file that is none: loading it says the same
            check_metadata(self.path)
        reporter = _Reporter(progress)
        params.progress_callback = reporter.callback
        with Backend.get().errors() as lines:
            self._handle = C.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self._handle:
            self._handle = None
            if reporter.error:
                raise reporter.error
            if reporter.stopped:
                raise ModelError(f"loading {self.path.name} was stopped")
            raise ModelError(f"{self.path} cannot be loaded: {_reason(lines)}")

    @property
    def handle(self) -> Any:
        """llama.cpp's pointer. Raises `LlamaError` when the model is closed."""
        if self._handle is None:
            raise LlamaError(f"the model {self.path.name} is closed")
        return self._handle

    def add_adapter(self, path: str | Path) -> None:
        """Loads a LoRA adapter, before any context is made: that leaves room for it in its graph.

        Raises `ModelError`, with llama.cpp's own reason where it has one.
        """
        self.adapters.append(load_adapter(self, Path(path)))

    def adopt(self, context: Context) -> None:
        """Notes a context that must be freed before this model is."""
        self._contexts.add(context)

    @cached_property
    def vocab(self) -> Vocab:
        """The vocabulary. Raises `ModelError` when the file has no tokenizer."""
        return Vocab(C.llama_model_get_vocab(self.handle), self.path.name)

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The GGUF's scalar metadata, as text."""
        read = _read_string
        return {
            read(C.llama_model_meta_key_by_index, self.handle, i): read(
                C.llama_model_meta_val_str_by_index, self.handle, i
            )
            for i in range(C.llama_model_meta_count(self.handle))
        }

    @property
    def chat_template(self) -> str | None:
        """The GGUF's chat template (Jinja), None if it has none."""
        return self._template(None)

    @property
    def rerank_template(self) -> str | None:
        """How it wants a query and a document, with {query} and {document} in their places; None: it does not say."""
        return self._template(b"rerank")

    def _template(self, name: bytes | None) -> str | None:
        template = C.llama_model_chat_template(self.handle, name)
        return template.decode("utf-8", "replace") if template else None

    @property
    def description(self) -> str:
        """Architecture, size and quantisation in a few words, like "llama 134.52M Q4_1"."""
        buffer = ctypes.create_string_buffer(256)
        C.llama_model_desc(self.handle, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return int(C.llama_model_size(self.handle))

    @property
    def n_params(self) -> int:
        """Number of weights."""
        return int(C.llama_model_n_params(self.handle))

    @property
    def n_layers(self) -> int:
        """Layers, as -ngl counts them but for the output."""
        return int(C.llama_model_n_layer(self.handle))

    @property
    def n_ctx_train(self) -> int:
        """Longest sequence the model was trained for, in tokens."""
        return int(C.llama_model_n_ctx_train(self.handle))

    @property
    def n_swa(self) -> int:
        """Sliding attention window in tokens; 0 if the model has none."""
        return int(C.llama_model_n_swa(self.handle))

    @property
    def is_recurrent(self) -> bool:
        """Whether the model keeps a state in place of, or (hybrid) beside, a KV cache."""
        return bool(C.llama_model_is_recurrent(self.handle) or C.llama_model_is_hybrid(self.handle))

    @property
    def is_one_stack(self) -> bool:
        """Whether one pass over a text is all there is to it: not an encoder-decoder, a T5 or a diffusion model."""
        handle = self.handle
        one = C.llama_model_has_decoder(handle) and not C.llama_model_has_encoder(handle)
        return bool(one and not C.llama_model_is_diffusion(handle))

    @property
    def can_generate(self) -> bool:
        """Whether it continues text: its file asks for no pooling, and a token sees only those before it."""
        return self.is_one_stack and self.pooling is None and self._of_its_kind("attention.causal") in (None, "true")

    @property
    def pooling(self) -> Pooling | None:
        """How its file says that a sequence becomes one vector; None: it does not."""
        return _POOLING.get(self._of_its_kind("pooling_type") or "")

    @property
    def can_rank(self) -> bool:
        """Whether it has a reranker's classification head. Reads the file's header again."""
        if self.metadata.get("split.count", "1") not in ("0", "1"):
            return True  # in which part it would be is not known; nobody has split a reranker yet
        return has_tensor(self.path, "cls.weight", "cls.output.weight")

    @property
    def n_embd(self) -> int:
        """Numbers in one of its vectors."""
        return int(C.llama_model_n_embd_out(self.handle))

    @property
    def n_scores(self) -> int:
        """Numbers that its classification head gives, if it has one."""
        return int(C.llama_model_n_cls_out(self.handle))

    @property
    def labels(self) -> list[str]:
        """What these numbers mean; empty if its file does not say."""
        found = [C.llama_model_cls_label(self.handle, i) for i in range(self.n_scores)]
        return [label.decode("utf-8", "replace") for label in found if label]

    def _of_its_kind(self, key: str) -> str | None:
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}")

    def close(self) -> None:
        """Frees the model's contexts, then the model. Closing again does nothing."""
        if self._handle is None:
            return
        for context in list(self._contexts):
            context.close()
        if "vocab" in self.__dict__:  # made by the cached property
            self.vocab.close()
        C.llama_model_free(self._handle)  # its adapters too
        self.adapters = []
        self._handle = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class _Reporter:
    """Adapts a Python progress function to llama.cpp's callback.

    An exception in there (Ctrl-C, most likely) cannot pass through C: it stops the load and is raised afterwards.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self.stopped = False
        self.error: BaseException | None = None
        self.callback = C.llama_progress_callback(self._report)

    def _report(self, fraction: float, _user: object) -> bool:
        try:
            self.stopped = self._progress is not None and self._progress(fraction) is False
        except BaseException as error:
            self.error = error
        return not self.stopped and self.error is None


def _reason(lines: list[str]) -> str:
    """The telling part of llama.cpp's error lines: the first one, without the name of the C++ function."""
    if not lines:
        return "llama.cpp gives no reason"
    first = lines[0].split(": ", 1)[-1] if lines[0].split(": ", 1)[0].isidentifier() else lines[0]
    reason = first.removeprefix("error loading model: ")
    return f"{reason}. Download it again" if "corrupted or incomplete" in reason else reason


def _read_string(function: Any, *args: Any) -> str:
    """Calls a llama.cpp function that fills a buffer and returns the length it would need."""
    room = 256
    while True:
        buffer = ctypes.create_string_buffer(room)
        n = function(*args, buffer, room)
        if n < room:
            return buffer.value.decode("utf-8", "replace")
        room = n + 1
