"""Ollama's API, below `/api`."""
