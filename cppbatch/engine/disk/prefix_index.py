"""The index of the prefixes on disk that an engine can use; finds them by their tokens."""

from __future__ import annotations

import hashlib
import threading

import msgspec

from cppbatch.engine.disk.folder import PrefixFolder, file_name
from cppbatch.engine.disk.slots import (
    AdapterDigests,
    Footer,
    StateKey,
    Tokens,
)
from cppbatch.engine.kv.cached_prefix import Salt
from cppbatch.engine.kv.checkpoints import checkpoint_lengths
from cppbatch.engine.kv.prefix_tier import TierLimits
from cppbatch.engine.kv.radix_tree import RadixTree
from cppbatch.engine.sequence import SavedState


class DiskPrefix(msgspec.Struct, frozen=True, eq=False):
    """A prefix on disk."""

    name: str
    tokens: Tokens
    n_bytes: int
    """The size of its file."""
    checkpoints: tuple[int, ...] = ()
    """Numbers of tokens of its checkpoints, descending."""

    def usable(self, n: int, *, whole: bool) -> int:
        """How many of its first `n` tokens can be used. `whole`: only up to a checkpoint, or all of its tokens."""
        if not whole or n == len(self.tokens):
            return n
        return next((length for length in self.checkpoints if length <= n), 0)


DiskSalt = tuple[str, AdapterDigests]
"""A `Salt` on disk: the hash of the `cache_salt`, and the digests of the adapters."""


class PrefixIndex:
    """The prefixes of one `StateKey` in a folder. Thread-safe. `refresh` picks up changes by other processes."""

    def __init__(self, folder: PrefixFolder, key: StateKey) -> None:
        self._folder = folder
        self._key = key
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._version = 0
        self._tree: RadixTree[DiskPrefix] = RadixTree()
        self._by_name: dict[str, DiskPrefix] = {}
        self.refresh()

    def __len__(self) -> int:
        return len(self._by_name)

    def refresh(self) -> int:
        """Updates the index if the folder changed. Returns the number of damaged files that it deleted.

        Reads the tokens of new files, so not for the engine's thread. Finds none until the key's digests are known.
        """
        n_damaged = 0
        if not self._key.files.are_known:
            return 0
        with self._refreshing:
            version = self._folder.version()
            if version and version == self._version:
                return 0
            self._version = version
            names = self._folder.names(self._key.short)
            with self._lock:
                known = set(self._by_name)
            for name in known - names:
                self.discard(name)
            for name in names - known:
                try:
                    tokens, footer, n_bytes = self._folder.read_head(name)
                except OSError:  # deleted meanwhile, or not readable
                    continue
                except ValueError:
                    self._folder.remove(name)
                    n_damaged += 1
                    continue
                prefix = DiskPrefix(name, tokens, n_bytes, checkpoint_lengths(footer.form))
                self._insert(prefix, (footer.cache_salt, tuple(footer.adapters)))
        return n_damaged

    def add(self, name: str, tokens: Tokens, salt: Salt, n_bytes: int, footer: Footer) -> None:
        """Adds a newly written file."""
        self._insert(DiskPrefix(name, tokens, n_bytes, checkpoint_lengths(footer.form)), self._disk_salt(salt))

    def _insert(self, prefix: DiskPrefix, salt: DiskSalt) -> None:
        with self._lock:
            if prefix.name not in self._by_name:
                self._by_name[prefix.name] = prefix
                self._tree.insert(prefix, prefix.tokens, salt)

    def discard(self, name: str) -> None:
        """Removes a file from the index."""
        with self._lock:
            if prefix := self._by_name.pop(name, None):
                self._tree.discard(prefix)

    def best(self, tokens: Tokens, salt: Salt, limits: TierLimits) -> tuple[DiskPrefix, int] | None:
        """The prefix on disk with the most usable tokens, and their number; the smallest file of several."""
        best: tuple[DiskPrefix, int] | None = None
        if not self._key.files.are_known:
            return None
        with self._lock:
            for prefix, n_equal in self._tree.matches(tokens, self._disk_salt(salt)):
                if best and n_equal < best[1]:
                    break
                n = prefix.usable(n_equal, whole=limits.whole)
                fits = prefix.n_bytes <= limits.n_bytes and len(prefix.tokens) <= limits.n_tokens
                if fits and n and (best is None or (n, -prefix.n_bytes) > (best[1], -best[0].n_bytes)):
                    best = prefix, n
        return best

    def covered_by(self, name: str) -> list[str]:
        """The other files whose tokens are a prefix of this one's."""
        with self._lock:
            prefix = self._by_name.get(name)
            return [other.name for other in self._tree.covered_by(prefix)] if prefix else []

    def footer(self, salt: Salt, state: SavedState) -> Footer:
        """The footer for a file with this state."""
        return self._key.footer(*self._disk_salt(salt), state)

    def name(self, tokens: Tokens, footer: Footer) -> str:
        """The file name for a prefix."""
        return file_name(self._key.short, tokens, footer)

    def is_ours(self, footer: Footer, salt: Salt) -> bool:
        """Whether a file belongs to this key, and to this salt."""
        key = self._key
        ours = (key.digest, key.cache_types, key.settings, self._disk_salt(salt))
        return ours == (footer.digest, footer.cache_types, footer.settings, (footer.cache_salt, tuple(footer.adapters)))

    def _disk_salt(self, salt: Salt) -> DiskSalt:
        cache_salt, adapters = salt
        hashed = hashlib.sha256(b"cppbatch cache_salt " + cache_salt.encode()).hexdigest() if cache_salt else ""
        return hashed, self._key.adapter_digests(adapters)
