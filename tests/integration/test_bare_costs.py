"""The table of bare costs is measured on contexts of every layout and size, and leaves them empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from cppbatch.bench.bare_costs import measure_bare_costs
from cppbatch.config import EngineConfig, KvLayout
from cppbatch.engine.runtime import load_runtime


@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
@pytest.mark.parametrize(("n_ctx", "n_parallel", "pieces"), [(256, 1, {16, 64, 256}), (8192, 12, {16, 64, 256, 512})])
def test_costs_are_measured_as_far_as_the_context_has_room(
    tiny_llama: Path, layout: KvLayout, n_ctx: int, n_parallel: int, pieces: set[int]
) -> None:
    config = EngineConfig(
        model_path=str(tiny_llama), n_ctx=n_ctx, n_parallel=n_parallel, kv_layout=layout, n_threads=1, spec="off"
    )
    runtime = load_runtime(config)
    try:
        costs = measure_bare_costs(runtime, n_parallel)
        assert [runtime.context.last_position(seq_id) for seq_id in range(n_parallel)] == [-1] * n_parallel
    finally:
        runtime.close()
    assert [n for n, _ in costs.rows] == ([1] if n_parallel == 1 else [1, 4, 8, 12])
    assert pieces <= {n for n, _ in costs.tokens}
    assert all(seconds > 0 for _, seconds in (*costs.rows, *costs.tokens))
    assert costs.row_cell_s >= 0
    assert costs.token_cell_s >= 0
