"""API keys: their file, rules, rates and usage."""
