"""Converts image and audio files to token ids and vectors, which a sequence takes in place of text.

Each vector has a placeholder in the sequence's tokens: a negative id derived from the file's bytes. So equal images are
equal tokens, and prefixes with them are shared, saved and found like any others. The vectors also depend on the
projector, whose digest is in the key of saved states (`StateKey`).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter, sleep
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.engine.media.files import decode_audio, decode_image
from cppbatch.engine.request import Media, Modality
from cppbatch.engine.vocabulary import IsCancelled
from cppbatch.errors import InvalidRequest, LlamaError, RequestCancelled

log = logging.getLogger("cppbatch.engine")

CACHE_BYTES = 256 << 20
"""Maximum vectors of recently used images and audio to keep for later requests. 256 tokens with n_embd 2048 take
2 MiB."""
HELD_BYTES = 512 << 20
"""Maximum vectors held by waiting and running sequences before another request with media is prepared."""
_CANCELLED_CHECK_S = 0.05  # interval at which a waiting request checks for cancellation

Vectors = npt.NDArray[np.float32]


class Chunk(Protocol):
    """`cppbatch.llama.MediaChunk`."""

    kind: Modality | None
    tokens: npt.NDArray[np.int32]
    n_tokens: int
    is_whole: bool
    n_positions: int
    positions: npt.NDArray[np.int32] | None


class Encoder(Protocol):
    """`cppbatch.llama.MediaEncoder`, or a fake in tests."""

    modalities: tuple[Modality, ...]
    sample_rate: int
    n_embd: int

    def split_image(self, pixels: npt.NDArray[np.uint8]) -> Sequence[Any]: ...
    def split_audio(self, samples: npt.NDArray[np.float32]) -> Sequence[Any]: ...
    def encode(self, chunk: Any) -> Vectors: ...


class MediaPiece(NamedTuple):
    """A part of an encoded image or audio clip."""

    tokens: npt.NDArray[np.int32]
    """int32[n]: text, or the placeholders of the vectors."""
    vectors: Vectors | None
    """float32[n, n_embd]; None: text."""
    is_whole: bool
    """Whether all of it must be computed at once, because its tokens attend to each other."""
    n_positions: int
    """The number of positions it takes."""
    positions: npt.NDArray[np.int32] | None = None
    """int32[4, n] for M-RoPE (`MediaRun.positions`); None: positions ascend."""


class EncodedMedium:
    """An image or audio clip as tokens and vectors."""

    def __init__(self, pieces: Sequence[MediaPiece]) -> None:
        self.pieces = tuple(pieces)
        self.n_tokens = sum(len(piece.tokens) for piece in pieces)
        self.n_bytes = sum(piece.vectors.nbytes for piece in pieces if piece.vectors is not None)


class MediaInput:
    """Decodes and encodes the images and audio of prompts. Thread-safe: decodes and encodes one at a time, because a
    decoded one may take hundreds of megabytes.

    Recently used ones are cached, and those still held by a sequence are found too, so equal files are encoded once.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        cache_bytes: int = CACHE_BYTES,
        compute: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`compute`: entered while a chunk is encoded."""
        self.encoder = encoder
        self._cache_bytes = cache_bytes
        self._compute = compute
        self._decoding = threading.Lock()
        self._encoding = threading.Lock()
        self._lock = threading.Lock()  # for the following fields
        self._kept: OrderedDict[str, EncodedMedium] = OrderedDict()  # least recently used first
        self._alive: weakref.WeakValueDictionary[str, EncodedMedium] = weakref.WeakValueDictionary()
        self._kept_bytes = 0
        self.n_encoded = 0
        """Number of encoded images and audio clips."""
        self.n_found = 0
        """Number of those found in the cache."""
        self.seconds = 0.0
        """Time in the encoder."""

    def encode(
        self, medium: Media, check: Callable[[int], object], cancelled: IsCancelled, *, salt: str = ""
    ) -> EncodedMedium:
        """An image or audio clip as tokens and vectors. `check` is called with the number of tokens before they are
        computed, and may raise. Media encoded with another salt are encoded again, so that timing does not reveal what
        others have sent (`GenerationRequest.cache_salt`).

        `medium`: of a kind that the encoder supports. Raises `InvalidRequest` for a file that cannot be decoded;
        `RequestCancelled` if `cancelled` returns True while waiting or between two chunks.
        """
        name = f"{medium.kind} {medium.digest}"
        key = f"{name} {salt}"
        if found := self._find(key):
            check(found.n_tokens)
            return found
        chunks = self._split(medium, cancelled)
        check(sum(chunk.n_tokens for chunk in chunks))
        with _acquire(self._encoding, cancelled):
            if found := self._find(key):
                return found
            began = perf_counter()
            made = EncodedMedium([self._piece(name, i, chunk, cancelled) for i, chunk in enumerate(chunks)])
            with self._lock:
                self.n_encoded += 1
                self.seconds += perf_counter() - began
                self._keep(key, made)
        return made

    def wait_for_room(self, cancelled: IsCancelled) -> None:
        """Waits while sequences hold too many vectors, until sequences have ended in steps of another thread.

        Raises `RequestCancelled`.
        """
        while self._held_bytes() > HELD_BYTES:
            if cancelled():
                raise RequestCancelled("cancelled while waiting for memory")
            sleep(_CANCELLED_CHECK_S)

    def _held_bytes(self) -> int:
        with self._lock:
            return sum(medium.n_bytes for medium in self._alive.values()) - self._kept_bytes

    def n_tokens(self, medium: Media, cancelled: IsCancelled) -> int:
        """The number of its tokens, without encoding it. Raises as `encode`."""
        return sum(chunk.n_tokens for chunk in self._split(medium, cancelled))

    def _split(self, medium: Media, cancelled: IsCancelled) -> Sequence[Chunk]:
        encoder = self.encoder
        with _acquire(self._decoding, cancelled):
            try:
                if medium.kind == "image":
                    return encoder.split_image(decode_image(medium.data))
                return encoder.split_audio(decode_audio(medium.data, encoder.sample_rate))
            except LlamaError as error:
                raise InvalidRequest("prompt", f"contains {medium.kind} data that cannot be used: {error}") from error

    def _piece(self, name: str, number: int, chunk: Chunk, cancelled: IsCancelled) -> MediaPiece:
        if chunk.kind is None:
            return MediaPiece(chunk.tokens, None, is_whole=False, n_positions=chunk.n_tokens)
        if cancelled():
            raise RequestCancelled("cancelled during encoding")
        try:
            with self._compute():
                vectors = self.encoder.encode(chunk)
        except LlamaError as error:
            raise InvalidRequest("prompt", f"contains {chunk.kind} data that cannot be encoded: {error}") from error
        seed, positions = b"%b %d" % (name.encode(), number), chunk.positions
        if positions is not None:
            seed += b" " + positions.tobytes()
        ids = placeholders(seed, chunk.n_tokens)
        return MediaPiece(ids, vectors, chunk.is_whole, chunk.n_positions, positions)

    def _find(self, key: str) -> EncodedMedium | None:
        with self._lock:
            found = self._alive.get(key)
            if found:
                self.n_found += 1
                self._keep(key, found)
            return found

    def _keep(self, key: str, medium: EncodedMedium) -> None:
        self._alive[key] = medium
        if key not in self._kept:
            self._kept_bytes += medium.n_bytes
        self._kept[key] = medium
        self._kept.move_to_end(key)
        while self._kept_bytes > self._cache_bytes:
            self._kept_bytes -= self._kept.popitem(last=False)[1].n_bytes


@contextmanager
def _acquire(lock: threading.Lock, cancelled: IsCancelled) -> Iterator[None]:
    while not lock.acquire(timeout=_CANCELLED_CHECK_S):
        if cancelled():
            raise RequestCancelled("cancelled while waiting for another image or audio clip")
    try:
        yield
    finally:
        lock.release()


def placeholders(seed: bytes, n: int) -> npt.NDArray[np.int32]:
    """`n` pseudo-random token ids below -1, int32[n], derived from the seed."""
    words = np.frombuffer(hashlib.shake_256(seed).digest(4 * n), "<u4")
    return (-2 - (words % (2**31 - 1)).astype(np.int64)).astype(np.int32)
