"""Benchmarks: speed, scheduling strategies, servers and memory; and tuning of settings by measurement."""
