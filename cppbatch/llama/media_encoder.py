"""Encodes images and audio with llama.cpp's mtmd into vectors that a text model reads instead of token embeddings."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from cppbatch.config import setting_name
from cppbatch.errors import LibraryError, LlamaError, ModelError, name_first
from cppbatch.llama.backend import Backend
from cppbatch.llama.library import PINNED_VERSION, REINSTALL, C
from cppbatch.llama.model import Model
from cppbatch.llama.owned import Owned
from cppbatch.models.file_header import FileHeader, read_header

Modality = Literal["image", "audio"]
Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

_KINDS: dict[int, Modality] = {1: "image", 2: "audio"}  # mtmd_input_chunk_type; 0 is text
_TEXT_ONLY = f"leave out {setting_name('mmproj')}; for a model from the hub, add --no-mmproj"
_UNSUPPORTED = {
    "deepseek4v": "DeepSeek-V4 image tokens depend on the preceding tokens, so prefixes cannot be shared",
    "hunyuanvl": "HunyuanVL image positions depend on the number of preceding images",
}
"""Projector types for which an image's tokens depend on more than the image."""


@functools.cache
def _mtmd() -> Any:
    """The bindings of libmtmd, with the same log as llama.cpp. Raises `LibraryError` if the build has none."""
    assert C.llama_backend_init  # first, so that a missing or wrong llama-cpp-python gets its own error message
    try:
        mtmd_cpp = importlib.import_module("llama_cpp.mtmd_cpp")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        command = REINSTALL.replace('CMAKE_ARGS="', 'CMAKE_ARGS="-DLLAVA_BUILD=ON -DMTMD_VIDEO=OFF ')
        raise LibraryError(
            f"this llama-cpp-python {PINNED_VERSION} was built without mtmd, which {setting_name('mmproj')} requires "
            f"({error}). Build it with:\n  {command}"
        ) from error
    mtmd_cpp.mtmd_helper_log_set(Backend.get().log_callback, ctypes.c_void_p(0))
    return mtmd_cpp


def has_mtmd() -> bool:
    """Whether this build of llama-cpp-python can encode images and audio."""
    try:
        return _mtmd() is not None
    except LibraryError:
        return False


class MediaChunk:
    """A part of a split image or audio clip: text tokens around it, or a piece to encode.

    `kind`: None for text. `tokens`: int32[n_tokens] of text; empty for other kinds. `is_whole`: its tokens attend to
    each other, so they must be computed together, without a causal mask. `positions`: int32[4, n_tokens], if positions
    have several dimensions: time, row, column and 0, starting from 0. The text after the chunk continues `n_positions`
    later.
    """

    __slots__ = ("_parts", "handle", "is_whole", "kind", "n_positions", "n_tokens", "positions", "tokens")

    def __init__(
        self,
        parts: _Parts,
        handle: int,
        kind: Modality | None,
        tokens: Int32Array,
        *,
        is_whole: bool = False,
        has_dimensions: bool = False,
    ) -> None:
        self._parts = parts  # keeps llama.cpp's memory alive
        self.handle, self.kind, self.tokens, self.is_whole = handle, kind, tokens, is_whole
        self.n_tokens = int(_mtmd().mtmd_input_chunk_get_n_tokens(handle))
        self.n_positions = int(_mtmd().mtmd_input_chunk_get_n_pos(handle))
        self.positions = _relative_positions(handle, kind, self.n_tokens) if has_dimensions and kind else None


class _Parts:
    """Owns an `mtmd_input_chunks`."""

    def __init__(self) -> None:
        mtmd = _mtmd()
        self.handle = mtmd.mtmd_input_chunks_init()
        self._owned = Owned(self.handle, mtmd.mtmd_input_chunks_free)


class ImageSizes(NamedTuple):
    """Tokens of an image; 0: as the projector's file says."""

    min_tokens: int = 0
    max_tokens: int = 0
    batch_tokens: int = 1024
    """Maximum tokens of the images that are encoded at once."""


_USUAL = ImageSizes()


class MediaEncoder:
    """The encoders and projectors of an mmproj file, for one text model. `close` frees them; so does the model's.

    Splitting is thread-safe. Encoding is not: one thread at a time may call `encode`.
    """

    def __init__(
        self, model: Model, path: str | Path, *, n_threads: int, device: int | None = None, sizes: ImageSizes = _USUAL
    ) -> None:
        """Loads `path` and reserves compute buffers.

        `n_threads`: of the CPU. `device`: ggml's pointer to the device that encodes; None: the CPU.
        Raises `LibraryError` for a build without mtmd; `ModelError` for a file that is missing, damaged, not a
        projector, or for another text model.
        """
        self._owned: Owned | None = None
        self.path = Path(path)
        mtmd = self._mtmd = _mtmd()
        _check_file(self.path)
        params = mtmd.mtmd_context_params_default()
        params.device, params.use_gpu = device, device is not None
        params.n_threads, params.print_timings = n_threads, False
        if sizes.min_tokens:
            params.image_min_tokens = sizes.min_tokens
        if sizes.max_tokens:
            params.image_max_tokens = sizes.max_tokens
        params.batch_max_tokens = sizes.batch_tokens
        with Backend.get().errors() as lines:
            handle = mtmd.mtmd_init_from_file(os.fsencode(self.path), model.handle, params)
        if not handle:
            error = ModelError(f"{self.path} cannot be used with {model.path.name}: {_reason(lines)}")
            raise Backend.get().failure(error, lines)
        self._owned = Owned(handle, mtmd.mtmd_free, model.owned)
        model.adopt(self)
        self.n_embd = model.n_embd_inp
        """Length of a vector."""
        self._n_vocab = model.vocab.n_tokens
        self._has_dimensions = model.n_dimensions > 1
        kinds: tuple[tuple[Modality, Any], ...] = (
            ("image", mtmd.mtmd_support_vision),
            ("audio", mtmd.mtmd_support_audio),
        )
        self.modalities: tuple[Modality, ...] = tuple(kind for kind, supports in kinds if supports(handle))
        """The supported media."""
        self.sample_rate = max(0, int(mtmd.mtmd_get_audio_sample_rate(handle)))
        """Audio samples per second; 0 without "audio"."""
        self.images_are_whole = "image" in self.modalities and bool(mtmd.mtmd_decode_use_non_causal(handle, None))
        """Whether all tokens of an image must be computed together (`MediaChunk.is_whole`)."""

    @property
    def handle(self) -> Any:
        """mtmd's pointer. Raises `LlamaError` when the encoder is closed."""
        if self._owned is None or (pointer := self._owned.pointer) is None:
            raise LlamaError(f"the projector {self.path.name} is closed")
        return pointer

    def split_image(self, pixels: npt.NDArray[np.uint8]) -> list[MediaChunk]:
        """The chunks of an image, uint8[height, width, 3] in RGB. Raises `LlamaError` if mtmd cannot prepare it."""
        height, width, n_channels = pixels.shape
        if "image" not in self.modalities or n_channels != 3 or not (height and width):
            raise LlamaError(f"an image of {width} x {height} pixels with {n_channels} channels cannot be encoded")
        pixels = np.ascontiguousarray(pixels)
        data = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        return self._split(self._mtmd.mtmd_bitmap_init(width, height, data))

    def image_tokens(self) -> int:
        """The number of vectors of the largest piece of a square image."""
        chunks = self.split_image(np.zeros((1024, 1024, 3), np.uint8))
        return max(chunk.n_tokens for chunk in chunks if chunk.kind)

    def split_audio(self, samples: FloatArray) -> list[MediaChunk]:
        """The chunks of audio, float32[n] at `sample_rate`, one channel. Raises `LlamaError` as `split_image`."""
        # mtmd asserts that audio has more than one
        if "audio" not in self.modalities or len(samples) < 2 or not np.isfinite(samples).all():
            raise LlamaError(f"audio of {len(samples)} samples cannot be encoded")
        samples = np.ascontiguousarray(samples, np.float32)
        data = samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        return self._split(self._mtmd.mtmd_bitmap_init_from_audio(len(samples), data))

    def _split(self, bitmap: Any) -> list[MediaChunk]:
        """Splits a bitmap and frees it: mtmd copies the data it needs."""
        mtmd, parts = self._mtmd, _Parts()
        part = mtmd.mtmd_input_part(text=None, bitmap=bitmap)
        pointers = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
        with Backend.get().errors() as lines:
            code = mtmd.mtmd_tokenize_from_parts(self.handle, parts.handle, pointers, 1, False)
        mtmd.mtmd_bitmap_free(bitmap)
        if code:
            raise LlamaError(_reason(lines))
        return list(self._chunks(parts))

    def _chunks(self, parts: _Parts) -> Iterator[MediaChunk]:
        mtmd = self._mtmd
        for i in range(mtmd.mtmd_input_chunks_size(parts.handle)):
            handle = mtmd.mtmd_input_chunks_get(parts.handle, i)
            kind = _KINDS.get(mtmd.mtmd_input_chunk_get_type(handle))
            if kind is None:
                n = ctypes.c_size_t()
                array = mtmd.mtmd_input_chunk_get_tokens_text(handle, ctypes.byref(n))
                tokens = np.ctypeslib.as_array(array, (n.value,)).astype(np.int32)
                if tokens.min() < 0 or tokens.max() >= self._n_vocab:
                    raise LlamaError(
                        "the text model lacks the tokens that delimit images or audio; the projector belongs to a "
                        "different model"
                    )
                yield MediaChunk(parts, handle, None, tokens)
                continue
            is_whole = bool(mtmd.mtmd_decode_use_non_causal(self.handle, handle))
            nothing = np.empty(0, np.int32)
            yield MediaChunk(parts, handle, kind, nothing, is_whole=is_whole, has_dimensions=self._has_dimensions)

    def encode(self, chunk: MediaChunk) -> FloatArray:
        """The vectors of an image or audio chunk, float32[n_tokens, n_embd]. Releases the GIL while it computes.

        Raises `LlamaError` if encoding fails or returns non-finite values.
        """
        if chunk.kind is None:
            raise LlamaError("text cannot be encoded")
        with Backend.get().errors() as lines:
            code = self._mtmd.mtmd_encode_chunk(self.handle, chunk.handle)
        if code:
            raise LlamaError(_reason(lines))
        output = self._mtmd.mtmd_get_output_embd(self.handle)
        vectors: FloatArray = np.ctypeslib.as_array(output, (chunk.n_tokens, self.n_embd)).copy()
        if not np.isfinite(vectors).all():
            raise LlamaError("the encoder returned non-finite values")
        return vectors

    def close(self) -> None:
        """Frees the encoders. A second call does nothing."""
        if self._owned:
            self._owned.close()


def _relative_positions(handle: int, kind: Modality, n: int) -> Int32Array:
    """Time, row, column and 0 of each of `n` vectors, int32[4, n]. For audio, the first three are equal."""
    positions = np.zeros((4, n), np.int32)
    if kind == "audio":
        positions[:3] = np.arange(n, dtype=np.int32)
        return positions
    mtmd = _mtmd()
    of_each = (mtmd.mtmd_decoder_pos * n)()
    mtmd.mtmd_helper_image_get_decoder_pos(mtmd.mtmd_input_chunk_get_tokens_image(handle), 0, of_each)
    t, x, y, _ = np.ctypeslib.as_array(ctypes.cast(of_each, ctypes.POINTER(ctypes.c_uint32)), (n, 4)).T
    positions[:3] = t, y, x
    return positions


def _check_file(path: Path) -> None:
    """Raises `ModelError` for a file that cannot be a usable projector."""
    if not path.is_file():
        raise ModelError(f"{setting_name('mmproj')}: projector file not found: {path}")
    header = read_header(path)
    architecture = header.text("general.architecture")
    if architecture != "clip":
        raise ModelError(
            f"{path} is not a projector: its architecture is {architecture or 'missing'}, but an mmproj file has clip "
            f"({setting_name('mmproj')})"
        )
    for key in ("clip.projector_type", "clip.vision.projector_type"):
        projector = header.text(key) or ""
        if reason := _UNSUPPORTED.get(projector):
            raise ModelError(f"{path} cannot be used: {reason}. To use text only: {_TEXT_ONLY}")
        check_tensors(path, header, projector)


def _reason(lines: list[str]) -> str:
    """The last error line: mtmd's own, after those of the functions that it called."""
    if not lines:
        return "llama.cpp gave no reason"
    return lines[-1].removeprefix("mtmd_init_from_file: ").removeprefix("error: ").partition("\n")[0]


# The tensors that a projector file needs. Without some of them llama.cpp crashes, or silently computes nonsense.


def _with_bias(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{end}" for name in names for end in ("weight", "bias"))


_MERGER = ("v.patch_embd.weight", "v.patch_embd.weight.1", "v.post_ln.weight", *_with_bias("mm.0", "mm.2"))
_BLOCK = _with_bias("attn_out", "ffn_up", "ffn_down")
_QKV, _NORMS = _with_bias("attn_q", "attn_k", "attn_v"), _with_bias("ln1", "ln2")
_NEEDED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "qwen2vl_merger": ((*_MERGER, "v.post_ln.bias"), (*_BLOCK, *_QKV, *_NORMS)),
    "qwen2.5vl_merger": (_MERGER, (*_BLOCK, *_QKV, *_with_bias("ffn_gate"), "ln1.weight", "ln2.weight")),
    "qwen3vl_merger": (
        (*_MERGER, "v.post_ln.bias", "v.patch_embd.bias", "v.position_embd.weight"),
        (*_BLOCK, *_with_bias("attn_qkv"), *_NORMS),
    ),
}
"""By projector type: tensors of the file and of each block. Other types are only tested (`check_projector`)."""
_DEEPSTACK = _with_bias("norm", "fc1", "fc2")


def check_tensors(path: Path, header: FileHeader, projector: str) -> None:
    """Raises `ModelError` if the file lacks tensors that this type of projector needs."""
    if projector not in _NEEDED:
        return
    there = {tensor.name for tensor in header.tensors}
    n_blocks = header.whole_number("clip.vision.block_count") or 0
    missing = [name for name in _needed_tensors(n_blocks, projector, there) if name not in there]
    if missing:
        raise ModelError(
            f"{path} is damaged: a projector of type {projector} requires {name_first(missing, 3)}. Download it again"
        )


def _needed_tensors(n_blocks: int, projector: str, there: set[str]) -> Iterator[str]:
    of_file, of_block = _NEEDED[projector]
    yield from of_file
    for i in range(min(512, n_blocks)):
        yield from (f"v.blk.{i}.{name}" for name in of_block)
        deepstack = [f"v.deepstack.{i}.{name}" for name in _DEEPSTACK]
        if not there.isdisjoint(deepstack):
            yield from deepstack
