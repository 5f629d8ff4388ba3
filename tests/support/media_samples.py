"""Small images and audio files, made with the standard library only."""

from __future__ import annotations

import base64
import io
import math
import struct
import wave
import zlib


def png(width: int = 8, height: int = 8, color: tuple[int, int, int] = (255, 0, 0)) -> bytes:
    """An image of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes(color) * width) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def wav(seconds: float = 1.0, hertz: float = 440) -> bytes:
    """A tone, 16 kHz, mono."""
    rate, file = 16_000, io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        samples = (int(9000 * math.sin(2 * math.pi * hertz * i / rate)) for i in range(int(seconds * rate)))
        sound.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))
    return file.getvalue()


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def as_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{as_base64(data)}"


RED, BLUE = png(), png(color=(0, 0, 255))
TONE = wav()
