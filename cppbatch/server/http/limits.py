"""Limits per request and per client."""

from __future__ import annotations

import msgspec

from cppbatch.engine.params import UNLIMITED
from cppbatch.errors import ConfigError, InvalidRequest
from cppbatch.setting import INT32_MAX

MAX_CHOICES = 128


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The fields are named after the flags. Raises `ConfigError` for values out of range."""

    max_body_mb: int = 16
    """MiB of a request body. 16 MiB are enough for a prompt of millions of tokens."""
    max_file_mb: int = 1024
    """MiB of an uploaded file."""
    max_media: int = 16
    """Images and audio files per request."""
    max_media_mb: int = 64
    """MiB of a request's images and audio, in their file formats; counted once per completion."""
    max_n: int = MAX_CHOICES
    """Completions per prompt."""
    max_prompts_per_batch: int = 256
    """Items of a `/generate/batch`; prompts of a `/completion`."""
    max_tokens: int | None = None
    """Tokens per completion, also the default for `max_tokens`. None: limited by the context."""
    request_timeout: float | None = None
    """Seconds per request; its own `timeout` may be shorter. None: no limit."""
    max_concurrent: int = 0
    """Requests in progress; 0: no limit (except the engine's queue limit)."""
    max_concurrent_per_key: int = 0
    """Requests in progress per API key, unless the key has its own limit, or per address without keys; 0: no limit."""
    idle_timeout: float = 60
    """Seconds after which a client that neither sends its body nor reads its response is disconnected."""

    def __post_init__(self) -> None:
        self._check("max_body_mb", 1, 4096)
        self._check("max_file_mb", 1, 1 << 20)
        self._check("max_media", 0, 1024)
        self._check("max_media_mb", 1, 4096)
        self._check("max_n", 1, MAX_CHOICES)
        self._check("max_prompts_per_batch", 1, 65_536)
        self._check("max_concurrent", 0, INT32_MAX)
        self._check("max_concurrent_per_key", 0, INT32_MAX)
        self._check("idle_timeout", 0.1, 86400)
        if self.max_tokens is not None:
            self._check("max_tokens", 1, INT32_MAX)
        if self.request_timeout is not None:
            self._check("request_timeout", 0.1, 86400)

    def _check(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is {value}; it must be from {low} to {high}")

    @property
    def max_body(self) -> int:
        """Bytes of a request body."""
        return self.max_body_mb << 20

    @property
    def max_media_bytes(self) -> int:
        """Bytes of a request's images and audio."""
        return self.max_media_mb << 20

    def check(self, body: object) -> None:
        """Raises `InvalidRequest` for a request (`SamplingFields`) that exceeds the limits."""
        for field in ("n", "n_cmpl", "best_of"):
            self._refuse_more(field, getattr(body, field, None), self.max_n, "--max-n")
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"):
            self._refuse_more(field, getattr(body, field, None), self.max_tokens, "--max-tokens")

    def _refuse_more(self, field: str, asked: int | None, limit: int | None, flag: str) -> None:
        if asked is not None and limit is not None and asked > limit:
            raise InvalidRequest(field, f"is {asked}; the limit of this server is {limit} ({flag})")

    def default_tokens(self, wanted: int) -> int:
        """`max_tokens` for requests that do not set it, given their API's default, which may be `UNLIMITED`."""
        given = [tokens for tokens in (wanted, self.max_tokens) if tokens is not None and tokens != UNLIMITED]
        return min(given, default=UNLIMITED)

    def timeout(self, asked: float | None) -> float | None:
        """The effective timeout of a request with this `timeout`; None: no limit."""
        given = [seconds for seconds in (asked, self.request_timeout) if seconds is not None]
        return min(given, default=None)
