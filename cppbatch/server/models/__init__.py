"""The served models: selecting and loading them, and `Serving`."""
