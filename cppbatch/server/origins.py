"""The origins of web pages, as the settings name them."""

from __future__ import annotations

from urllib.parse import urlsplit

from cppbatch.errors import ConfigError

ANY, LOCAL, NONE = "*", "localhost", "none"
"""Special values beside origins: all pages, pages that this machine serves on any port, no pages. `app://*` stands for
all origins of this scheme."""
FILES = "file://"
"""The origin of files in some programs that show pages; in others and in browsers it is null."""


def check_origin(origin: str) -> str:
    """Raises `ConfigError` for a string that browsers never send as an origin."""
    parts = urlsplit(origin)
    is_origin = origin == FILES or (parts.scheme and parts.netloc and origin == f"{parts.scheme}://{parts.netloc}")
    if origin not in (ANY, LOCAL, NONE) and not is_origin:
        message = f"it must have the form https://example.org without a path, or be {LOCAL}, {ANY} or {NONE}"
        raise ConfigError(f"--cors-origin is {origin!r}; {message}")
    return origin
