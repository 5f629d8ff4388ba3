"""Numbers of weights and sizes of files, for lines and tables."""

from __future__ import annotations


def format_count(n: int) -> str:
    """A number of weights: 135M, 8.0B."""
    if n < 10**6:
        return f"{n:,}"
    return f"{n / 1e9:.1f}B" if n >= 10**9 else f"{n / 1e6:.0f}M"


def format_bytes(n_bytes: int) -> str:
    """The size of a file: 98.4 MB, 4.92 GB."""
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
