"""Ring of its own: real Ray. `./scripts/test ray`."""
