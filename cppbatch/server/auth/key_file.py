"""Files with API keys: one key per line, or a TOML file with the rules of each key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from cppbatch.engine.request import OPTION_RANGES
from cppbatch.errors import ConfigError
from cppbatch.server.auth.rules import ApiKey, api_key
from cppbatch.setting import INT32_MAX
from cppbatch.typed_json import decode_toml

_LOWEST, _HIGHEST = OPTION_RANGES["priority"]
_NAME = r"^[A-Za-z0-9._@-]{1,64}$"

Name = Annotated[str, msgspec.Meta(pattern=_NAME)]
Count = Annotated[int, msgspec.Meta(ge=1, le=INT32_MAX)]
Table = TypeVar("Table", bound=msgspec.Struct)


class KeyTier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table `[tiers.NAME]`: rules shared by several keys. None: not given."""

    priority: Annotated[int, msgspec.Meta(ge=int(_LOWEST), le=int(_HIGHEST))] | None = None
    requests_per_minute: Count | None = None
    max_concurrent: Count | None = None
    models: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None


class KeyEntry(KeyTier, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table `[[keys]]`: a key. Its rules override those of its tier."""

    key: str
    name: Name | None = None
    tier: str | None = None
    group: Name | None = None


def read_keys(path: str) -> list[ApiKey]:
    """Reads keys from a file: TOML if its name ends in .toml, otherwise one key per line, skipping empty lines and
    lines that start with #. Raises `ConfigError` with the line; messages never contain a key."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a UTF-8 text file"
        raise ConfigError(f"cannot read the API keys in {path} ({reason})") from error
    keys = _TomlFile(path, text).keys() if path.lower().endswith(".toml") else list(_plain_keys(path, text))
    if not keys:
        raise ConfigError(f"{path} contains no API key; add one, or leave out --api-key-file")
    return keys


def _plain_keys(path: str, text: str) -> Iterator[ApiKey]:
    for number, line in enumerate(text.splitlines(), 1):
        key = line.strip()
        if key.startswith(("[[", "[tiers")):
            raise ConfigError(f"{path}, line {number}: this is TOML; rename the file to end in .toml")
        if key and not key.startswith("#"):
            yield api_key(key, f"{path}, line {number}: the API key")


class _TomlFile:
    """A TOML file, and the lines of its settings, which the parser does not keep."""

    def __init__(self, path: str, text: str) -> None:
        self._path, self._lines = path, text.splitlines()
        try:
            self._tables = decode_toml(text, dict[str, Any])
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error

    def keys(self) -> list[ApiKey]:
        """Raises `ConfigError`."""
        for name in self._tables.keys() - {"keys", "tiers"}:
            raise ConfigError(
                f"{self._at(None, name)}unknown setting `{name}`; the tables are [[keys]] and [tiers.NAME]"
            )
        tiers, entries = self._tables.get("tiers", {}), self._tables.get("keys", [])
        if not isinstance(tiers, dict) or not isinstance(entries, list):
            raise ConfigError(f"{self._path}: write [[keys]] above each key, and [tiers.NAME] above each tier")
        known = {name: self._table(table, KeyTier, f"tiers.{name}") for name, table in tiers.items()}
        return self._different([self._key(table, f"keys[{i}]", known) for i, table in enumerate(entries)])

    def _key(self, table: object, where: str, tiers: dict[str, KeyTier]) -> ApiKey:
        entry = self._table(table, KeyEntry, where)
        if entry.tier is not None and entry.tier not in tiers:
            known = ", ".join(tiers) or "none"
            message = (
                f"tier {entry.tier!r} not found; available: {known}. Add [tiers.{entry.tier}], or use another tier"
            )
            raise ConfigError(self._at(where, "tier") + message)
        tier = KeyTier() if entry.tier is None else tiers[entry.tier]
        own = {name: getattr(entry, name) for name in KeyTier.__struct_fields__}
        rules = {name: getattr(tier, name) if value is None else value for name, value in own.items()}
        rules |= {"priority": rules["priority"] or 0, "group": entry.group}
        return api_key(entry.key, self._at(where, "key") + "the API key", name=entry.name, **rules)

    def _different(self, keys: list[ApiKey]) -> list[ApiKey]:
        """Raises `ConfigError` for duplicate keys or names."""
        seen: set[object] = set()
        for i, key in enumerate(keys):
            for field, value in (("key", key.digest), ("name", key.rules.name)):
                if value in seen:
                    at = self._at(f"keys[{i}]", field)
                    raise ConfigError(f"{at}an earlier entry has the same {field}; change it, or remove one of them")
                seen.add(value)
        return keys

    def _table(self, table: object, kind: type[Table], where: str) -> Table:
        try:
            return msgspec.convert(table, kind)
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at `$")
            unknown = re.search(r"unknown field `(.*)`", message)
            field = unknown[1] if unknown else path.strip("`.").partition("[")[0]
            if unknown:
                message = f"unknown setting `{field}`; it must be one of {', '.join(kind.__struct_fields__)}"
            elif "matching regex" in message:
                message = "must consist of 1 to 64 letters, digits, or . _ @ -"
            message = message.replace(" | null", "")  # a setting may be absent, but TOML has no null
            raise ConfigError(f"{self._at(where, field)}{message[:1].lower()}{message[1:]}") from error

    def _at(self, where: str | None, field: str) -> str:
        """The location of a setting in a table, or of the table if it lacks the setting. `where`: `keys[0]` or
        `tiers.a`.

        The line is omitted for a table without its own header.
        """
        line = self._line(where, field)
        name = ".".join(part for part in (where, field) if part)
        return f"{self._path}, {f'line {line}, ' if line else ''}{name}: "

    def _line(self, where: str | None, field: str) -> int | None:
        found, n_keys = None if where else 0, -1
        for number, line in enumerate(self._lines, 1):
            text = line.strip()
            if text.startswith("["):
                if found:
                    break
                header = re.sub(r"[\s'\"]", "", text.partition("#")[0])
                n_keys += header == "[[keys]]"
                if where in (f"keys[{n_keys}]" if header == "[[keys]]" else None, header.strip("[]")):
                    found = number
            elif found is not None and re.match(rf"['\"]?{re.escape(field)}['\"]?\s*=", text):
                return number
        return found or None
