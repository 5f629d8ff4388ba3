"""Images and audio are decoded correctly and within limits, and any other file is refused with the reason."""

from __future__ import annotations

import io
import itertools
import random
import struct
import zlib

import numpy as np
import pytest
import soundfile
import soxr
from PIL import Image, ImageOps

from cppbatch import InvalidRequest
from cppbatch.engine.media import files as media_files
from cppbatch.engine.media.files import decode_audio, decode_image
from tests.support.media_files import (
    encoded,
    gif_of_many_comments,
    jpeg_of_many_scans,
    jpeg_of_many_segments,
    picture,
    tone,
    wav,
)

RATE = 16_000


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_every_format_gives_rgb_pixels_of_the_same_size(kind: str) -> None:
    pixels = decode_image(picture(1, size=(30, 20), kind=kind))
    assert pixels.shape == (20, 30, 3)
    assert pixels.dtype == np.uint8


def test_lossless_pixels_come_back_unchanged() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)
    np.testing.assert_array_equal(decode_image(encoded(Image.fromarray(pixels))), pixels)


def test_transparent_pixels_are_on_white() -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    assert decode_image(encoded(image)).tolist() == [[[255, 255, 255], [10, 20, 30]]]
    palette = Image.new("P", (1, 1), 0)
    assert decode_image(encoded(palette, transparency=0)).tolist() == [[[255, 255, 255]]]


def test_an_image_is_rotated_by_its_exif_orientation() -> None:
    image = Image.new("RGB", (3, 2), "black")
    image.putpixel((0, 0), (255, 255, 255))
    exif = image.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned = decode_image(encoded(image, exif=exif))
    assert turned.shape == (3, 2, 3)
    assert turned[0, 1].tolist() == [255, 255, 255]


def test_of_an_animation_the_first_frame_is_taken() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    pixels = decode_image(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert pixels[0, 0].tolist() == [255, 0, 0]


def test_sixteen_bits_keep_their_brightness() -> None:
    grey = Image.fromarray(np.array([[0, 32896, 65535]], np.uint16))
    assert decode_image(encoded(grey))[0, :, 0].tolist() == [0, 128, 255]


def header_of_png(width: int, height: int) -> bytes:
    """A PNG that says it is of this size, and has hardly any data."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header_of_png(8000, 8000), "8000 x 8000 pixels; the limit is 50,000,000 pixels"),
        (header_of_png(100_000, 100_000), "exceeds limit"),  # Pillow's own, which it checks first
        (header_of_png(10_000, 20), "the aspect ratio must not exceed 100:1"),
        (header_of_png(50, 50), "cannot be decoded"),
        (b"", "is not a PNG, JPEG, WEBP, GIF, BMP file"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not a PNG"),
        (wav(tone()), "is not a PNG"),
        (encoded(Image.new("RGB", (4, 4)), "TIFF"), "is not a PNG"),
    ],
    ids=["large", "bomb", "ribbon", "cut", "empty", "svg", "sound", "tiff"],
)
def test_an_unusable_image_is_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        decode_image(data)


def damaged(data: bytes, number: int) -> bytes:
    """Cut off, with bytes changed, or both."""
    rng = random.Random(number)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 2, 8, 64))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed[: rng.choice((len(data), len(data), rng.randrange(len(data))))])


def test_a_thousand_damaged_images_are_decoded_or_refused() -> None:
    files = [picture(i, size=(24, 20), kind=kind) for i, kind in enumerate(("PNG", "JPEG", "WEBP", "GIF", "BMP"))]
    messages: list[str] = []
    for number in range(1000):
        try:
            pixels = decode_image(damaged(files[number % len(files)], number))
        except InvalidRequest as error:
            messages.append(str(error))
        else:
            assert pixels.ndim == 3
    assert 200 < len(messages) < 1000
    assert not any(" object at 0x" in message for message in messages)


@pytest.mark.parametrize(
    "data",
    [jpeg_of_many_scans(4000, side=500), jpeg_of_many_segments(60_000), gif_of_many_comments(100_000)],
    ids=["scans", "segments", "comments"],
)
def test_a_small_file_that_takes_long_to_decode_is_refused(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Each read takes a second; the header of an image takes 30 reads. Few bytes are decoded between two."""
    timed = media_files._TimedFile
    files: list[io.BytesIO] = []

    def opened(data: bytes) -> io.BytesIO:
        files.append(timed(data))
        return files[0]

    monkeypatch.setattr(media_files, "_TimedFile", opened)
    monkeypatch.setattr(media_files, "thread_time", itertools.count().__next__)
    monkeypatch.setattr(media_files, "MAX_DECODE_S", 40)
    with pytest.raises(InvalidRequest, match=r"an image that takes more than 40 seconds to decode"):
        decode_image(data)
    assert files[0].tell() < len(data) / 2


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_larger_than_a_strip_is_upright_in_every_orientation(
    monkeypatch: pytest.MonkeyPatch, orientation: int
) -> None:
    monkeypatch.setattr(media_files, "_STRIP_PIXELS", 50)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (13, 20, 3), np.uint8))
    exif = image.getexif()
    exif[0x0112] = orientation
    data = encoded(image, exif=exif)
    wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(decode_image(data), np.asarray(wanted))


def written(samples: np.ndarray, kind: str, *, rate: int = RATE, **options: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, **options)
    return file.getvalue()


def test_samples_at_the_encoders_rate_come_back_unchanged() -> None:
    samples = tone(0.2)
    np.testing.assert_allclose(decode_audio(wav(samples), RATE), samples, atol=1e-4)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "MP3"])
def test_every_format_is_resampled_to_the_encoders_rate(kind: str) -> None:
    samples = decode_audio(written(tone(1.0, rate=44_100), kind, rate=44_100), RATE)
    assert samples.dtype == np.float32
    assert abs(len(samples) - RATE) < 0.1 * RATE  # MP3 adds silence
    spectrum = np.abs(np.fft.rfft(samples))
    assert abs(spectrum.argmax() * RATE / len(samples) - 440) < 3


def test_channels_are_averaged() -> None:
    left, right = np.full(400, 0.5, np.float32), np.full(400, -0.25, np.float32)
    np.testing.assert_allclose(decode_audio(wav(np.stack([left, right], 1)), RATE), 0.125, atol=1e-4)


def test_audio_that_is_too_long_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_files, "MAX_SOUND_S", 2)
    bomb = written(np.zeros(60 * RATE, np.float32), "FLAC")  # silence takes next to nothing
    assert len(bomb) < 100_000
    with pytest.raises(InvalidRequest, match="60 seconds; the limit is 2 seconds"):
        decode_audio(bomb, RATE)


@pytest.mark.parametrize(("rate", "channels"), [(655_350, 1), (48_000, 8), (100, 32)])
def test_seconds_rate_and_channels_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch, rate: int, channels: int
) -> None:
    monkeypatch.setattr(media_files, "MAX_SAMPLES", rate * channels)
    assert len(decode_audio(wav(np.zeros((rate, channels), np.float32), rate=rate), RATE)) == RATE
    longer = wav(np.zeros((2 * rate, channels), np.float32), rate=rate)
    message = f"2 seconds; the limit is 1 seconds with {rate:,} samples per second and {channels} channels"
    with pytest.raises(InvalidRequest, match=message):
        decode_audio(longer, RATE)


def test_audio_that_takes_long_to_decode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_files, "MAX_DECODE_S", 0.01)
    with pytest.raises(InvalidRequest, match=r"takes more than 0\.01 seconds to decode"):
        decode_audio(written(np.zeros(600 * RATE, np.float32), "FLAC"), RATE)


def test_blocks_are_resampled_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, 44_100).astype(np.float32)
    data = written(samples, "WAV", rate=44_100, subtype="FLOAT")
    monkeypatch.setattr(media_files, "_BLOCK_SAMPLES", 1000)
    np.testing.assert_allclose(decode_audio(data, RATE), soxr.resample(samples, 44_100, RATE), atol=1e-5)


def test_a_header_with_a_false_length_does_not_bypass_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_files, "MAX_SOUND_S", 2)
    data = bytearray(written(np.zeros(60 * RATE, np.float32), "FLAC"))
    data[21] &= 0xF0  # the number of samples, 36 bits: 0 means unknown
    data[22:26] = b"\0\0\0\0"
    with pytest.raises(
        InvalidRequest, match=r"longer than its header states; the limit is 2 seconds|cannot be decoded"
    ):
        decode_audio(bytes(data), RATE)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be decoded"),
        (picture(), "cannot be decoded"),
        (wav(np.zeros((10, 1024), np.float32)), "1024 channels and 16000 samples per second"),
        (wav(tone(0.1), rate=800_000), "800000 samples per second"),
        (wav(tone(0.001)), "the minimum is 0.01"),
        (written(tone(), "AIFF"), "in the format AIFF; it must be WAV, MP3 or FLAC"),
        (written(np.full(400, np.nan, np.float32), "WAV", subtype="FLOAT"), "samples that are not finite numbers"),
    ],
    ids=["empty", "picture", "channels", "rate", "short", "aiff", "nan"],
)
def test_unusable_audio_is_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        decode_audio(data, RATE)


def test_a_thousand_damaged_audio_files_are_decoded_or_refused() -> None:
    files = [written(tone(0.1), kind) for kind in ("WAV", "FLAC", "MP3")]
    messages: list[str] = []
    for number in range(1000):
        try:
            samples = decode_audio(damaged(files[number % len(files)], number), RATE)
        except InvalidRequest as error:
            messages.append(str(error))
        else:
            assert np.isfinite(samples).all()
    assert 50 < len(messages) < 1000
    assert not any(" object at 0x" in message for message in messages)
