"""Runtimes for worker processes that fail: `EngineProcess(..., runtime="tests.support.failing_runtimes:...")`."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from cppbatch.config import EngineConfig, KvLayout, Sharing
from cppbatch.engine.runtime import Runtime, load_runtime
from cppbatch.errors import DecodeFailed
from cppbatch.llama import Backend, Batch
from cppbatch.llama.library import library_path

POISON = 2
"""The token that makes these runtimes fail: the end token, which is computed only as part of a prompt."""

Progress = Callable[[float], bool]


class _Wrapped:
    """A context or vocabulary with one method replaced."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Poisoned(_Wrapped):
    """Calls `harm` when the poison token is computed."""

    def __init__(self, real: Any, harm: Callable[[], object]) -> None:
        super().__init__(real)
        self._harm = harm

    def decode(self, batch: Batch) -> None:
        if np.any(batch.tokens[: batch.n_tokens] == POISON):
            self._harm()
        self._real.decode(batch)


def _with_context(runtime: Runtime, context: Any) -> Runtime:
    return replace(runtime, context=context)


def aborts(config: EngineConfig, progress: Progress) -> Runtime:
    """As llama.cpp does on a failed assertion."""
    runtime = load_runtime(config, progress)
    return _with_context(runtime, _Poisoned(runtime.context, os.abort))


def hangs(config: EngineConfig, progress: Progress) -> Runtime:
    """As a driver does at times."""
    runtime = load_runtime(config, progress)
    return _with_context(runtime, _Poisoned(runtime.context, lambda: time.sleep(1000)))


def fails(config: EngineConfig, progress: Progress) -> Runtime:
    """As llama_decode does when the device fails."""
    runtime = load_runtime(config, progress)

    def fail() -> None:
        raise DecodeFailed(-3, "compute failed")

    return _with_context(runtime, _Poisoned(runtime.context, fail))


FEW_CELLS = 512
"""With more of them, the runtimes below run out of memory at the poison token."""


def _runs_out(config: EngineConfig, progress: Progress, harm: Callable[[Any], object]) -> Runtime:
    runtime = load_runtime(config, progress)
    if config.n_ctx <= FEW_CELLS:
        return runtime
    return _with_context(runtime, _Poisoned(runtime.context, lambda: harm(ctypes.CDLL(library_path()))))


def runs_out_in_cuda(config: EngineConfig, progress: Progress) -> Runtime:
    """The log says why, and the abort's message does not."""

    def abort(lib: Any) -> None:
        lib.ggml_log_internal(4, b"CUDA error: out of memory\n")
        lib.ggml_abort(b"/src/llama.cpp/ggml/src/ggml-cuda/ggml-cuda.cu", 97, b"CUDA error")

    return _runs_out(config, progress, abort)


def runs_out_in_vulkan(config: EngineConfig, progress: Progress) -> Runtime:
    """A C++ exception that nothing catches."""
    words = b"vk::Device::allocateMemory: ErrorOutOfDeviceMemory"
    return _runs_out(config, progress, lambda lib: lib._ZSt21__throw_runtime_errorPKc(words))


def runs_out_in_metal(config: EngineConfig, progress: Progress) -> Runtime:
    """The log says why `llama_decode` returns an error."""

    def fail(lib: Any) -> None:
        lib.ggml_log_internal(4, b"error: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)\n")
        raise Backend.get().failure(DecodeFailed(-3, "compute failed"), Backend.get().recent_errors())

    return _runs_out(config, progress, fail)


def runs_out_in_python(config: EngineConfig, progress: Progress) -> Runtime:
    """An array of numpy that the host has no memory for."""
    return _runs_out(config, progress, lambda lib: np.ones(1 << 50))


class _PoisonedVocab(_Wrapped):
    """Calls `harm` when a text with "poison" in it is tokenised."""

    def __init__(self, real: Any, harm: Callable[[], object]) -> None:
        super().__init__(real)
        self._harm = harm

    def tokenize(self, text: str, **options: Any) -> Any:
        if "poison" in text:
            self._harm()
        return self._real.tokenize(text, **options)


def _with_vocab(runtime: Runtime, vocab: Any) -> Runtime:
    return replace(runtime, vocab=vocab)


def dies_of_texts(config: EngineConfig, progress: Progress) -> Runtime:
    """As llama.cpp does when a regular expression recurses too deeply."""
    runtime = load_runtime(config, progress)
    return _with_vocab(runtime, _PoisonedVocab(runtime.vocab, lambda: ctypes.string_at(0)))


def raises_on_texts(config: EngineConfig, progress: Progress) -> Runtime:
    """As a bug in this program does."""

    def fail() -> None:
        raise TypeError("a bug")

    runtime = load_runtime(config, progress)
    return _with_vocab(runtime, _PoisonedVocab(runtime.vocab, fail))


def hangs_on_texts(config: EngineConfig, progress: Progress) -> Runtime:
    """As a tokeniser with a quadratic part does."""
    runtime = load_runtime(config, progress)
    return _with_vocab(runtime, _PoisonedVocab(runtime.vocab, lambda: time.sleep(1000)))


class _PoisonedEncoder(_Wrapped):
    """Aborts the process at an image that is all black; waits a while at others."""

    def __init__(self, real: Any) -> None:
        super().__init__(real)
        self._pixels: Any = None

    def split_image(self, pixels: Any) -> Any:
        self._pixels = pixels
        return self._real.split_image(pixels)

    def encode(self, chunk: Any) -> Any:
        if not self._pixels.any():
            os.abort()
        time.sleep(0.05)
        return self._real.encode(chunk)


def dies_of_black_pictures(config: EngineConfig, progress: Progress) -> Runtime:
    """As llama.cpp does when an encoder's assertion fails."""
    runtime = load_runtime(config, progress)
    assert runtime.media
    runtime.media.encoder = _PoisonedEncoder(runtime.media.encoder)
    return runtime


class _SlowVocab(_Wrapped):
    """Tokenising takes `seconds` more for each part of a text that is `slow`."""

    def __init__(self, real: Any, slow: Callable[[str], bool], seconds: float) -> None:
        super().__init__(real)
        self._slow, self._seconds = slow, seconds

    def tokenize(self, text: str, cancelled: Callable[[], bool] = lambda: False, **options: Any) -> Any:
        def slowly() -> bool:
            time.sleep(self._seconds)
            return cancelled()

        return self._real.tokenize(text, cancelled=slowly if self._slow(text) else cancelled, **options)


def slow_texts(config: EngineConfig, progress: Progress) -> Runtime:
    """As on a slow machine, for long ones."""
    runtime = load_runtime(config, progress)
    return _with_vocab(runtime, _SlowVocab(runtime.vocab, lambda text: len(text) > 10_000, 0.5))


def _waiting(config: EngineConfig, progress: Progress, waits: Iterator[float]) -> Runtime:
    """The steps take these seconds longer."""
    runtime = load_runtime(config, progress)
    context: Any = _Wrapped(runtime.context)

    def decode(batch: Batch) -> None:
        time.sleep(next(waits, 0))
        runtime.context.decode(batch)

    context.decode = decode
    return _with_context(runtime, context)


def slow_to_start(config: EngineConfig, progress: Progress) -> Runtime:
    """The first step takes half a second."""
    return _waiting(config, progress, iter([0.5]))


def paced(config: EngineConfig, progress: Progress) -> Runtime:
    """Up to 100 steps a second, however fast the machine."""
    return _waiting(config, progress, repeat(0.01))


def slow_to_switch(config: EngineConfig, progress: Progress) -> Runtime:
    """A switch of the KV layout takes a second longer."""
    runtime = load_runtime(config, progress)
    assert runtime.layouts
    change = runtime.layouts.change

    def slowly(layout: KvLayout) -> Sharing:
        time.sleep(1)
        return change(layout)

    return replace(runtime, layouts=replace(runtime.layouts, change=slowly))


def kills_itself(config: EngineConfig, progress: Progress) -> Runtime:
    """As the kernel does when memory runs out."""
    runtime = load_runtime(config, progress)
    return _with_context(runtime, _Poisoned(runtime.context, lambda: os.kill(os.getpid(), signal.SIGKILL)))


def dies_while_loading(config: EngineConfig, progress: Progress) -> Runtime:
    """As a build for another CPU does."""
    progress(0.5)
    os.kill(os.getpid(), signal.SIGILL)
    raise AssertionError


def aborts_in_every_step(config: EngineConfig, progress: Progress) -> Runtime:
    """As llama.cpp does with a model for which it builds a wrong graph."""
    runtime = load_runtime(config, progress)
    context: Any = _Wrapped(runtime.context)
    llama = ctypes.CDLL(library_path())
    context.decode = lambda batch: llama.ggml_abort(b"/src/llama.cpp/ggml.c", 1797, b"GGML_ASSERT(%s) failed", b"view")
    return _with_context(runtime, context)


def dies_on_the_fast_path(config: EngineConfig, progress: Progress) -> Runtime:
    """As a build with broken AMX code does, where the self-check's tiny models have not hit it."""
    runtime = load_runtime(msgspec.structs.replace(config, repack="off"), progress)
    if config.repack == "off":
        return runtime
    context: Any = _Wrapped(runtime.context)
    context.decode = lambda batch: ctypes.string_at(0)
    return _with_context(runtime, context)
