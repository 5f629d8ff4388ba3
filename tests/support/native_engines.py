"""What tests of an engine over a real llama.cpp context share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cppbatch import BatchInferenceEngine

OpenEngine = Callable[..., BatchInferenceEngine]

SETTINGS: dict[str, Any] = {
    "n_ctx": 1024, "n_parallel": 4, "n_batch": 64, "n_ubatch": 32, "n_threads": 1,
    "flash_attn": "off",  # on, llama.cpp's CPU kernel sums in float16, and logits depend a little on where cells lie
}  # fmt: skip
PROMPTS = ["a", "Hello", "the cat " * 3, "é" * 20, "what will they say when ", "x" * 70, "one for all and " * 9, "1+1="]


def assert_everything_is_free(engine: BatchInferenceEngine) -> None:
    """Nothing runs: only cached prefixes hold cells, and once these are cleared nothing does."""
    engine.core.kv.check()
    assert engine.core.kv.n_used == 0
    engine.clear_prefix_cache()
    kv = engine.core.kv
    kv.check()
    seq_ids = range(kv.n_seq_ids)
    assert (kv.n_cached, kv.moves.swapped_bytes, kv.n_free_ids) == (0, 0, len(seq_ids))
    assert [engine.core.runtime.context.last_position(i) for i in seq_ids] == [-1] * len(seq_ids)
