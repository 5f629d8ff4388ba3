"""All strategies on a tiny model: the same texts, and a report with a row for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine
from cppbatch.bench.prompts import Lengths
from cppbatch.bench.strategies import STRATEGIES
from cppbatch.bench.strategies.compare_strategies import (
    OfflineWorkload,
    StrategyComparison,
    compare_strategies,
    run_workload,
)
from cppbatch.config import EngineConfig
from tests.unit.test_strategies import KNOWN


def test_a_comparison_has_a_row_for_each_strategy_with_the_same_texts(tiny_llama: Path) -> None:
    config = EngineConfig(
        model_path=str(tiny_llama), n_parallel=4, n_threads=1, flash_attn="off", cache_type_k="f32", cache_type_v="f32"
    )
    work = OfflineWorkload(n_requests=9, prompt_tokens=Lengths(4, 40), new_tokens=Lengths(2, 24))
    lines: list[str] = []
    report = compare_strategies(config, StrategyComparison(repeats=2), work, lines.append)
    n = 2 * len(STRATEGIES)
    assert [line.partition(":")[0] for line in lines] == [f"{i + 1} of {n}" for i in range(n)]
    rows = {row["strategy"]: row for row in report.rows}
    assert tuple(rows) == STRATEGIES
    assert rows["sequential"]["speedup"].median == 1
    assert [rows[name]["mean_rows"].median for name in ("sequential", "concurrent")] == [1, 1]
    assert rows["continuous"]["mean_rows"].median > rows["static-ragged"]["mean_rows"].median > 1
    report.table()


def test_strategies_are_compared_at_several_numbers_of_sequences_with_waits_and_padding(
    run: Callable[..., tuple[int, str, str]], tiny_llama: Path, tmp_path: Path
) -> None:
    sizes, lengths = "1,3,8", ("--prompt-tokens", "4-20", "--new-tokens", "2-12", "--bucket", "16")
    code, _, err = run(
        *"bench strategies -t 1 --repeats 1 --strategies sequential,concurrent,static-padded,continuous -m".split(),
        tiny_llama, "-B", sizes, *lengths, "--json", tmp_path / "a.json", "--plot", tmp_path / "a.png",
    )  # fmt: skip
    assert code == 0, err
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["batch_size"] for row in rows] == [n for n in (1, 3, 8) for _ in range(4)]
    found = {(row["batch_size"], row["strategy"]): row for row in rows}
    for row in rows:
        assert 0 <= row["wait_p50"]["median"] <= row["wait_p95"]["median"] <= row["wait_p99"]["median"]
        assert row["wait_p99"]["median"] <= row["latency_p95"]["median"] * 2
        assert row["cpu_percent"]["median"] >= 0
        assert (row["padding_percent"]["median"] > 0) == (row["strategy"] == "static-padded")
    assert found[8, "continuous"]["mean_rows"]["median"] > found[3, "continuous"]["mean_rows"]["median"] > 1
    waited = {name: found[8, name]["wait_p50"]["median"] / found[8, name]["latency_p95"]["median"] for _, name in found}
    assert waited["sequential"] > waited["continuous"], "of its own time: other programs may slow one of them"
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
def test_all_strategies_give_the_same_greedy_texts_on_float_weights(tiny_llama: Path, layout: str) -> None:
    settings: dict[str, Any] = {"n_threads": 1, "flash_attn": "off", "kv_layout": layout, "n_ctx": 512, "n_parallel": 4}
    drawn = OfflineWorkload(n_requests=8, prompt_tokens=Lengths(4, 40), new_tokens=Lengths(4, 24)).requests(462)
    texts = {}
    for name, policy in KNOWN.items():
        with BatchInferenceEngine(tiny_llama, prefix_cache=False, policy=policy, **settings) as engine:
            texts[name] = run_workload(engine, drawn).tokens
    assert all(text == texts["sequential"] for text in texts.values())
    assert len(set(map(tuple, texts["sequential"]))) == len(drawn)
