"""`cppbatch bench strategies`: compares schedulers with different batching strategies on the same requests."""

STRATEGIES = (
    "sequential", "concurrent", "static-padded", "static-ragged", "static-buckets", "continuous", "continuous-window",
)  # fmt: skip
