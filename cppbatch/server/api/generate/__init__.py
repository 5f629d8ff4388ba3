"""`/generate`: requests in the engine's own format, one or many."""
