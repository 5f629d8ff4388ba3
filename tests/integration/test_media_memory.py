"""Small files that are large when decoded: each takes hardly more memory than what comes out of it, or is refused.

Each file is decoded in a process that has nothing else, and its peak is the kernel's (VmHWM), because libraries in C
take most of it.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from tests.support.media_files import encoded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_CHILD = """
import ctypes, json, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import PIL.Image, soundfile, soxr
from cppbatch.engine.media.files import decode_audio, decode_image
from cppbatch.engine.media.input import MediaInput
from cppbatch.engine.request import Media
from cppbatch.errors import InvalidRequest

class Encoder:
    sample_rate = 16_000
    def split_image(self, pixels): return []
    def split_audio(self, samples): return []

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

def measured(work):
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    before = status("VmRSS")
    try:
        made = work()
        said = "" if made is None else made.nbytes
    except InvalidRequest as error:
        said = str(error)
    return status("VmHWM") - before, said

def both(data, kind):
    media = MediaInput(Encoder())
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda data: media.n_tokens(Media(kind, data), lambda: False), [data, data + b" "]))

decode = decode_image if sys.argv[1] == "image" else lambda data: decode_audio(data, 16_000)
for path in sys.argv[3:]:
    data = Path(path).read_bytes()
    work = (lambda: decode(data)) if sys.argv[2] == "1" else (lambda: both(data, sys.argv[1]))
    print(json.dumps(measured(work)))
"""
_MB = 1_000_000
_SIDE = 2000  # of images; 50 million pixels take seconds


def peaks(folder: Path, kind: str, files: dict[str, bytes], n_at_once: int = 1) -> dict[str, tuple[int, Any]]:
    """For each file the bytes that decoding took at its peak, and the bytes of what came out or why it was refused."""
    paths = [folder / str(i) for i in range(len(files))]
    for path, data in zip(paths, files.values(), strict=True):
        path.write_bytes(data)
    command = [sys.executable, "-c", _CHILD, kind, str(n_at_once), *map(str, paths)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return dict(zip(files, map(json.loads, done.stdout.splitlines()), strict=True))


def sound(kind: str, rate: int, channels: int, seconds: float) -> bytes:
    """Silence."""
    if kind == "MP3" and seconds > 1:  # written slowly; its frames may be repeated
        one = sound(kind, rate, channels, 1)
        return one[one.index(one[:2], 2) :] * round(seconds)  # without the first one, which says how many there are
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", rate, channels, format=kind) as writer:
        for _ in range(round(4 * seconds)):
            writer.write(np.zeros((rate // 4, channels), np.int16))
    return file.getvalue()


SOUNDS = [
    ("FLAC", 655_350, 1, 30),
    ("FLAC", 96_000, 8, 20),
    ("FLAC", 16_000, 1, 900),
    ("MP3", 48_000, 2, 60),
    ("WAV", 768_000, 16, 1),
    ("WAV", 44_100, 2, 60),
    ("WAV", 100, 1, 900),
]


def test_audio_takes_hardly_more_memory_than_its_samples_at_the_encoders_rate(tmp_path: Path) -> None:
    files = {" ".join(map(str, form)): sound(*form) for form in SOUNDS}
    taken = peaks(tmp_path, "audio", files)
    for (name, (n, n_result)), (*_, seconds) in zip(taken.items(), SOUNDS, strict=True):
        assert n_result == pytest.approx(4 * 16_000 * seconds, rel=0.1), name
        assert n < 1.2 * n_result + 32 * _MB, (name, n)


def picture(mode: str, kind: str, **options: Any) -> bytes:
    """One colour, to be turned."""
    if kind in ("PNG", "JPEG", "WEBP"):
        exif = options["exif"] = Image.Exif()
        exif[0x0112] = 6
    return encoded(Image.new(mode, (_SIDE, _SIDE)), kind, **options)


def test_an_image_takes_hardly_more_memory_than_its_pixels(tmp_path: Path) -> None:
    """Bytes per pixel: 3 of the result and 1 or 4 of Pillow; libjpeg holds a progressive image once more, and libwebp
    three copies."""
    frames = [Image.new("RGB", (_SIDE, _SIDE), (i, 0, 0)) for i in range(4)]
    many: dict[str, Any] = {"save_all": True, "append_images": frames[1:]}
    files = {
        "PNG 1": (5, picture("1", "PNG")),
        "PNG P": (5, picture("P", "PNG")),
        "PNG LA": (8, picture("LA", "PNG")),
        "PNG RGB": (8, picture("RGB", "PNG")),
        "PNG RGBA": (8, picture("RGBA", "PNG")),
        "PNG of 16 bits": (6, picture("I;16", "PNG")),
        "PNG with frames": (8, encoded(frames[0], "PNG", **many)),
        "GIF with frames": (5, encoded(frames[0], "GIF", **many)),
        "BMP": (8, picture("RGB", "BMP")),
        "JPEG": (8, picture("RGB", "JPEG")),
        "JPEG, progressive": (11, picture("RGB", "JPEG", progressive=True, subsampling=0)),
        "JPEG, progressive, CMYK": (13, picture("CMYK", "JPEG", progressive=True, subsampling=0)),
        "WebP": (16, picture("RGB", "WEBP")),
        "WebP, lossless": (17, picture("RGBA", "WEBP", lossless=True)),
        "WebP with frames": (16, encoded(frames[0], "WEBP", **many)),
    }
    taken = peaks(tmp_path, "image", {name: data for name, (_, data) in files.items()})
    for (name, (n, n_result)), (bound, _) in zip(taken.items(), files.values(), strict=True):
        assert n_result == 3 * _SIDE**2, name
        assert n < bound * _SIDE**2 + 8 * _MB, (name, n)


def test_two_at_once_take_hardly_more_than_one(tmp_path: Path) -> None:
    image, audio = {"PNG": picture("RGB", "PNG")}, {"WAV": sound("WAV", 100, 1, 600)}
    for kind, files in (("image", image), ("audio", audio)):
        ((one, _),) = peaks(tmp_path, kind, files).values()
        ((two, _),) = peaks(tmp_path, kind, files, n_at_once=2).values()
        assert two < 1.2 * one + 8 * _MB
