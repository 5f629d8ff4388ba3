"""The promises of sharing and preemption; at night on the default model. scripts/bench_servers.py measures them at full
size."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, FinishReason, SamplingParams

N_SUFFIX, N_NEW = 8, 8
GREEDY = SamplingParams(temperature=0, max_tokens=N_NEW, ignore_eos=True)


def open_engine(model: Path, *, prefix_cache: bool = True) -> BatchInferenceEngine:
    return BatchInferenceEngine(model, n_ctx=16384, n_parallel=16, kv_layout="unified", prefix_cache=prefix_cache)


def prompt_of(n_tokens: int) -> list[int]:
    return [300 + i * 37 % 1700 for i in range(n_tokens)]


@pytest.fixture(params=["stand_in", pytest.param("default_model", marks=pytest.mark.nightly)])
def model(request: pytest.FixtureRequest) -> Path:
    """Has more than 4,000 tokens."""
    path: Path = request.getfixturevalue(request.param)
    return path


def run(
    engine: BatchInferenceEngine, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[float, int, list[list[int]]]:
    """Seconds until all have ended, the most cells held after a step, and the tokens of each."""
    names = [engine.add_request(prompt, its) for prompt, its in zip(prompts, params, strict=True)]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    began, peak = perf_counter(), 0
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id] += event.tokens
        peak = max(peak, engine.core.kv.n_used + engine.core.kv.n_cached)
    return perf_counter() - began, peak, [tokens[name] for name in names]


@pytest.mark.parametrize("n_prefix", [150, pytest.param(400, marks=pytest.mark.soak)])
def test_a_shared_prefix_is_computed_and_held_once_and_that_is_three_times_as_fast_if_it_is_long(
    model: Path, n_prefix: int
) -> None:
    prompts = [[*prompt_of(n_prefix), *(2000 + 100 * i + k for k in range(N_SUFFIX))] for i in range(8)]
    seconds, peaks, computed = [], [], []
    for prefix_cache in (True, False):
        with open_engine(model, prefix_cache=prefix_cache) as engine:
            engine.generate([[20] * 64], SamplingParams(max_tokens=1))
            engine.clear_prefix_cache()
            before = engine.stats().prompt_tokens
            its_seconds, its_peak, _ = run(engine, prompts, [GREEDY] * 8)
            seconds.append(its_seconds)
            peaks.append(its_peak)
            computed.append(engine.stats().prompt_tokens - before)
    print(f"{seconds[1] / seconds[0]:.2f} times as fast; {peaks[0]} cells instead of {peaks[1]}")
    assert computed == [n_prefix + 8 * N_SUFFIX, 8 * (n_prefix + N_SUFFIX)]
    assert n_prefix < 400 or seconds[0] * 3 <= seconds[1]
    assert peaks[0] <= 1.05 * (n_prefix + 8 * (N_SUFFIX + N_NEW))


def test_sixteen_completions_of_one_prompt_hold_it_once(model: Path) -> None:
    prompt = prompt_of(150)
    params = [SamplingParams(temperature=0.5 + 0.1 * i, seed=i, max_tokens=N_NEW, ignore_eos=True) for i in range(16)]
    with open_engine(model) as engine:
        _, peak, tokens = run(engine, [prompt] * 16, params)
        assert engine.stats().prefix_hit_tokens == 15 * (len(prompt) - 1)
    assert peak <= 1.05 * (len(prompt) + 16 * N_NEW)
    assert len({tuple(its) for its in tokens}) > 8


@pytest.mark.nightly  # of tiny models in each run: tests/integration/test_engine_native.py
@pytest.mark.parametrize(
    ("n_requests", "n_ctx", "n_new", "swap_space"),
    [
        (8, 256, 24, 1024),
        pytest.param(24, 2048, 200, 1024, marks=pytest.mark.soak),
        pytest.param(24, 2048, 200, 0, marks=pytest.mark.soak),
    ],
)
def test_requests_that_outgrow_the_cells_all_finish_with_the_text_of_ample_ones(
    f16_model: Path, n_requests: int, n_ctx: int, n_new: int, swap_space: int
) -> None:
    story = "The river floods every spring and the people rebuild the bridge. "
    prompts = [f"Chapter {i}. " + story * (i % 8 + 1) + "Then" for i in range(n_requests)]
    params = SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True)
    texts = []
    for cells in (n_requests * 512, n_ctx):
        settings: dict[str, Any] = {"n_ctx": cells, "n_parallel": 8, "flash_attn": "off", "swap_space": swap_space}
        settings["spec"] = "off"  # with drafts they end before the cells run out
        with BatchInferenceEngine(f16_model, kv_layout="unified", **settings) as engine:
            results = engine.generate(prompts, params)
            assert all(result.finish_reason is FinishReason.LENGTH for result in results)
            texts.append([result.text for result in results])
            stats = engine.stats()
    print(f"{n_ctx} cells: {len(results)} of {n_requests} finished, {stats.swaps} swaps, {stats.recomputes} recomputes")
    assert texts[0] == texts[1]
    assert (stats.swaps > 0) == (swap_space > 0)
    assert (stats.recomputes > 0) == (swap_space == 0)


@pytest.mark.parametrize("n_tokens", [500, pytest.param(2000, marks=pytest.mark.soak)])
def test_a_prefix_on_disk_persists_across_a_restart_and_is_five_times_as_fast_if_it_is_long(
    model: Path, tmp_path: Path, n_tokens: int
) -> None:
    prompt = prompt_of(n_tokens)
    seconds, cached = [], []
    for _ in range(2):
        disk = str(tmp_path / "prefixes")
        with BatchInferenceEngine(model, n_ctx=4096, n_parallel=4, spec="off", prefix_cache_disk=disk) as engine:
            (completion,) = engine.generate([prompt], GREEDY)
        assert completion.usage.first_token_seconds
        seconds.append(completion.usage.first_token_seconds)
        cached.append(completion.usage.cached_tokens)
    assert cached == [0, len(prompt) - 1]
    assert n_tokens < 2000 or seconds[1] < seconds[0] / 5
