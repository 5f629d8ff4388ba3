"""The worker process of an engine, and the handle that its server has of it."""
