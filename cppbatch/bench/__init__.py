"""Measuring: speed, strategies, servers, memory; and choosing settings by it."""
