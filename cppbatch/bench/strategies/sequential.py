"""One request after the other."""

from __future__ import annotations

from typing import Any

from cppbatch.engine.kv_pool import KVPool
from cppbatch.engine.scheduler import Scheduler


class Sequential(Scheduler):
    """The engine's own policy with one place: a step is a piece of one prompt, or one row."""

    def __init__(self, kv: KVPool, *, n_parallel: int, **settings: Any) -> None:
        del n_parallel
        super().__init__(kv, n_parallel=1, **settings)
