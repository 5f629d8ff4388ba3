"""llama-server's API."""
