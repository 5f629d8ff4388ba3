"""Slots: a request may name one (`id_slot`), and the cached prefix that it leaves can be kept in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from cppbatch.engine.kv_pool import OUT_OF_MEMORY, KVPool
from cppbatch.engine.lora_sets import AdapterSet
from cppbatch.engine.radix_tree import Tokens
from cppbatch.engine.sequence import SavedState
from cppbatch.engine.slot_file import Footer, read_slot_file, write_slot_file
from cppbatch.engine.state_key import StateKey
from cppbatch.errors import InvalidRequest

SlotActionName = Literal["save", "restore", "erase"]


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

    def __init__(self, kv: KVPool, key: StateKey) -> None:
        self._kv = kv
        self._key = key

    def take(self, slot: int) -> SlotPrefix:
        """A copy of a slot's prefix. Raises `InvalidRequest` if there is none."""
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
        """Writes a prefix to a file, which it replaces. Raises `InvalidRequest` if it cannot."""
        data = prefix.state.data
        footer = Footer(
            model=self._key.model,
            digest=self._key.digest,
            cache_types=self._key.cache_types,
            cache_salt=prefix.cache_salt,
            adapters=list(self._key.adapter_digests(prefix.adapters)),
            form=prefix.state.form,
        )
        try:
            n_bytes = write_slot_file(path, prefix.tokens, data, footer)
        except OSError as error:
            raise InvalidRequest("filename", f"{path.name!r} cannot be written: {error.strerror}") from error
        return SlotReport(n_tokens=len(prefix.tokens), n_bytes=n_bytes)

    def read(self, path: Path) -> SlotPrefix:
        """Reads a file. Raises `InvalidRequest` if it is damaged, or of another model, adapter or cache type."""
        tokens, data, footer, n_bytes = read_slot_file(path)
        key = self._key
        if footer.digest != key.digest:
            message = f"{path.name!r} was saved for model {footer.model!r}; this server runs {key.model!r}"
            raise InvalidRequest("filename", message)
        if footer.cache_types != key.cache_types:
            theirs, ours = ("/".join(types) for types in (footer.cache_types, key.cache_types))
            message = f"{path.name!r} has KV cache types {theirs}; this server uses {ours} (-ctk, -ctv)"
            raise InvalidRequest("filename", message)
        adapters = key.adapter_set(footer.adapters)
        if adapters is None:
            raise InvalidRequest("filename", f"{path.name!r} was computed with a LoRA adapter that is not loaded")
        state = self._kv.read_state(data, footer.form)
        return SlotPrefix(tokens, footer.cache_salt, adapters, state, n_bytes)

    def put(self, slot: int, prefix: SlotPrefix) -> SlotReport:
        """Makes it a cached prefix in host memory, of this slot. Raises `InvalidRequest` if it does not fit there."""
        salt = prefix.cache_salt, prefix.adapters
        if not self._kv.restore_slot(slot, prefix.tokens, salt, prefix.state):
            message = f"has a state of {prefix.state.n_bytes:,} bytes, which does not fit into --prefix-cache-ram"
            raise InvalidRequest("filename", message)
        return SlotReport(n_tokens=len(prefix.tokens), n_bytes=prefix.n_bytes)

    def erase(self, slot: int) -> SlotReport:
        """Removes the cached prefixes that begin with the tokens of the slot's last request."""
        return SlotReport(n_tokens=self._kv.erase_slot(slot))
