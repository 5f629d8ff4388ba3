"""`cppbatch bench strategies`: schedulers of the engine that batch differently, compared on the same requests."""

STRATEGIES = (
    "sequential",
    "concurrent",
    "static-padded",
    "static-ragged",
    "static-buckets",
    "continuous",
    "continuous-window",
)
