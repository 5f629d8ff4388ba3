"""Separate ring: real Ray. `./scripts/test ray`."""
