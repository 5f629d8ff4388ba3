"""Hashes by which a job knows its lines and its names again."""

from __future__ import annotations

from hashlib import blake2b


def hash64(data: bytes) -> int:
    """A hash of 64 bits, signed, as SQLite keeps an integer; the same on every machine and in every version."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
