"""Slots: a request may name one (`id_slot`), and the cached prefix that it leaves can be kept in a file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from cppbatch.config import EngineConfig
from cppbatch.engine.kv_pool import OUT_OF_MEMORY, KVPool
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.radix_tree import Tokens
from cppbatch.engine.sequence import SavedState
from cppbatch.engine.slot_file import Footer, checksum, file_digest, read_slot_file, write_slot_file
from cppbatch.errors import InvalidRequest


class SlotReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was saved, restored or erased."""

    n_tokens: int
    n_bytes: int = 0
    """Of the file."""


@dataclass(frozen=True)
class SlotPrefix:
    """A cached prefix on its way to a file or from one."""

    tokens: Tokens
    cache_salt: str
    adapters: AdapterSet
    state: SavedState
    n_bytes: int = 0
    """Of the file it came from."""


class Slots:
    """Saves and restores prefixes. `take`, `put` and `erase` run between two steps; `write` and `read` on any thread.

    A request belongs to a slot only if it says so. All requests use all cached prefixes, also those of slots.
    """

    def __init__(self, kv: KVPool, info: ModelInfo, config: EngineConfig) -> None:
        self._kv = kv
        self._info = info
        self._cache_types = (config.cache_type_k, config.cache_type_v)

    @cached_property
    def _digest(self) -> str:
        return file_digest(self._info.path)

    @cached_property
    def _adapter_digests(self) -> list[str]:
        return [file_digest(adapter.path) for adapter in self._info.adapters]

    def take(self, slot: int) -> SlotPrefix:
        """A copy of a slot's prefix. Raises `InvalidRequest` if there is none."""
        try:
            found = self._kv.state_of_slot(slot)
        except OUT_OF_MEMORY as error:
            raise InvalidRequest("id_slot", f"{slot}: its state cannot be saved: {error}") from error
        if found is None:
            how = f"send a request with id_slot {slot}, and with 20 tokens or more"
            raise InvalidRequest("id_slot", f"slot {slot} has no cached prefix: {how}")
        cached, state = found
        cache_salt, adapters = cached.salt
        return SlotPrefix(cached.tokens, cache_salt, adapters, state)

    def write(self, path: Path, prefix: SlotPrefix) -> SlotReport:
        """Writes a prefix to a file, which it replaces. Raises `InvalidRequest` if it cannot."""
        data = prefix.state.data
        footer = Footer(
            model=self._info.name,
            digest=self._digest,
            cache_types=self._cache_types,
            cache_salt=prefix.cache_salt,
            adapters=[(self._adapter_digests[number], scale) for number, scale in prefix.adapters],
            form=prefix.state.form,
            checksum=checksum(prefix.tokens, data),
        )
        try:
            n_bytes = write_slot_file(path, prefix.tokens, data, footer)
        except OSError as error:
            raise InvalidRequest("filename", f"{path.name!r} cannot be written: {error.strerror}") from error
        return SlotReport(n_tokens=len(prefix.tokens), n_bytes=n_bytes)

    def read(self, path: Path) -> SlotPrefix:
        """Reads a file. Raises `InvalidRequest` if it is damaged, or of another model, adapter or cache type."""
        tokens, data, footer, n_bytes = read_slot_file(path)
        if footer.digest != self._digest:
            message = f"{path.name!r} is of another model, {footer.model!r}; this server has {self._info.name!r}"
            raise InvalidRequest("filename", message)
        if footer.cache_types != self._cache_types:
            theirs, ours = ("/".join(types) for types in (footer.cache_types, self._cache_types))
            message = f"{path.name!r} has keys and values of types {theirs}; this server's are {ours} (-ctk, -ctv)"
            raise InvalidRequest("filename", message)
        digests = self._adapter_digests
        if any(digest not in digests for digest, _ in footer.adapters):
            raise InvalidRequest("filename", f"{path.name!r} was computed with a LoRA adapter that is not loaded")
        adapters = tuple(sorted((digests.index(digest), scale) for digest, scale in footer.adapters))
        state = self._kv.read_state(data, footer.form)
        return SlotPrefix(tokens, footer.cache_salt, adapters, state, n_bytes)

    def put(self, slot: int, prefix: SlotPrefix) -> SlotReport:
        """Makes it a cached prefix in host memory, of this slot. Raises `InvalidRequest` if it does not fit there."""
        salt = prefix.cache_salt, prefix.adapters
        if not self._kv.restore_slot(slot, prefix.tokens, salt, prefix.state):
            message = f"has a state of {prefix.state.n_bytes:,} bytes, more than --prefix-cache-ram holds"
            raise InvalidRequest("filename", message)
        return SlotReport(n_tokens=len(prefix.tokens), n_bytes=prefix.n_bytes)

    def erase(self, slot: int) -> SlotReport:
        """Removes the cached prefixes that begin with the tokens of the slot's last request."""
        return SlotReport(n_tokens=self._kv.erase_slot(slot))
