"""What the server is told, beside the engine's own settings."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cppbatch.errors import ConfigError
from cppbatch.server.cors import check_origin
from cppbatch.server.keys import Keys
from cppbatch.server.limits import Limits

_LONGEST_DRAIN = 86400


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Raises `ConfigError` for values that are out of range, each with the flag that it belongs to."""

    keys: Keys = Keys()
    """Those that are let in; none: everybody is."""
    limits: Limits = Limits()
    cors_origins: tuple[str, ...] = ()
    """The origins whose pages may use the server from a browser; `*`: all."""
    aliases: tuple[str, ...] = ()
    """Further names that the model answers to, for clients whose model name is fixed."""
    drain_timeout: float = 30
    """Seconds that running requests have to end in when the server goes down."""
    chat_template: str | None = None
    """The template itself; None: the model's own."""

    data_dir: Path | None = None
    """Where files and batches are kept; None: in the user's own folder for data, if that can be."""

    def __post_init__(self) -> None:
        for origin in self.cors_origins:
            check_origin(origin)
        if not 0 <= self.drain_timeout <= _LONGEST_DRAIN:
            raise ConfigError(f"--drain-timeout is {self.drain_timeout}; it must be from 0 to {_LONGEST_DRAIN} seconds")
