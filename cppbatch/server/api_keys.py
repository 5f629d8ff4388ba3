"""API keys, and the rules of each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from typing import Any, NamedTuple

from cppbatch.errors import ConfigError
from cppbatch.server.key_rules import KeyRules

_USABLE = re.compile(r"[\x21-\x7e]+")  # characters that a header can contain unescaped
_LABEL_LENGTH, _ID_LENGTH = 8, 32


class ApiKey(NamedTuple):
    """A key with its rules. Only the digest of the key is stored."""

    digest: bytes
    rules: KeyRules


def api_key(key: str, what: str = "the API key", *, name: str | None = None, **rules: Any) -> ApiKey:
    """A key and its rules (`KeyRules`). Without a name, the log shows the first digits of its SHA-256.

    Raises `ConfigError` for a key that no client could send; the message begins with `what` and does not contain the
    key.
    """
    if not _USABLE.fullmatch(key):
        raise ConfigError(f"{what} is empty, or contains characters other than visible ASCII: choose another one")
    digest = _digest(key)
    label = name or digest.hex()[:_LABEL_LENGTH]
    return ApiKey(digest, KeyRules(id=name or digest.hex()[:_ID_LENGTH], name=label, **rules))


class Keys:
    """The valid keys."""

    def __init__(self, keys: Iterable[str | ApiKey] = ()) -> None:
        """A text is a key without rules. Raises `ConfigError` for a key that no client could send, and for a key that
        has two different sets of rules."""
        self._rules: dict[bytes, KeyRules] = {}
        for i, given in enumerate(keys, 1):
            key = api_key(given, f"API key {i}") if isinstance(given, str) else given
            if self._rules.setdefault(key.digest, key.rules) != key.rules:
                raise ConfigError(
                    f"the API key {key.rules.name} is given twice with different rules (--api-key, --api-key-file): "
                    "remove one of them"
                )

    def __bool__(self) -> bool:
        return bool(self._rules)

    def rules_of(self, given: str) -> KeyRules | None:
        """The rules of a valid key, otherwise None. Digests are looked up, so times say nothing about the keys."""
        return self._rules.get(_digest(given))


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
