"""llama-server's own API, for its clients and tools."""
