"""Cached prefixes on disk (`--prefix-cache-disk`), the tier below host memory."""
