"""An image encoder for the fake model: a pixel is a vector with a byte that is not a token as its first number."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from cppbatch import Media, MediaPrompt
from cppbatch.engine.media.input import MediaInput
from cppbatch.engine.request import Modality, text_of_part
from tests.support.fakes import N_VOCAB, FakeVocab
from tests.support.media_files import encoded

SEPARATOR = 5
"""The token of text between two rows of an image."""


@dataclass
class FakeChunk:
    """Text, or a row of pixels; an image with multi-dimensional positions has all its pixels in one row."""

    kind: Modality | None
    tokens: npt.NDArray[np.int32]
    row: npt.NDArray[np.uint8]
    is_whole: bool
    n_columns: int = 0
    """Of an image with multi-dimensional positions."""

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) if self.kind is None else len(self.row)

    @property
    def n_positions(self) -> int:
        return max(self.n_columns, self.n_tokens // self.n_columns) if self.n_columns else self.n_tokens

    @property
    def positions(self) -> npt.NDArray[np.int32] | None:
        at, zeros = np.arange(self.n_tokens, dtype=np.int32), np.zeros(self.n_tokens, np.int32)
        return np.stack([zeros, *np.divmod(at, self.n_columns), zeros]) if self.n_columns else None


@dataclass
class FakeEncoder:
    """Each row of an image is a chunk, with a token of text between two rows; with `has_dimensions` the image is one
    chunk of pixels with rows and columns. `encoding`: set while it encodes; it then waits for `may_encode`."""

    is_whole: bool = False
    has_dimensions: bool = False
    modalities: tuple[Modality, ...] = ("image",)
    sample_rate: int = 16_000
    n_embd: int = 3
    n_calls: int = 0
    encoding: threading.Event = field(default_factory=threading.Event)
    may_encode: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_encode.set()

    def split_image(self, pixels: npt.NDArray[np.uint8]) -> list[FakeChunk]:
        chunks: list[FakeChunk] = []
        if self.has_dimensions:
            return [FakeChunk("image", np.empty(0, np.int32), pixels[:, :, 0].reshape(-1), False, pixels.shape[1])]
        for row in pixels[:, :, 0]:
            if chunks:
                chunks.append(FakeChunk(None, np.array([SEPARATOR], np.int32), row, is_whole=False))
            chunks.append(FakeChunk("image", np.empty(0, np.int32), row, self.is_whole))
        return chunks

    def split_audio(self, samples: npt.NDArray[np.float32]) -> list[FakeChunk]:
        raise AssertionError("the fake model does not accept audio")

    def encode(self, chunk: Any) -> npt.NDArray[np.float32]:
        """float32[n, 3]: the byte of a pixel, its place in the chunk, and the length of a row."""
        self.n_calls += 1
        self.encoding.set()
        assert self.may_encode.wait(10)
        self.encoding.clear()
        n = len(chunk.row)
        return np.stack([bytes_of(chunk.row), np.arange(n), np.full(n, chunk.n_columns or n)], 1).astype(np.float32)


def bytes_of(row: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """The content of the fake context's cells for a row of pixels."""
    return N_VOCAB + row.astype(np.int64) % (256 - N_VOCAB)


def fake_media(*, is_whole: bool = False, has_dimensions: bool = False, **options: Any) -> MediaInput:
    return MediaInput(FakeEncoder(is_whole, has_dimensions), **options)


@cache
def small_picture(number: int, width: int, height: int = 1) -> Media:
    """An image of `width` x `height` tokens, plus separators; each number gives a different image."""
    rng = np.random.default_rng([number, width, height])
    pixels = np.repeat(rng.integers(0, 192, (height, width, 1), np.uint8), 3, axis=2)
    return Media("image", encoded(Image.fromarray(pixels)))


def as_read(prompt: MediaPrompt, *, has_dimensions: bool = False) -> list[int]:
    """The content of the fake context's cells for a prompt: the argument of `reference`."""
    from cppbatch.engine.media.files import decode_image

    read: list[int] = []
    for part in prompt.parts:
        if not isinstance(part, Media):
            read += FakeVocab().tokenize(text_of_part(part)).tolist()
            continue
        for i, row in enumerate(decode_image(part.data)[:, :, 0]):
            read += [SEPARATOR] * (i > 0 and not has_dimensions) + bytes_of(row).tolist()
    return read
