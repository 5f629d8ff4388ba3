"""The served models: which one answers a request, loading them, and `Serving`."""
