"""`/generate`: requests in the terms of the engine, one or many."""
