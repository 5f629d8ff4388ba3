"""Ways to schedule the same requests, as schedulers of the engine, and what each of them is worth."""

STRATEGIES = ("sequential", "concurrent", "static-padded", "static-ragged", "continuous")
