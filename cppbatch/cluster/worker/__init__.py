"""The worker process of an engine, and the server's handle for it."""
