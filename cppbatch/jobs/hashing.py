"""Short hashes, for what is compared and never shown."""

from __future__ import annotations

from hashlib import blake2b


def hash64(data: bytes) -> int:
    """64 bits, signed, as SQLite keeps whole numbers."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
