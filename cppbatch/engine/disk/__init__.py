"""Prefixes and slots on disk."""
