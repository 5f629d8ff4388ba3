"""`Llama`: llama-cpp-python's class, with calls as requests of one engine."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import llama_cpp
import msgspec
import numpy as np
import numpy.typing as npt
from llama_cpp import _internals as internals
from llama_cpp import llama_chat_format

from cppbatch.config import EngineConfig, cells_for
from cppbatch.engine.embeddings import normalise_vectors, vector_of
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.offline import run
from cppbatch.engine.params import SamplingParams, replace_fields
from cppbatch.engine.request import GenerationRequest, Prompt
from cppbatch.engine.runtime import load_model, open_runtime
from cppbatch.errors import EngineClosed, GenerationFailed
from cppbatch.llama import Model
from cppbatch.llama_cpp_python.arguments import (
    POOLING,
    Callbacks,
    context_params,
    engine_settings,
    sampling_params,
)
from cppbatch.llama_cpp_python.chat_handler import TemplateHandler
from cppbatch.llama_cpp_python.completions import Completion, Kept
from cppbatch.models.hub import HubModel, pull_model
from cppbatch.unclosed import close_at_exit

if TYPE_CHECKING:
    from typing_extensions import Self

Json = dict[str, Any]
Function = TypeVar("Function", bound=Callable[..., Any])

_ORIGINAL: Any = llama_cpp.Llama  # saved, because `patch` rebinds this name
_SIGNATURE = inspect.signature(_ORIGINAL.__init__)
_GENERATE = inspect.signature(_ORIGINAL.generate)
_COMPLETE = inspect.signature(_ORIGINAL._create_completion)


def _as_in(original: Any) -> Callable[[Function], Function]:
    """Gives a method the signature of the corresponding original method, for `inspect` and `help`."""

    def with_signature(function: Function) -> Function:
        function.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        return function

    return with_signature


class Llama(_ORIGINAL):  # type: ignore[misc]  # mypy does not follow imports of llama_cpp
    """llama-cpp-python's `Llama` with batching: calls from any number of threads are computed together.

    from cppbatch import Llama

    llm = Llama("model.gguf", n_ctx=8192)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda text: llm(text, max_tokens=64), texts))

    The constructor's arguments, the methods and the results are those of the pinned llama_cpp.Llama, except for the
    differences listed in docs/llama-cpp-python.md. The constructor also accepts fields of `EngineConfig`, such as
    `n_parallel=32`.

    Low-level members (`eval`, `sample`, `scores`, `ctx` ...) use a separate context with the engine's weights. It is
    created on first use, and only one thread may use it, as with the original.
    """

    @_as_in(_ORIGINAL.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Loads a GGUF file. Arguments: those of llama_cpp.Llama, and fields of `EngineConfig`.

        Raises `ValueError` if the file does not exist; `ConfigError`, `ModelError`, `LibraryError`, `LlamaError`.
        """
        self._stack = contextlib.ExitStack()
        self._is_closed = False
        self._lock = threading.Lock()
        self._engines: dict[bool, BatchInferenceEngine] = {}
        bound = _SIGNATURE.bind(self, *args, **kwargs)
        given = self._given = {name: value for name, value in bound.arguments.items() if name != "self"}
        bound.apply_defaults()
        values: Json = {name: value for name, value in bound.arguments.items() if name != "self"}  # no cycle
        path = values["model_path"] = os.fspath(values["model_path"])
        if not os.path.exists(path):
            raise ValueError(f"Model path does not exist: {path}")
        self._set_attributes(values)
        if values["vocab_only"]:
            self._load_vocabulary()
        else:
            self._load(given)
        self.tokenizer_ = values["tokenizer"] or llama_cpp.LlamaTokenizer(self)
        self._n_vocab, self._token_nl, self._token_eos = self.n_vocab(), self.token_nl(), self.token_eos()
        self.metadata: dict[str, str] = self._model.metadata()
        self._is_recurrent = llama_cpp.llama_model_is_recurrent(self.model)
        self._is_hybrid = llama_cpp.llama_model_is_hybrid(self.model)
        self._choose_chat_format()

    def _set_attributes(self, values: Json) -> None:
        """Sets the attributes that the original derives from its arguments and from an empty low-level state."""
        names = (
            "model_path", "verbose", "numa", "tensor_split", "kv_overrides", "last_n_tokens_size", "lora_base",
            "lora_scale", "lora_path", "spm_infill", "draft_model",
        )  # fmt: skip
        self.__dict__.update({name: values[name] for name in names})
        self.chat_format: str | None = values["chat_format"]
        self.chat_handler: Any = values["chat_handler"]
        self._values = values
        self._seed: int = values["seed"] or llama_cpp.LLAMA_DEFAULT_SEED
        self._logits_all: bool = values["logits_all"] or values["draft_model"] is not None
        self.n_threads: int = values["n_threads"] or max((os.cpu_count() or 1) // 2, 1)
        self.n_threads_batch: int = values["n_threads_batch"] or os.cpu_count() or 1
        self.cache: Any = None
        self._sampler: Any = None
        self.n_tokens, self._requires_eval = 0, True

    def _load(self, given: Json) -> None:
        settings = engine_settings(given)
        n_ctx: int = self._values["n_ctx"]
        config = EngineConfig(self.model_path, **settings)
        model = load_model(config)
        close_at_exit(self)
        self._stack.callback(model.close)
        model.context_params = context_params(given)
        n_ctx = min(n_ctx or model.n_ctx_train, model.n_ctx_train)
        self._n_ctx, self.n_batch = n_ctx, min(n_ctx, self._values["n_batch"])
        # 4096 cells if requests are short: the default number would take much longer to load
        cells = max(n_ctx, given.get("kwargs", {}).get("kv_cells") or cells_for(n_ctx, config.n_parallel, 4096))
        self._config = EngineConfig(self.model_path, **settings | {"n_ctx": max(cells, config.n_parallel)})
        self._engine_model = model
        self._model = _Borrowed(model, verbose=self.verbose)
        self._stack.callback(self._model.close)  # the low-level context, if there is one
        self._engine(embeds=self._values["embedding"])

    def _load_vocabulary(self) -> None:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        model = internals.LlamaModel(path_model=self.model_path, params=params, verbose=self.verbose)
        self._model = self._stack.enter_context(contextlib.closing(model))
        self._n_ctx = self._values["n_ctx"] or model.n_ctx_train()
        self.n_batch = min(self._n_ctx, self._values["n_batch"])

    def _engine(self, *, embeds: bool) -> BatchInferenceEngine:
        """The engine for text or for embeddings. Each is created on first use; both use the same weights."""
        with self._lock:
            if self._is_closed:
                raise _closed_error()
            if embeds in self._engines:
                return self._engines[embeds]
            if self._values["vocab_only"]:
                raise RuntimeError("only the vocabulary is loaded: omit vocab_only to generate text or embeddings")
            config = self._config
            if embeds:
                pooling = POOLING.get(self._values["pooling_type"], self._engine_model.pooling or "none")
                sizes = {"n_batch": self.n_batch, "n_parallel": min(config.n_parallel, self.n_batch)}
                off = {"lora": (), "mmproj": "", "spec": "off"}
                config = msgspec.structs.replace(config, pooling=pooling, **sizes, **off)
            engine = BatchInferenceEngine(config, runtime=open_runtime(config, self._engine_model))
            self._stack.callback(engine.close)
            self._engines[embeds] = engine
            return engine

    @property
    def engine(self) -> BatchInferenceEngine:
        """The engine for text, with its `stats()` and methods."""
        return self._engine(embeds=False)

    def _choose_chat_format(self) -> None:
        """Chooses as the original does: a format by name, the templates of the file, or "llama-2".

        If the caller did not choose one, the model's own template is used for tools, response formats and images.
        """
        handlers: dict[str, Any] = {}
        self._chat_handlers = handlers
        for key, template in self.metadata.items():
            if key.startswith("tokenizer.chat_template."):
                handlers[key.removeprefix("tokenizer.")] = TemplateHandler(template)
        has_own = "tokenizer.chat_template" in self.metadata
        if has_own:
            handlers["chat_template.default"] = TemplateHandler(None)
        handler = self.chat_handler
        if hasattr(handler, "clip_model_path"):  # its file is loaded as the engine's mmproj
            self.chat_handler = TemplateHandler(getattr(handler, "CHAT_FORMAT", None), images=handler)
        elif self.chat_format is None and handler is None:
            guessed = llama_chat_format.guess_chat_format_from_gguf_metadata(self.metadata)
            name = self.chat_format = guessed or ("chat_template.default" if has_own else "llama-2")
            if name not in handlers:
                handlers[name] = TemplateHandler(None, plain=llama_chat_format.get_chat_completion_handler(name))

    # --- completions --------------------------------------------------------------------------------------------

    @_as_in(_ORIGINAL._create_completion)
    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Json]:
        """Implements `create_completion` and `__call__`: one result, or its chunks with `stream`."""
        bound = _COMPLETE.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given: Json = {**bound.arguments}
        prompt, suffix = given["prompt"], given["suffix"]
        tokens = self._prompt_tokens(prompt, suffix)
        completion = Completion(self, given, tokens, after=suffix if suffix and not self._fill_in else "")
        params, callbacks = self.sampling(given)
        kept = self.start(tokens, completion.with_echo(params), callbacks)
        return completion.chunks(kept) if given["stream"] else iter((completion.whole(kept),))

    def sampling(self, given: Json) -> tuple[SamplingParams, Callbacks | None]:
        """The parameters of a request with these arguments, and its callbacks, which the parameters include."""
        seed = self._next_seed(given.get("seed"))
        callbacks = Callbacks.of(given)
        params = sampling_params(given, seed=seed, last_n=self.last_n_tokens_size)
        return replace_fields(params, logits_processor=callbacks), callbacks

    def _next_seed(self, seed: int | None) -> int:
        """The seed of a completion: the given one, or the next one of the object's own series, as in the original."""
        with self._lock:
            self._seed = random.Random(self._seed).randint(0, 2**32) if seed is None else seed
            return self._seed

    def start(self, prompt: Prompt, params: SamplingParams, callbacks: Callbacks | None) -> Kept:
        """The events of a request, which is queued when the iteration starts.

        Prompt and text together have at most `n_ctx` tokens. Raises `ValueError` for a longer prompt.
        """
        if isinstance(prompt, list):
            if (room := self._n_ctx - len(prompt)) <= 0:
                raise ValueError(f"Requested tokens ({len(prompt)}) exceed context window of {self._n_ctx}")
            params = replace_fields(params, max_tokens=min(params.max_tokens or room, room))
        engine = self.engine
        request = GenerationRequest(id=engine.new_request_id(), prompt=prompt, params=params, clamp_max_tokens=True)
        sequence = engine.prepare(request)
        return Kept(self, run(engine, [sequence]), callbacks, len(sequence.text_tokens(0)))

    @cached_property
    def _fill_in(self) -> tuple[int, int, int] | None:
        """The tokens before prefix, suffix and middle, for a model that supports fill-in-the-middle."""
        return self._engine_model.vocab.fill_in

    def _prompt_tokens(self, prompt: str | list[int], suffix: str | None) -> list[int]:
        """The tokens of a prompt. Text gets the special tokens that the model adds; with a suffix, the model's tokens
        for fill-in-the-middle."""
        if not isinstance(prompt, str):
            return list(prompt)
        tokens = self.tokenize(prompt.encode(), add_bos=False, special=suffix is None) if prompt else []
        if suffix and self._fill_in:
            before, after, middle = self._fill_in
            around = [before, *tokens], [after, *self.tokenize(suffix.encode(), add_bos=False, special=False)]
            tokens = [*around[1], *around[0], middle] if self.spm_infill else [*around[0], *around[1], middle]
        model = self._model
        start = [model.token_bos()] if model.add_bos_token() and model.token_bos() != -1 else []
        end = model.token_sep() if model.token_sep() != -1 else model.token_eos()
        return start + tokens + ([end] if model.add_eos_token() or model.token_sep() != -1 else [])

    @_as_in(_ORIGINAL.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """Yields the tokens that continue a prompt, including the end token.

        With `reset=False`, or after `eval`, it continues the low-level context, as the original does. In the original,
        sent tokens are drafts, which do not change the text; here they are ignored.
        """
        bound = _GENERATE.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given: Json = {**bound.arguments}
        if self.n_tokens or not given["reset"]:
            yield from super().generate(*args, **kwargs)
            return
        callbacks = Callbacks.of(given)
        params = sampling_params(
            given | {"temperature": given["temp"]}, seed=self._seed, last_n=self.last_n_tokens_size
        )
        kept = self.start(list(given["tokens"]), replace_fields(params, logits_processor=callbacks), callbacks)
        with contextlib.closing(kept):
            yield from kept.tokens(end=self._token_eos)

    # --- vectors ------------------------------------------------------------------------------------------------

    @_as_in(_ORIGINAL.embed)
    def embed(self, input: Any, normalize: bool = False, truncate: bool = True, return_count: bool = False) -> Any:
        """The vector of a text, or those of a list of texts; with pooling "none", the vectors of their tokens."""
        if not self._values["embedding"]:
            raise RuntimeError("Llama model must be created with embedding=True to call this method")
        engine = self._engine(embeds=True)
        texts = [input] if isinstance(input, str) else input
        most = engine.info.max_sequence
        lists = [self.tokenize(text.encode("utf-8")) for text in texts]
        lists = [tokens[:most] for tokens in lists] if truncate else lists
        if (longest := max(map(len, lists), default=0)) > most:
            raise ValueError(f"Requested tokens ({longest}) exceed batch size of {most}")
        ids = [engine.new_request_id() for _ in lists]
        requests = [
            GenerationRequest(id=each, prompt=tokens, task="embed") for each, tokens in zip(ids, lists, strict=True)
        ]
        vectors: dict[str, Any] = {}
        with contextlib.closing(run(engine, [engine.prepare(request) for request in requests])) as events:
            for event in events:
                if event.embedding is None:
                    raise GenerationFailed(f"a text has no embedding: {event.error or event.finish_reason}")
                found = vector_of(event.embedding)
                found = found.reshape(-1, engine.info.n_embd) if engine.info.pooling == "none" else found
                vectors[event.request_id] = (normalise_vectors(found) if normalize else found).tolist()
        data = [vectors[each] for each in ids]
        output = data[0] if isinstance(input, str) else data
        return (output, sum(map(len, lists))) if return_count else output

    def pooling_type(self) -> int:
        """llama.cpp's number for the pooling type."""
        if not self._values["embedding"]:
            return int(llama_cpp.LLAMA_POOLING_TYPE_NONE)
        pooling = self._engine(embeds=True).info.pooling
        return next(number for number, name in POOLING.items() if name == pooling)

    def close(self) -> None:
        """Frees the engine and the model. Later calls raise `EngineClosed`. Raises `RuntimeError` during a step."""
        for engine in self._engines.values():
            engine.access.check_outside()
        self._is_closed = True
        super().close()

    # --- state --------------------------------------------------------------------------------------------------

    def n_ctx(self) -> int:
        """The maximum tokens of one request, limited to the training context of the model."""
        return self._n_ctx

    def reset(self) -> None:
        """Empties the low-level context. Requests have no state."""
        if self._has_own_context:
            super().reset()

    def save_state(self) -> Any:
        """The seed, and the low-level context if it is in use. The prefix cache of texts does not depend on it."""
        if self._has_own_context:
            return super().save_state()
        return llama_cpp.llama.LlamaState(
            input_ids=np.empty(0, np.intc), scores=np.empty((0, self._n_vocab), np.single), n_tokens=0, llama_state=b"",
            llama_state_size=0, seed=self._seed,
        )  # fmt: skip

    def load_state(self, state: Any) -> None:
        """Restores the result of `save_state`."""
        if state.llama_state_size:
            super().load_state(state)
            return
        self.reset()
        self._seed = state.seed

    def __getstate__(self) -> Json:
        given: Json = dict(self._given)
        extra: Json = given.pop("kwargs", {})
        return given | extra

    @classmethod
    def from_pretrained(  # noqa: PLR0917  # as in the original
        cls,
        repo_id: str,
        filename: str | None,
        additional_files: list[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        local_dir_use_symlinks: bool | str = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Loads a model from the Hugging Face hub; see `cppbatch.models.hub`.

        `filename`: a name or a pattern; None: the usual weight type. Downloads to the models folder, with all parts of
        a split model. With `local_dir` or `cache_dir`, behaves as the original. Raises `ModelError`.
        """
        if local_dir or cache_dir or additional_files:
            loaded: Self = super().from_pretrained(
                repo_id, filename, additional_files, local_dir, local_dir_use_symlinks, cache_dir, **kwargs
            )
            return loaded
        return cls(str(pull_model(HubModel(repo_id, filename or ""))), **kwargs)

    # --- the low-level context ----------------------------------------------------------------------------------

    @property
    def _has_own_context(self) -> bool:
        return "_ctx" in self.__dict__

    @cached_property
    def _ctx(self) -> Any:
        """A separate llama.cpp context with the engine's weights, for the low-level members."""
        context = internals.LlamaContext(model=self._model, params=self.context_params, verbose=self.verbose)
        if not self._values["vocab_only"] and self._engine_model.adapters:
            adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(self._engine_model.adapters[0])
            llama_cpp.llama_set_adapters_lora(context.ctx, adapters, 1, (llama_cpp.ctypes.c_float * 1)(self.lora_scale))
        return context

    @cached_property
    def context_params(self) -> Any:
        """The parameters of the low-level context."""
        params, values = llama_cpp.llama_context_default_params(), self._values
        own = {"n_ctx": self._n_ctx, "n_batch": self.n_batch, "n_ubatch": min(self.n_batch, values["n_ubatch"])}
        own |= {"n_threads": self.n_threads, "n_threads_batch": self.n_threads_batch}
        own |= {"embeddings": values["embedding"], "flash_attn_type": int(values["flash_attn"])}
        names = "pooling_type", "no_perf", "swa_full", "type_k", "type_v"
        own |= {name: values[name] for name in names if values[name] is not None} | context_params(values)
        for name, value in own.items():
            setattr(params, name, value)
        return params

    @cached_property
    def model_params(self) -> Any:
        """The parameters with which the original would load the model; the engine has its own."""
        return llama_cpp.llama_model_default_params()

    @cached_property
    def _batch(self) -> Any:
        batch = internals.LlamaBatch(n_tokens=self.n_batch, embd=0, n_seq_max=self._n_ctx, verbose=self.verbose)
        return self._stack.enter_context(contextlib.closing(batch))

    @cached_property
    def input_ids(self) -> npt.NDArray[np.intc]:
        """The tokens of the low-level context."""
        return np.zeros(self._n_ctx, np.intc)

    @cached_property
    def scores(self) -> npt.NDArray[np.single]:
        """The logits of the low-level context, with `logits_all`."""
        return np.zeros((self._n_ctx if self._logits_all else self.n_batch, self._n_vocab), np.single)

    @cached_property
    def _candidates(self) -> Any:
        return internals.LlamaTokenDataArray(n_vocab=self._n_vocab)


def _closed_error() -> EngineClosed:
    return EngineClosed("this Llama object is closed: create a new one")


class _Borrowed(internals.LlamaModel):  # type: ignore[misc]
    """llama-cpp-python's object for a loaded model, for its vocabulary and metadata. Does not free the model.

    Its handles raise `EngineClosed` after it is closed.
    """

    def __init__(self, model: Model, *, verbose: bool) -> None:
        self.path_model, self.params, self.verbose = str(model.path), None, verbose
        self._exit_stack = contextlib.ExitStack()
        self.sampler: Any = None
        self.custom_samplers: list[Any] = []
        self.model, self.vocab = model.handle, model.vocab.handle

    def close(self) -> None:
        super().close()
        for handle in ("model", "vocab"):
            self.__dict__.pop(handle, None)

    def __getattr__(self, name: str) -> Any:
        if name in ("model", "vocab"):
            raise _closed_error()
        raise AttributeError(name)
