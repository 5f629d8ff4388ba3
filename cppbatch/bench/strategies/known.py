"""The strategies by their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cppbatch.bench.strategies.concurrent import Concurrent
from cppbatch.bench.strategies.sequential import Sequential
from cppbatch.bench.strategies.static import Static
from cppbatch.engine.scheduler import Scheduler


def policies(*, max_wait_s: float, bucket: int) -> dict[str, Callable[..., Scheduler]]:
    """A scheduler for each of STRATEGIES, for `BatchInferenceEngine(policy=...)`."""
    return {
        "sequential": Sequential,
        "concurrent": Concurrent,
        "static-padded": partial(Static, max_wait_s=max_wait_s, bucket=bucket),
        "static-ragged": partial(Static, max_wait_s=max_wait_s),
        "continuous": Scheduler,
    }
