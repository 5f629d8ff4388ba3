"""API keys: their file, rules, limits and usage."""
