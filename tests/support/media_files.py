"""Image and audio files for tests."""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from cppbatch import Media


def picture(seed: int = 0, *, size: tuple[int, int] = (48, 40), kind: str = "PNG", **options: Any) -> bytes:
    """A file with random pixels; `size`: width and height."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return encoded(Image.fromarray(pixels), kind, **options)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def image(seed: int = 0) -> Media:
    """An image for a prompt; each seed gives a different image."""
    return Media("image", picture(seed))


def tone(seconds: float = 1.0, *, rate: int = 16_000, hertz: float = 440.0) -> npt.NDArray[np.float32]:
    """The samples of a sine, float32[n], of amplitude 0.5."""
    at = np.arange(round(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * hertz * at)).astype(np.float32)


def wav(samples: npt.NDArray[np.float32], *, rate: int = 16_000) -> bytes:
    """A WAV file of 16 bits; `samples`: float32[n] or float32[n, channels]."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(samples.shape[1] if samples.ndim > 1 else 1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def sound(seconds: float = 1.0, *, hertz: float = 440.0) -> Media:
    """Audio for a prompt."""
    return Media("audio", wav(tone(seconds, hertz=hertz)))


def jpeg_of_many_scans(n: int, *, side: int) -> bytes:
    """A progressive image with `n` copies of its last scan: each processes all pixels and takes a few bytes."""
    data = encoded(Image.new("RGB", (side, side)), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xc4") : -2]  # its table and the scan
    return data[:-2] + n * last + data[-2:]


def gif_of_many_comments(n: int) -> bytes:
    """An image with a comment in `n` pieces of one byte, which Pillow joins one after the other."""
    data = encoded(Image.new("P", (8, 8)), "GIF")
    head = 13 + 3 * 2 ** ((data[10] & 7) + 1)  # with the palette
    return data[:head] + b"\x21\xfe" + n * b"\x01x" + b"\0" + data[head:]


def jpeg_of_many_segments(n: int) -> bytes:
    """An image with `n` pieces of Exif data, which Pillow joins one after the other."""
    data = encoded(Image.new("RGB", (8, 8)), "JPEG")
    return data[:2] + n * b"\xff\xe1\x00\x09Exif\0\0x" + data[2:]
