"""The tokens and the state of a cached prefix in a file, in the format of llama.cpp's sequence files:

    header   "ggsq", a version, the number of words that follow (numbers are uint32)
    words    -1, 1, the number of tokens, the tokens; or, from older programs, only the tokens
    state    what `llama_state_seq_get_data` wrote
    footer   JSON that identifies the state, its length, "cppb"

llama.cpp's files have no footer. Without it, the state cannot be identified, so such files are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from cppbatch.config import EngineConfig
from cppbatch.engine.kv.memory import OUT_OF_MEMORY
from cppbatch.engine.kv.pool import KVPool
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.sequence import SavedState
from cppbatch.errors import CppBatchError, InvalidRequest, ModelError
from cppbatch.models.digest import WeightFiles
from cppbatch.regular_files import refuse_special

_MAGIC, _VERSION = b"qsgg", 2  # LLAMA_STATE_SEQ_MAGIC, little-endian; LLAMA_STATE_SEQ_VERSION
_PACKED, _PACKED_VERSION = 0xFFFFFFFF, 1
_FOOTER_MAGIC = b"cppb"

Tokens = npt.NDArray[np.int32]


class Footer(msgspec.Struct, forbid_unknown_fields=True):
    """Identifies a state."""

    model: str
    """The model's name, for messages."""
    digest: str
    """`model_digest` of the model."""
    cache_types: tuple[str, str]
    """The types of keys and values."""
    cache_salt: str
    """The `cache_salt`: unchanged in a slot's file; as SHA-256 in the files of `--prefix-cache-disk`."""
    adapters: list[tuple[str, float]]
    """The digest and scale of each LoRA adapter used to compute the tokens."""
    form: dict[str, Any]
    """The layout of the state in the context that wrote it."""
    settings: dict[str, str] = {}
    """Further settings that the state depends on (`Runtime.state_settings`), and the digest of the projector."""
    checksum: int = 0
    """CRC-32 of the tokens, the state, and the rest of the footer."""


def slot_file_parts(tokens: Tokens, state: npt.NDArray[np.uint8], footer: Footer) -> list[memoryview]:
    """The content of a file, in order. Computes the checksum of `footer`."""
    tokens = np.ascontiguousarray(tokens, np.int32)
    words = np.array([_VERSION, 3 + len(tokens), _PACKED, _PACKED_VERSION, len(tokens)], np.uint32)
    footer = msgspec.structs.replace(footer, checksum=_checksum(tokens, state, footer))
    note = msgspec.json.encode(footer)
    end = note + np.uint32(len(note)).tobytes() + _FOOTER_MAGIC
    return [memoryview(part).cast("B") for part in (_MAGIC, words.data, tokens.data, state.data, end) if len(part)]


def _checksum(tokens: Tokens, state: npt.NDArray[np.uint8], footer: Footer) -> int:
    rest = msgspec.json.encode(msgspec.structs.replace(footer, checksum=0))
    return zlib.crc32(rest, zlib.crc32(state.data, zlib.crc32(tokens.data)))


def write_slot_file(path: Path, tokens: Tokens, state: npt.NDArray[np.uint8], footer: Footer) -> int:
    """Writes a file atomically, readable by this user only. Returns its bytes. Raises `OSError`."""
    handle, temporary = tempfile.mkstemp(prefix=".slot-", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            for part in slot_file_parts(tokens, state, footer):
                file.write(part)
            n_bytes = file.tell()
        refuse_special(path)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return n_bytes


def read_slot_file(path: Path) -> tuple[Tokens, npt.NDArray[np.uint8], Footer, int]:
    """The tokens, the state, the footer and the number of bytes of a file.

    Raises `InvalidRequest` for a file that is missing, damaged or of another type.
    """
    try:
        refuse_special(path)
        return parse_slot_file(np.fromfile(path, np.uint8))
    except OSError as error:
        raise InvalidRequest("filename", f"{path.name!r} cannot be read: {error.strerror}") from error
    except ValueError:
        raise InvalidRequest("filename", f"{path.name!r} is not a complete slot file; save the slot again") from None


def parse_slot_file(data: npt.NDArray[np.uint8]) -> tuple[Tokens, npt.NDArray[np.uint8], Footer, int]:
    """Reads the content of a file (`read_slot_file`), without copying. Raises `ValueError` if it is damaged."""
    footer, n_note = _footer(data[-8:].tobytes(), lambda n: data[data.size - 8 - n : data.size - 8].tobytes())
    tokens, state_at = _tokens(data)
    state = data[state_at : data.size - 8 - n_note]
    if _checksum(tokens, state, footer) != footer.checksum:
        raise ValueError("the checksum does not match")
    return tokens, state, footer, data.size


def read_slot_head(path: Path) -> tuple[Tokens, Footer, int]:
    """The tokens, the footer and the number of bytes of a file, without its state, not verified.

    Raises `OSError`, and `ValueError` for a file that is damaged or of another type.
    """
    refuse_special(path)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < 20:
            raise ValueError("the file is too short")
        file.seek(size - 8)

        def before_end(n: int) -> bytes:
            file.seek(max(0, size - 8 - n))
            return file.read(n)

        footer, _ = _footer(file.read(8), before_end)
        file.seek(0)
        head = file.read(12)
        n_words = int(np.frombuffer(head[8:], np.uint32)[0])
        if 12 + 4 * n_words > size:
            raise ValueError("the file is too short for its tokens")
        tokens, _ = _tokens(np.frombuffer(head + file.read(4 * n_words), np.uint8))
    return tokens, footer, size


def _footer(end: bytes, before_end: Callable[[int], bytes]) -> tuple[Footer, int]:
    """The footer and the bytes of its JSON. `end`: the last 8 bytes of the file; `before_end`: reads bytes before
    them."""
    if len(end) != 8 or end[4:] != _FOOTER_MAGIC:
        raise ValueError("the footer is missing")
    n_note = int(np.frombuffer(end[:4], np.uint32)[0])
    try:
        return msgspec.json.decode(before_end(n_note), type=Footer), n_note
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error


def _tokens(data: npt.NDArray[np.uint8]) -> tuple[Tokens, int]:
    """The tokens at the start of a file, and where the state starts."""
    if data[:8].tobytes() != _MAGIC + np.uint32(_VERSION).tobytes():
        raise ValueError("it is not a sequence file")
    n_words = _words(data, 8, 1)[0]
    words = _words(data, 12, n_words)
    packed = n_words >= 3 and words[0] == _PACKED
    if packed and (words[1], words[2]) != (_PACKED_VERSION, n_words - 3):
        raise ValueError("the number of tokens is wrong")
    return words[3 if packed else 0 :].astype(np.int32), 12 + 4 * int(n_words)


def _words(data: npt.NDArray[np.uint8], at: int, n: int) -> npt.NDArray[np.int64]:
    """Raises `ValueError` for words beyond the end."""
    if at < 0 or at + 4 * int(n) > data.size:
        raise ValueError
    words: npt.NDArray[np.int64] = data[at : at + 4 * int(n)].copy().view(np.uint32).astype(np.int64)
    return words


AdapterDigests = tuple[tuple[str, float], ...]
"""The digests of the files of an `AdapterSet`, with their scales."""


def weight_files(config: EngineConfig) -> WeightFiles:
    """The files that determine the states of an engine. Created before the engine loads them."""
    others = [path for path, _ in (*config.lora, *config.control_vectors)] + [config.mmproj] * bool(config.mmproj)
    return WeightFiles(Path(config.model_path), map(Path, others))


class StateKey:
    """The key of an engine's states. Thread-safe.

    `settings`, `short` and all digests can be used once `files` are known.
    """

    def __init__(self, info: ModelInfo, config: EngineConfig, settings: Mapping[str, str], files: WeightFiles) -> None:
        """`settings`: see `Runtime.state_settings`. `files`: `weight_files` of `config`."""
        self.model = info.name
        self.cache_types = (config.cache_type_k, config.cache_type_v)
        self.files = files
        self._settings = settings
        self._adapters = [Path(path) for path, _ in (*config.lora, *config.control_vectors)]
        self._projector = config.mmproj
        self._layers = config.control_vector_layers if config.control_vectors else ()

    @property
    def digest(self) -> str:
        """`model_digest` of the model."""
        return self.files.of_model

    @cached_property
    def settings(self) -> dict[str, str]:
        """The settings, with the digest of the projector, which determines the cells of images and audio, and the
        layers of control vectors."""
        found = dict(self._settings)
        if self._projector:
            found["mmproj"] = self.files.digest(Path(self._projector))
        if self._layers:
            found["control_vector_layers"] = str(self._layers)
        return found

    @cached_property
    def _adapter_digests(self) -> list[str]:
        return [self.files.digest(path) for path in self._adapters]

    def adapter_digests(self, adapters: AdapterSet) -> AdapterDigests:
        """The digests of loaded adapters."""
        return tuple(sorted((self._adapter_digests[number], scale) for number, scale in adapters))

    def adapter_set(self, adapters: Sequence[tuple[str, float]]) -> AdapterSet | None:
        """The loaded adapters with these digests; None if one of them is not loaded."""
        digests = self._adapter_digests
        if any(digest not in digests for digest, _ in adapters):
            return None
        return tuple(sorted((digests.index(digest), scale) for digest, scale in adapters))

    def footer(self, cache_salt: str, adapters: AdapterDigests, state: SavedState) -> Footer:
        """The footer for a file with this state. `cache_salt`: as it is in the file."""
        return Footer(self.model, self.digest, self.cache_types, cache_salt, list(adapters), state.form, self.settings)

    @cached_property
    def short(self) -> str:
        """A short hash of the model, cache types and settings, for file names."""
        parts = (self.digest, self.cache_types, sorted(self.settings.items()))
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]


SlotActionName = Literal["save", "restore", "erase"]


class SlotReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of saving, restoring or erasing."""

    n_tokens: int
    n_bytes: int = 0
    """The size of the file."""


class SlotPrefix(msgspec.Struct, frozen=True):
    """A cached prefix being saved to or restored from a file."""

    tokens: Tokens
    cache_salt: str
    adapters: AdapterSet
    state: SavedState
    n_bytes: int = 0
    """The size of its file."""


class Slots:
    """Saves and restores prefixes. `take`, `put` and `erase` run between two steps; `write` and `read` on any thread.

    A request only belongs to a slot if it names it. All requests use all cached prefixes, including those of slots.
    """

    def __init__(self, kv: KVPool, key: StateKey) -> None:
        self._kv = kv
        self._key = key

    def take(self, slot: int) -> SlotPrefix:
        """A copy of a slot's prefix. Raises `InvalidRequest` if it has none."""
        try:
            found = self._kv.state_of_slot(slot)
        except OUT_OF_MEMORY as error:
            raise InvalidRequest("id_slot", f"{slot}: cannot save its state: {error}") from error
        if found is None:
            how = f"send a request with id_slot {slot} and at least 20 tokens first"
            raise InvalidRequest("id_slot", f"slot {slot} has no cached prefix: {how}")
        cached, state = found
        cache_salt, adapters = cached.salt
        return SlotPrefix(cached.tokens, cache_salt, adapters, state)

    def write(self, path: Path, prefix: SlotPrefix) -> SlotReport:
        """Writes a prefix to a file, replacing it. Raises `InvalidRequest` on failure."""
        self._read_weights(path)
        data = prefix.state.data
        footer = self._key.footer(prefix.cache_salt, self._key.adapter_digests(prefix.adapters), prefix.state)
        try:
            n_bytes = write_slot_file(path, prefix.tokens, data, footer)
        except OSError as error:
            raise InvalidRequest("filename", f"{path.name!r} cannot be written: {error.strerror}") from error
        return SlotReport(n_tokens=len(prefix.tokens), n_bytes=n_bytes)

    def read(self, path: Path) -> SlotPrefix:
        """Reads a file. Raises `InvalidRequest` if it is damaged, or written with other settings or another version."""
        tokens, data, footer, n_bytes = read_slot_file(path)
        key = self._key
        self._read_weights(path)
        if footer.digest != key.digest:
            message = f"{path.name!r} was saved for model {footer.model!r}; this server runs {key.model!r}"
            if footer.model == key.model:
                message += " with other weights; save it again with this server"
            raise InvalidRequest("filename", message)
        if footer.cache_types != key.cache_types:
            theirs, ours = ("/".join(types) for types in (footer.cache_types, key.cache_types))
            message = f"{path.name!r} has KV cache types {theirs}; this server uses {ours} (-ctk, -ctv)"
            raise InvalidRequest("filename", message)
        if differing := sorted(name for name, _ in footer.settings.items() ^ key.settings.items()):
            message = f"{path.name!r} was saved with other settings ({', '.join(dict.fromkeys(differing))})"
            raise InvalidRequest("filename", f"{message}; save it again with this server")
        adapters = key.adapter_set(footer.adapters)
        if adapters is None:
            message = f"{path.name!r} was computed with a LoRA adapter or control vector that is not loaded"
            raise InvalidRequest("filename", message)
        try:
            state = self._kv.read_state(data, footer.form)
        except (TypeError, CppBatchError) as error:
            message = f"{path.name!r} was saved by another version of cppbatch: {error}; save it again with this server"
            raise InvalidRequest("filename", message) from error
        return SlotPrefix(tokens, footer.cache_salt, adapters, state, n_bytes)

    def _read_weights(self, path: Path) -> None:
        try:
            self._key.files.read()
        except ModelError as error:
            raise InvalidRequest("filename", f"{path.name!r} cannot be saved or restored: {error}") from error

    def put(self, slot: int, prefix: SlotPrefix) -> SlotReport:
        """Adds it to this slot as a cached prefix in host memory. Raises `InvalidRequest` if it does not fit."""
        salt = prefix.cache_salt, prefix.adapters
        if not self._kv.restore_slot(slot, prefix.tokens, salt, prefix.state):
            message = f"has a state of {prefix.state.n_bytes:,} bytes, which does not fit into --prefix-cache-ram"
            raise InvalidRequest("filename", message)
        return SlotReport(n_tokens=len(prefix.tokens), n_bytes=prefix.n_bytes)

    def erase(self, slot: int) -> SlotReport:
        """Removes the cached prefixes that start with the tokens of the slot's last request."""
        return SlotReport(n_tokens=self._kv.erase_slot(slot))
