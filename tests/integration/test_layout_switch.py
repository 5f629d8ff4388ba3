"""An engine on real llama.cpp contexts switches its KV layout: texts are those of an engine that never does."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, FinishReason, SamplingParams
from cppbatch.config import EngineConfig, KvLayout
from cppbatch.engine.kv import layout_policy
from cppbatch.engine.kv.layout_policy import LayoutSwitch
from cppbatch.engine.runtime import load_model, open_runtime
from cppbatch.errors import InvalidRequest
from tests.support import lora_texts
from tests.support.native_engines import PROMPTS, SETTINGS, OpenEngine

GREEDY = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
STREAM = 256
EXACT: dict[str, Any] = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}


def switch(engine: BatchInferenceEngine) -> None:
    assert engine.core._layout_policy
    other: KvLayout = "per-sequence" if engine.core.kv.unified else "unified"
    engine.core._switch_layout(engine.core._layout_policy, LayoutSwitch(other, "the test says so"))
    engine.core.kv.check()


def texts(engine: BatchInferenceEngine, prompts: list[str], params: SamplingParams, *, every: int = 0) -> list[str]:
    """Greedy texts. `every`: the layout is switched after each group of this number of steps."""
    names = [engine.add_request(prompt, params) for prompt in prompts]
    found = dict.fromkeys(names, "")
    for step in range(1, 2000):
        if not engine.has_work:
            return [found[name] for name in names]
        for event in engine.step():
            assert event.finish_reason in (None, FinishReason.LENGTH), event
            found[event.request_id] += event.text
        if every and step % every == 0:
            switch(engine)
    raise AssertionError("the engine does not come to an end")


@pytest.mark.each_value
@pytest.mark.parametrize("swap_space", [64, 0], ids=["carried", "recomputed"])
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_swa"])
def test_texts_are_those_without_a_switch(
    open_engine: OpenEngine, model: str, swap_space: int, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    expected = texts(open_engine(path, kv_layout="per-sequence"), PROMPTS, GREEDY)
    engine = open_engine(path, swap_space=swap_space)
    for every in (2, 5, 9) if swap_space else (25, 40):  # all prompts have to be computed again in that many steps
        assert texts(engine, PROMPTS, GREEDY, every=every) == expected
        engine.clear_prefix_cache()
    stats = engine.stats()
    assert stats.layout_switches > 4
    assert bool(stats.swaps) == bool(swap_space)
    assert (stats.recomputes > 0) == (swap_space == 0)


def test_texts_that_share_a_prefix_are_those_without_a_switch(open_engine: OpenEngine, tiny_llama: Path) -> None:
    prompts = ["once upon a time there was a tiny model " + end for end in ("a", "b", "that", "", "a b")]
    expected = texts(open_engine(tiny_llama, kv_layout="unified", **EXACT), prompts, GREEDY)
    engine = open_engine(tiny_llama, **EXACT)
    for every in (2, 5):
        assert texts(engine, prompts, GREEDY, every=every) == expected
    assert engine.stats().recomputes == 0


def test_candidates_of_the_device_are_used_again_after_a_switch(open_engine: OpenEngine, tiny_llama: Path) -> None:
    expected = texts(open_engine(tiny_llama, kv_layout="per-sequence"), PROMPTS, GREEDY)
    engine = open_engine(tiny_llama, sampling="backend")
    assert texts(engine, PROMPTS, GREEDY, every=4) == expected
    assert engine.core.runtime.context.backend_sampling


def test_without_a_prefix_cache_nothing_is_shared_in_either_layout(open_engine: OpenEngine, tiny_llama: Path) -> None:
    engine = open_engine(tiny_llama, prefix_cache=False)
    assert (
        texts(engine, ["the same prompt " * 3] * 4, GREEDY, every=5)
        == [texts(open_engine(tiny_llama, kv_layout="unified"), ["the same prompt " * 3], GREEDY)[0]] * 4
    )
    assert engine.stats().prefix_queries == 0


def test_a_prompt_longer_than_a_stream_is_answered_as_in_the_unified_layout(
    open_engine: OpenEngine, tiny_llama: Path
) -> None:
    prompts = ["Hello", "x" * (STREAM + 100), "1+1="]
    expected = texts(open_engine(tiny_llama, kv_layout="unified"), prompts, GREEDY)
    engine = open_engine(tiny_llama)
    assert (engine.stats().kv_layout, engine.stats().kv_cells) == ("per-sequence", 1024)
    assert texts(engine, prompts, GREEDY) == expected
    assert (engine.stats().kv_layout, engine.stats().layout_switches) == ("unified", 1)


def test_a_text_continues_beyond_the_end_of_its_stream(open_engine: OpenEngine, tiny_llama: Path) -> None:
    long = SamplingParams(temperature=0, max_tokens=STREAM + 60, ignore_eos=True)
    prompts = ["Hello", "the cat "]
    expected = texts(open_engine(tiny_llama, kv_layout="unified"), prompts, long)
    engine = open_engine(tiny_llama)
    assert texts(engine, prompts, long) == expected
    assert engine.stats().layout_switches == 1
    assert engine.stats().recomputes == 0


def test_a_request_may_fill_all_cells_and_no_more(open_engine: OpenEngine, tiny_llama: Path) -> None:
    engine = open_engine(tiny_llama)
    limit = engine.info.max_sequence
    assert limit == min(1024, engine.info.n_ctx_train)
    [result] = engine.generate(["x" * 100], SamplingParams(ignore_eos=True))
    assert len(result.tokens) == limit - 101
    with pytest.raises(InvalidRequest, match="max_tokens"):
        engine.add_request("x" * 100, SamplingParams(max_tokens=limit - 100))


# --- the defaults of 16 sequences in 32,768 cells ------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {"n_ctx": 32768, "n_parallel": 16, "n_batch": 512, "n_ubatch": 512, **EXACT}
FEW = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture
def looks_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a load need not last for seconds."""
    monkeypatch.setattr(layout_policy, "_LOOK_EVERY_S", 0)


@pytest.mark.usefixtures("looks_at_every_step")
def test_distinct_prompts_stay_in_streams(open_engine: OpenEngine, tiny_llama: Path) -> None:
    prompts = [chr(ord("a") + i) * (20 + 10 * i) for i in range(24)]
    engine = open_engine(tiny_llama, **DEFAULTS)
    assert texts(engine, prompts, FEW) == texts(open_engine(tiny_llama, kv_layout="unified", **DEFAULTS), prompts, FEW)
    assert (engine.stats().kv_layout, engine.stats().layout_switches) == ("per-sequence", 0)


def test_a_prompt_of_3000_tokens_beside_others_is_answered_whole(open_engine: OpenEngine, tiny_llama: Path) -> None:
    prompts = [*PROMPTS, "x" * 2999, *PROMPTS]
    expected = texts(open_engine(tiny_llama, kv_layout="unified", **DEFAULTS), prompts, FEW)
    engine = open_engine(tiny_llama, **DEFAULTS)
    results = engine.generate(prompts, FEW)
    assert [result.text for result in results] == expected
    assert results[len(PROMPTS)].usage.prompt_tokens == 3000
    assert (engine.stats().kv_layout, engine.stats().layout_switches) == ("unified", 1)


@pytest.mark.usefixtures("looks_at_every_step")
def test_prompts_that_share_600_tokens_stay_in_streams(open_engine: OpenEngine, tiny_llama: Path) -> None:
    prompts = ["once upon a time there was a tiny model " * 28 + f"and its number was {i}" for i in range(16)]
    expected = texts(open_engine(tiny_llama, prefix_cache=False, **DEFAULTS), prompts, GREEDY)
    engine = open_engine(tiny_llama, **DEFAULTS)
    assert texts(engine, prompts, GREEDY) == expected
    assert (engine.stats().kv_layout, engine.stats().layout_switches) == ("per-sequence", 0)
    assert engine.stats().prefix_hits == len(prompts) - 1


@pytest.mark.usefixtures("looks_at_every_step")
def test_prompts_that_share_1600_tokens_end_in_unified_cells(open_engine: OpenEngine, tiny_llama: Path) -> None:
    prompts = ["once upon a time there was a tiny model " * 75 + f"and its number was {i}" for i in range(16)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    expected = texts(open_engine(tiny_llama, kv_layout="per-sequence", **DEFAULTS), prompts, params)
    engine = open_engine(tiny_llama, **DEFAULTS)
    assert texts(engine, prompts, params) == expected
    assert (engine.stats().kv_layout, engine.stats().layout_switches) == ("unified", 1)
    assert engine.stats().recomputes == 0


@pytest.mark.parametrize(
    ("model", "settings", "layout"),
    [
        ("tiny_llama", {}, "auto"),
        ("tiny_swa", {}, "auto"),
        ("tiny_mamba", {}, "unified"),
        ("tiny_hybrid", {}, "unified"),
        ("tiny_encoder", {}, "unified"),
        ("tiny_llama", {"pooling": "mean"}, "unified"),
        ("tiny_llama", {"n_ctx": 1000}, "unified"),
        ("tiny_llama", {"kv_layout": "per-sequence"}, "per-sequence"),
        ("tiny_llama", {"kv_layout": "unified"}, "unified"),
    ],
)
def test_engines_of_models_that_have_only_kv_cells_switch(
    open_engine: OpenEngine, model: str, settings: dict[str, Any], layout: str, request: pytest.FixtureRequest
) -> None:
    engine = open_engine(request.getfixturevalue(model), **settings)
    assert engine.info.kv_layout == layout
    assert (engine.core._layout_policy is not None) == (layout == "auto")


@pytest.mark.parametrize("n_ctx", [1024, 1025, 1500, 2047])
def test_the_unified_layout_has_the_configured_number_of_cells(
    open_engine: OpenEngine, tiny_llama: Path, n_ctx: int
) -> None:
    engine = open_engine(tiny_llama, n_ctx=n_ctx)
    assert engine.core.kv.n_ctx_seq == n_ctx // 4 // 256 * 256
    switch(engine)
    assert engine.core.kv.n_ctx == engine.core.kv.n_ctx_seq == engine.info.n_ctx


def test_closing_an_engine_after_a_switch_leaves_a_shared_model_open(tiny_llama: Path) -> None:
    config = EngineConfig(model_path=str(tiny_llama), **SETTINGS)
    with load_model(config) as model:
        for _ in range(2):
            with BatchInferenceEngine(config, runtime=open_runtime(config, model)) as engine:
                switch(engine)
                engine.generate(["Hello"], GREEDY)


def test_each_text_has_its_adapters_in_both_layouts(tiny_llama: Path, tmp_path: Path) -> None:
    adapters = lora_texts.make_adapters(tmp_path)
    expected = lora_texts.texts_apart(tiny_llama, adapters)
    with lora_texts.open_engine(tiny_llama, adapters) as engine:
        names = [
            engine.add_request(prompt, lora_texts.GREEDY, lora=lora)
            for prompt, lora in zip(lora_texts.PROMPTS, lora_texts.OF, strict=True)
        ]
        found = dict.fromkeys(names, "")
        for step in itertools.count(1):
            if not engine.has_work:
                break
            for event in engine.step():
                found[event.request_id] += event.text
            if step % 3 == 0:
                switch(engine)
        assert engine.stats().layout_switches > 5
    assert [found[name] for name in names] == expected
