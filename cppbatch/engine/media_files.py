"""Decodes the files of pictures and sounds, which come from strangers: bounded before memory is taken for them."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cppbatch.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 50_000_000
"""Of a picture: what a large camera makes. In memory it takes 3 bytes a pixel, twice."""
MAX_ASPECT = 100
"""How many times as long as the other a side of a picture may be: encoders scale it, and a short side would vanish."""
MAX_SOUND_S = 1800
"""Seconds of a sound: half an hour."""
_LEAST_SOUND_S = 0.01
_PICTURES = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow's parsers of other formats are never reached
_MAX_SAMPLE_RATE = 768_000
_MAX_CHANNELS = 32
_SOUNDS = ("WAV", "WAVEX", "RF64", "MP3", "MPEG", "FLAC", "OGG")


def decode_image(data: bytes) -> npt.NDArray[np.uint8]:
    """The pixels of a picture, uint8[height, width, 3] in RGB, upright; of several frames the first.

    Transparent pixels are on white. Raises `InvalidRequest` for what is no picture of a known format, is broken, or has
    too many pixels.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own limit of pixels, and about odd metadata
            with Image.open(io.BytesIO(data), formats=_PICTURES) as file:
                _check_size(*file.size)
                return np.asarray(_on_white(ImageOps.exif_transpose(file)))
    except InvalidRequest:
        raise
    except UnidentifiedImageError:
        raise _refused(f"has a picture that is no {', '.join(_PICTURES)} file") from None
    except Exception as error:  # a damaged file raises nearly anything
        raise _refused(f"has a picture that cannot be decoded: {_said(error)}") from error


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise _refused(f"has a picture of {width} x {height} pixels; {MAX_PIXELS:,} are possible")
    if not width or not height or max(width, height) > MAX_ASPECT * min(width, height):
        raise _refused(
            f"has a picture of {width} x {height} pixels; no side may be more than {MAX_ASPECT} times the other"
        )


def _on_white(image: Image) -> Image:
    from PIL import Image as images

    if image.mode in ("I", "I;16", "I;16B", "I;16L", "F"):  # PNG of 16 bits: RGB would clip it
        grey = np.asarray(image, np.float32)
        return images.fromarray((grey / 257).clip(0, 255).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = images.new("RGBA", image.size, "WHITE")
    return images.alpha_composite(white, image).convert("RGB")


def decode_audio(data: bytes, sample_rate: int) -> npt.NDArray[np.float32]:
    """The samples of a sound, float32[n] at `sample_rate`: the mean of its channels.

    Raises `InvalidRequest` for what is no sound of a known format, is broken, or is too long.
    """
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            return _resampled(_read(file), file.samplerate, sample_rate)
    except InvalidRequest:
        raise
    except Exception as error:  # soundfile.LibsndfileError, and nearly anything for a damaged file
        raise _refused(f"has a sound that cannot be decoded: {_said(error)} (it must be WAV, MP3 or FLAC)") from error


def _read(file: Any) -> npt.NDArray[np.float32]:
    """All samples, float32[n]. The header may lie about their number, so no more are read than are possible."""
    rate, channels = file.samplerate, file.channels
    if file.format not in _SOUNDS:
        raise _refused(f"has a sound in the format {file.format}; it must be WAV, MP3 or FLAC")
    if not 0 < rate <= _MAX_SAMPLE_RATE or not 0 < channels <= _MAX_CHANNELS:
        raise _refused(f"has a sound of {channels} channels with {rate} samples a second")
    most = MAX_SOUND_S * rate
    if 0 < file.frames < 2**62 and file.frames > most:
        raise _refused(f"has a sound of {file.frames / rate:,.0f} seconds; {MAX_SOUND_S:,} are possible")
    blocks, n = [], 0
    while len(block := file.read(rate, dtype="float32", always_2d=True)):
        blocks.append(block.mean(axis=1))
        n += len(block)
        if n > most:
            raise _refused(f"has a sound of more than {MAX_SOUND_S:,} seconds")
    samples = np.concatenate(blocks) if blocks else np.empty(0, np.float32)
    if n < _LEAST_SOUND_S * rate:
        raise _refused(f"has a sound of {n / rate:g} seconds; it must have {_LEAST_SOUND_S:g} at least")
    if not np.isfinite(samples).all():
        raise _refused("has a sound with samples that are no numbers")
    return samples


def _resampled(samples: npt.NDArray[np.float32], rate: int, wanted: int) -> npt.NDArray[np.float32]:
    if rate == wanted:
        return samples
    import soxr

    resampled: npt.NDArray[np.float32] = soxr.resample(samples, rate, wanted)
    return resampled


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest("prompt", message)


def _said(error: Exception) -> str:
    return (str(error) or type(error).__name__).rstrip(".").partition("\n")[0][:200]
