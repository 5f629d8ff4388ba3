"""llama-server's own API, for front-ends and tools that know that one."""
