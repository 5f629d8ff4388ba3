"""The tokens and the state of a cached prefix in a file. It is laid out as llama.cpp's files of one sequence:

    header   "ggsq", a version, the number of words that follow (numbers are uint32)
    words    -1, 1, the number of tokens, the tokens; or, as older programs write it, only the tokens
    state    what `llama_state_seq_get_data` wrote
    footer   JSON with what the state belongs to, its length, "cppb"

llama.cpp's files have no footer. Without it nobody knows whose state it is, so such files are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cppbatch.errors import InvalidRequest

_MAGIC, _VERSION = b"qsgg", 2  # LLAMA_STATE_SEQ_MAGIC, little-endian; LLAMA_STATE_SEQ_VERSION
_PACKED, _PACKED_VERSION = 0xFFFFFFFF, 1
_FOOTER_MAGIC = b"cppb"
_N_SAMPLES, _SAMPLE_BYTES = 32, 1 << 15

Tokens = npt.NDArray[np.int32]


class Footer(msgspec.Struct, forbid_unknown_fields=True):
    """What a state belongs to."""

    model: str
    """The model's name, for messages."""
    digest: str
    """`file_digest` of the model."""
    cache_types: tuple[str, str]
    """Of keys and values."""
    cache_salt: str
    adapters: list[tuple[str, float]]
    """The digest and the scale of each LoRA adapter that the tokens were computed with."""
    form: dict[str, Any]
    """How the context that wrote the state laid it out."""
    checksum: int
    """CRC-32 of the tokens and the state."""


def file_digest(path: str | Path) -> str:
    """Tells files of weights apart in milliseconds: a digest of their sizes and of samples from all over them."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest.update(str(size).encode())
        for i in range(_N_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * i // (_N_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def checksum(tokens: Tokens, state: npt.NDArray[np.uint8]) -> int:
    """`Footer.checksum`."""
    return zlib.crc32(state.data, zlib.crc32(np.ascontiguousarray(tokens).data))


def write_slot_file(path: Path, tokens: Tokens, state: npt.NDArray[np.uint8], footer: Footer) -> int:
    """Writes the whole file or nothing, for this user only. Returns its bytes. Raises `OSError`."""
    words = np.array([_VERSION, 3 + len(tokens), _PACKED, _PACKED_VERSION, len(tokens)], np.uint32)
    note = msgspec.json.encode(footer)
    handle, temporary = tempfile.mkstemp(prefix=".slot-", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            for part in (_MAGIC, words.data, np.ascontiguousarray(tokens, np.int32).data, state.data, note):
                file.write(part)
            file.write(np.uint32(len(note)).tobytes() + _FOOTER_MAGIC)
            n_bytes = file.tell()
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return n_bytes


def read_slot_file(path: Path) -> tuple[Tokens, npt.NDArray[np.uint8], Footer, int]:
    """The tokens, the state, the footer and the number of bytes of a file.

    Raises `InvalidRequest` for a file that is missing, damaged or of another kind.
    """
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise InvalidRequest("filename", f"{path.name!r} cannot be read: {error.strerror}") from error
    try:
        head, n_words = data[:8].tobytes(), _words(data, 8, 1)[0]
        if head != _MAGIC + np.uint32(_VERSION).tobytes() or data[-4:].tobytes() != _FOOTER_MAGIC:
            raise ValueError
        words = _words(data, 12, n_words)
        footer_at = data.size - 8 - _words(data, data.size - 8, 1)[0]
        footer = msgspec.json.decode(data[footer_at:-8].tobytes(), type=Footer)
        packed = n_words >= 3 and words[0] == _PACKED
        if packed and (words[1], words[2]) != (_PACKED_VERSION, n_words - 3):
            raise ValueError
        tokens = words[3 if packed else 0 :].astype(np.int32)
        state = data[12 + 4 * n_words : footer_at]
        if checksum(tokens, state) != footer.checksum:
            raise ValueError
    except (ValueError, IndexError, msgspec.DecodeError):
        raise InvalidRequest(
            "filename", f"{path.name!r} is no whole file of a slot of this program; save the slot again"
        ) from None
    return tokens, state, footer, data.size


def _words(data: npt.NDArray[np.uint8], at: int, n: int) -> npt.NDArray[np.int64]:
    """Raises `ValueError` for words beyond the end."""
    if at < 0 or at + 4 * int(n) > data.size:
        raise ValueError
    words: npt.NDArray[np.int64] = data[at : at + 4 * int(n)].copy().view(np.uint32).astype(np.int64)
    return words
