"""`EngineClient` and its engines: in this process, in a worker process, in several."""
