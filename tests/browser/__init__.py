"""Separate ring: the web page in a real Chromium, on a real server. `./scripts/test browser`."""
