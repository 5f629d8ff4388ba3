"""The index of the prefixes on disk that an engine can take: it finds them by their tokens."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass

from cppbatch.engine.checkpoints import ends_of
from cppbatch.engine.prefix_cache import Salt
from cppbatch.engine.prefix_disk.prefix_folder import PrefixFolder, file_name
from cppbatch.engine.radix_tree import RadixTree, Tokens
from cppbatch.engine.sequence import SavedState
from cppbatch.engine.slot_file import Footer
from cppbatch.engine.state_key import AdapterDigests, StateKey


@dataclass(frozen=True, eq=False, slots=True)
class DiskPrefix:
    """A prefix on disk."""

    name: str
    """Of its file."""
    tokens: Tokens
    n_bytes: int
    ends: tuple[int, ...] = ()
    """Numbers of tokens of its checkpoints, falling."""

    def usable(self, n: int, *, whole: bool) -> int:
        """How many of its first `n` tokens can be taken. `whole`: only up to a checkpoint, or all of its tokens."""
        if not whole or n == len(self.tokens):
            return n
        return next((end for end in self.ends if end <= n), 0)


DiskSalt = tuple[str, AdapterDigests]
"""As `Salt`, with the hash of the `cache_salt` and the digests of the adapters."""


class PrefixIndex:
    """The prefixes of one `StateKey` in a folder. Thread-safe. `refresh` follows what other processes write."""

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
        """Looks for files that came or went, if the folder changed. Returns how many damaged ones it deleted.

        Reads the tokens of new files, so not for the engine's thread.
        """
        n_damaged = 0
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
                except OSError:  # deleted meanwhile, or not readable now
                    continue
                except ValueError:
                    self._folder.remove(name)
                    n_damaged += 1
                    continue
                prefix = DiskPrefix(name, tokens, n_bytes, ends_of(footer.form))
                self._insert(prefix, (footer.cache_salt, tuple(footer.adapters)))
        return n_damaged

    def add(self, name: str, tokens: Tokens, salt: Salt, n_bytes: int, footer: Footer) -> None:
        """Adds a file that was just written."""
        self._insert(DiskPrefix(name, tokens, n_bytes, ends_of(footer.form)), self._disk_salt(salt))

    def _insert(self, prefix: DiskPrefix, salt: DiskSalt) -> None:
        with self._lock:
            if prefix.name not in self._by_name:
                self._by_name[prefix.name] = prefix
                self._tree.insert(prefix, prefix.tokens, salt)

    def discard(self, name: str) -> None:
        """Forgets a file."""
        with self._lock:
            if prefix := self._by_name.pop(name, None):
                self._tree.discard(prefix)

    def best(
        self, tokens: Tokens, salt: Salt, *, whole: bool, max_bytes: int, max_tokens: int | None = None
    ) -> tuple[DiskPrefix, int] | None:
        """The prefix on disk of which most of these tokens can be taken, and how many; the smallest of several.

        `whole`: as in `DiskPrefix.usable`. `max_bytes`, `max_tokens`: of its file.
        """
        best: tuple[DiskPrefix, int] | None = None
        with self._lock:
            for prefix, n_equal in self._tree.matches(tokens, self._disk_salt(salt)):
                if best and n_equal < best[1]:
                    break
                n = prefix.usable(n_equal, whole=whole)
                fits = prefix.n_bytes <= max_bytes and (max_tokens is None or len(prefix.tokens) <= max_tokens)
                if fits and n and (best is None or (n, -prefix.n_bytes) > (best[1], -best[0].n_bytes)):
                    best = prefix, n
        return best

    def covered_by(self, name: str) -> list[str]:
        """The other files whose tokens are the beginning of those of this one."""
        with self._lock:
            prefix = self._by_name.get(name)
            return [other.name for other in self._tree.covered_by(prefix)] if prefix else []

    def footer(self, salt: Salt, state: SavedState) -> Footer:
        """The footer of a file with this state."""
        cache_salt, adapters = self._disk_salt(salt)
        key = self._key
        return Footer(
            model=key.model,
            digest=key.digest,
            cache_types=key.cache_types,
            cache_salt=cache_salt,
            adapters=list(adapters),
            form=state.form,
            settings=key.settings,
        )

    def name(self, tokens: Tokens, footer: Footer) -> str:
        """The name of the file of a prefix."""
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
