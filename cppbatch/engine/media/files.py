"""Decodes untrusted image and audio files, with limits on memory and time.

An image or audio clip takes hardly more memory than its pixels or samples, because both are converted in small blocks.
The decoders are the extra `media`.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from time import thread_time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cppbatch.engine.request import Modality
from cppbatch.errors import ConfigError, InvalidRequest
from cppbatch.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 50_000_000
"""Per image: the size of a large camera's. Takes 3 bytes per pixel, and 7 to 20 while Pillow decodes it."""
MAX_ASPECT = 100
"""Maximum aspect ratio of an image: encoders scale it, and a short side would vanish."""
MAX_SOUND_S = 1800
"""Maximum seconds of audio: half an hour."""
MAX_SAMPLES = MAX_SOUND_S * 48_000 * 4
"""Maximum samples over all channels of an audio file: half an hour of four channels, or of two at 96 kHz."""
MAX_DECODE_S = 10.0
"""Maximum seconds of CPU time per file. An image of 300 KB can rewrite its pixels thousands of times."""
_LEAST_SOUND_S = 0.01
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow's parsers for other formats are not used
_MAX_SAMPLE_RATE = 768_000
_MAX_CHANNELS = 32
_SOUNDS = ("WAV", "WAVEX", "RF64", "MP3", "MPEG", "FLAC", "OGG")
_STRIP_PIXELS = 1 << 18  # converted to RGB at once
_BLOCK_SAMPLES = 1 << 18  # of all channels, decoded and resampled at once
_DECODERS: dict[Modality, tuple[str, ...]] = {"image": ("PIL",), "audio": ("soundfile", "soxr")}


def check_decoders(*kinds: Modality) -> None:
    """Raises `ConfigError` if a package that decodes files of these kinds is missing."""
    for kind in kinds:
        for module in _DECODERS[kind]:
            require(module, f"{kind} input")


def _require_decoders(kind: Modality) -> None:
    try:
        check_decoders(kind)
    except ConfigError as error:
        raise _refusal(f"contains {kind} data, but {error}") from error


def decode_image(data: bytes) -> npt.NDArray[np.uint8]:
    """The pixels of an image, uint8[height, width, 3] in RGB, upright; the first of several frames.

    Transparent pixels are on white. Raises `InvalidRequest` for data that is not an image in a known format, is broken
    or has too many pixels, and without Pillow.
    """
    _require_decoders("image")
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own pixel limit, and about odd metadata
            with Image.open(_TimedFile(data), formats=_IMAGE_FORMATS) as file:
                _check_size(*file.size)
                file.decodermaxblock = 4096  # bytes that Pillow decodes between two checks of the time
                file.load()
                return _upright(file)
    except InvalidRequest:
        raise
    except UnidentifiedImageError:
        raise _refusal(f"contains an image that is not a {', '.join(_IMAGE_FORMATS)} file") from None
    except Exception as error:  # damaged files raise almost any exception
        raise _refusal(f"contains an image that cannot be decoded: {_format_error(error)}") from error


class _TimedFile(io.BytesIO):
    """A file that raises `InvalidRequest` if the thread that created it has used too much CPU time."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._end = thread_time() + MAX_DECODE_S

    def read(self, size: int | None = -1, /) -> bytes:
        if thread_time() > self._end:
            raise _refusal(
                f"contains an image that takes more than {MAX_DECODE_S:g} seconds to decode; send a smaller image"
            )
        return super().read(size)


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise _refusal(f"contains an image of {width} x {height} pixels; the limit is {MAX_PIXELS:,} pixels")
    if not width or not height or max(width, height) > MAX_ASPECT * min(width, height):
        raise _refusal(
            f"contains an image of {width} x {height} pixels; the aspect ratio must not exceed {MAX_ASPECT}:1"
        )


def _upright(image: Image) -> npt.NDArray[np.uint8]:
    """The pixels in RGB, rotated according to the Exif data. Converts strip by strip: a copy of the whole image would
    take 4 bytes per pixel."""
    width, height = image.size
    turn = image.getexif().get(0x0112)
    lies = turn in (5, 6, 7, 8)
    upright = np.empty((width, height, 3) if lies else (height, width, 3), np.uint8)
    pixels = upright.swapaxes(0, 1) if lies else upright  # as in the file
    pixels = pixels[:: -1 if turn in (3, 4, 6, 7) else 1, :: -1 if turn in (2, 3, 7, 8) else 1]
    n = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, n):
        bottom = min(top + n, height)
        pixels[top:bottom] = np.asarray(_on_white(image.crop((0, top, width, bottom))))
    return upright


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
    """The samples of audio, float32[n] at `sample_rate`: the mean of its channels.

    Raises `InvalidRequest` for data that is not audio in a known format, is broken or too long, and without the
    decoders.
    """
    _require_decoders("audio")
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            return _resample(file, sample_rate)
    except InvalidRequest:
        raise
    except soundfile.LibsndfileError as error:  # its text contains the address of the file object
        raise _undecodable_sound(error.error_string) from error
    except Exception as error:  # almost anything for a damaged file
        raise _undecodable_sound(_format_error(error)) from error


def _resample(file: Any, sample_rate: int) -> npt.NDArray[np.float32]:
    """All samples, float32[n] at `sample_rate`. Read in blocks: at the file's rate they may take 50 times the
    memory."""
    import soxr

    rate, samples = file.samplerate, bytearray()  # grows in place
    stream = None if rate == sample_rate else soxr.ResampleStream(rate, sample_rate, 1, dtype="float32")
    for block in _blocks(file, sample_rate):
        resampled = stream.resample_chunk(block) if stream else block
        samples += resampled.data.cast("B")
    if stream:
        samples += stream.resample_chunk(np.empty(0, np.float32), last=True).data.cast("B")
    return np.frombuffer(samples, np.float32)


def _blocks(file: Any, sample_rate: int) -> Iterator[npt.NDArray[np.float32]]:
    """The means of the channels, float32[n] each: blocks that are small before and after resampling."""
    rate, channels, frames = file.samplerate, file.channels, file.frames
    if file.format not in _SOUNDS:
        raise _refusal(f"contains audio in the format {file.format}; it must be WAV, MP3 or FLAC")
    if not 0 < rate <= _MAX_SAMPLE_RATE or not 0 < channels <= _MAX_CHANNELS:
        raise _refusal(
            f"contains audio with {channels} channels and {rate} samples per second; the limits are {_MAX_CHANNELS} "
            f"channels and {_MAX_SAMPLE_RATE:,} samples per second"
        )
    most = min(MAX_SOUND_S * rate, MAX_SAMPLES // channels)
    limit = f"the limit is {most / rate:,.0f} seconds with {rate:,} samples per second and {channels} channels"
    if most < frames < 2**62:
        raise _refusal(f"contains audio of {frames / rate:,.0f} seconds; {limit}")
    n, end = 0, thread_time() + MAX_DECODE_S
    size = max(1, min(_BLOCK_SAMPLES // channels, _BLOCK_SAMPLES * rate // sample_rate))
    while len(block := file.read(size, dtype="float32", always_2d=True)):
        n += len(block)
        if n > most:  # contrary to the header
            raise _refusal(f"contains audio that is longer than its header states; {limit}")
        if thread_time() > end:
            raise _refusal(
                f"contains audio that takes more than {MAX_DECODE_S:g} seconds to decode; send a shorter recording"
            )
        mixed = block.mean(axis=1)
        if not np.isfinite(mixed).all():
            raise _refusal("contains audio with samples that are not finite numbers")
        yield mixed
    if n < _LEAST_SOUND_S * rate:
        raise _refusal(f"contains audio of {n / rate:g} seconds; the minimum is {_LEAST_SOUND_S:g}")


def _undecodable_sound(reason: str) -> InvalidRequest:
    return _refusal(f"contains audio that cannot be decoded: {reason.rstrip('.')} (it must be WAV, MP3 or FLAC)")


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest("prompt", message)


def _format_error(error: Exception) -> str:
    return (str(error) or type(error).__name__).rstrip(".").partition("\n")[0][:200]
