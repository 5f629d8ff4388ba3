"""Attention is timed in a child process, its times decide what an engine starts with, and quality decides first."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from cppbatch.bench import quality
from cppbatch.bench.quality import measure_proposal
from cppbatch.cli.models_command import models
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.config import EngineConfig
from cppbatch.engine.engine import BatchInferenceEngine
from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import GenerationRequest
from cppbatch.llama import attention_child
from cppbatch.llama.attention_child import measure
from cppbatch.models import attention_times as module
from cppbatch.models.attention_times import (
    Attention,
    AttentionTask,
    AttentionTimes,
    RequestSizes,
    Shape,
    attention_shape,
    attention_times,
    keep_sizes,
    known_sizes,
)
from cppbatch.models.synthetic import LlamaShape, write_llama
from cppbatch.sizing import attention
from cppbatch.sizing.attention import AttentionPlan, keep_excess, known_excess, plan_attention

SMALL = Shape(n_layer=2, n_head=4, n_head_kv=2, head_k=32, head_v=32)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> Path:
    """An empty folder for measurements."""
    monkeypatch.setattr(attention_child, "_MAX_SECONDS", 0.0)  # the fewest rounds
    monkeypatch.setattr(attention_child, "_ARENA_BYTES", 4 << 20)  # what is timed need not be true
    monkeypatch.setattr(quality, "english_text", lambda: "The north wind and the sun. " * 40)
    return empty_cache


@pytest.mark.parametrize(("layout", "n_parallel"), [("per-sequence", 2), ("unified", 1), ("unified", 3)])
def test_every_kind_that_llama_cpp_can_compute_is_timed(layout: str, n_parallel: int) -> None:
    times = measure(AttentionTask(SMALL, layout, n_parallel, 512))  # type: ignore[arg-type]
    kinds = {"f16", "bf16", "q8_0"}
    expected = {f"on {k} {v}" for k in kinds for v in kinds} | {f"off {k} {v}" for k in kinds for v in kinds - {"q8_0"}}
    assert times.decode.keys() == times.prefill.keys() == expected | {"off f32 f32"}
    for each in (times.decode, times.prefill):
        for seconds in each.values():
            assert 0 < seconds[128] < seconds[max(seconds)]


def test_heads_that_do_not_fill_a_block_have_no_quantised_cells() -> None:
    times = measure(AttentionTask(replace(SMALL, head_k=48), "per-sequence", 2, 512))
    assert "on q8_0 f16" not in times.decode
    assert "on f16 q8_0" in times.decode


def test_the_second_time_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    task = AttentionTask(SMALL, "per-sequence", 2, 512)
    first = attention_times(task)
    monkeypatch.setattr(module, "child_command", lambda: ["false"])
    assert attention_times(task) == first
    assert attention_times(replace(task, kv_layout="unified")) is None  # a child that crashes


def test_the_attention_shape_is_known_for_plain_attention_only(
    tiny_llama: Path, tiny_swa: Path, tiny_mamba: Path
) -> None:
    assert attention_shape(tiny_llama)
    assert attention_shape(tiny_swa) is None
    assert attention_shape(tiny_mamba) is None


@pytest.fixture(scope="module")
def models_by_layers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        n: write_llama(folder / f"{n}.gguf", LlamaShape(n_layer=n, n_embd=256, n_head=4, n_head_kv=4, n_ff=256))
        for n in (2, 16)
    }


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, models_by_layers: dict[int, Path]) -> EngineConfig:
    """A model with timed attention, on a CPU, and weights that take no time."""
    monkeypatch.setattr(attention, "has_gpu", lambda: False)
    monkeypatch.setattr(attention, "kernel_times", lambda types: {})
    monkeypatch.setattr(attention, "weights_s", lambda path, n: (0.0, 0.0))
    return EngineConfig(str(models_by_layers[16]), n_ctx=2048, n_parallel=2, n_threads=1)


@pytest.fixture
def shallow(config: EngineConfig, models_by_layers: dict[int, Path]) -> EngineConfig:
    """The same with few layers, to compute with."""
    return replace(config, model_path=str(models_by_layers[2]))


def use_times(monkeypatch: pytest.MonkeyPatch, fast: Attention, has_amx: bool = False) -> None:
    """`fast` takes half of the time of all others."""
    names = [f"{fa} {k} {v}" for fa in ("on", "off") for k in ("f16", "bf16", "q8_0") for v in ("f16", "bf16", "q8_0")]
    rows = {name: {128: 0.5 if name == fast.name else 1.0, 512: 2.0 if name == fast.name else 4.0} for name in names}
    times = AttentionTimes(rows, rows, has_amx)
    monkeypatch.setattr(attention, "attention_times", lambda task: times)


def know_quality(config: EngineConfig, types: str, excess: float) -> None:
    keep_excess(Path(config.model_path), {types: excess})


def test_flash_attention_changes_in_streams_only(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    use_times(monkeypatch, Attention("off", "f16", "f16"))
    plan = plan_attention(config, ())
    assert plan.config == replace(config, stream_flash_attn="off")
    assert plan.line
    assert "-fa off -ctk f16 -ctv f16: steps about " in plan.line
    fixed = replace(config, kv_layout="per-sequence")
    assert plan_attention(fixed, ()).config == replace(fixed, flash_attn="off")


def test_cells_get_the_faster_type_once_its_divergence_is_known(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_times(monkeypatch, Attention("on", "q8_0", "q8_0"))
    before = plan_attention(config, ())
    assert before.config == config
    assert before.proposal
    assert "`cppbatch models cache-types " in before.proposal
    know_quality(config, "q8_0 q8_0", 0.0002)
    after = plan_attention(config, ())
    assert after.config == replace(config, cache_type_k="q8_0", cache_type_v="q8_0", stream_flash_attn="on")
    assert after.proposal is None
    know_quality(config, "q8_0 q8_0", 0.002)
    assert plan_attention(config, ())[:3] == (config, None, None)


def test_attention_is_chosen_for_the_lengths_of_earlier_requests(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 512 tokens both take the same time, beyond that flash attention takes longer."""
    short, long = {128: 1.0, 512: 4.0}, {128: 1.0, 512: 4.0, 2048: 8.0}
    rows = {"on f16 f16": {**short, 2048: 32.0}, "off f16 f16": long}
    monkeypatch.setattr(attention, "attention_times", lambda task: AttentionTimes(rows, rows))
    model, sizes = Path(config.model_path), RequestSizes(20, 30_000, 30_000, 2_000)
    assert plan_attention(config, ()).line is None
    keep_sizes(model, sizes._replace(requests=2))
    assert plan_attention(config, ()).line is None, "two requests say nothing"
    keep_sizes(model, sizes)
    line = plan_attention(config, ()).line
    assert line
    assert "tokens in each of 2 sequences (as in earlier requests)" in line
    of_file = plan_attention(config, (), RequestSizes(1, 80, 80, 40))
    assert of_file.line is None
    assert of_file.load == "100 tokens in each of 2 sequences (as in the input file)"


async def test_a_worker_keeps_the_sizes_of_its_requests(tiny_llama: Path) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)

    async def run(engine: EngineProcess, number: int) -> None:
        request = GenerationRequest(id=f"{number}", prompt=list(range(3, 23)), params=params)
        assert [event async for event in engine.submit(request)][-1].finish_reason == "length"

    async with EngineProcess(tiny_llama, n_ctx=512, n_parallel=4, n_threads=1) as engine:
        await run(engine, 0)
        await asyncio.gather(*(run(engine, number) for number in range(1, 20)))
    sizes = known_sizes(tiny_llama)
    assert sizes
    assert (sizes.requests, sizes.output_tokens) == (20, 100)
    assert sizes.prompt_tokens == pytest.approx(400, abs=20), "the last token of a cached prompt may be a decode row"
    assert sizes.computed_tokens < 60, "the other prompts are in the prefix cache"


def test_given_settings_are_kept(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    use_times(monkeypatch, Attention("on", "q8_0", "q8_0"))
    know_quality(config, "q8_0 q8_0", 0.0)
    assert plan_attention(config, {"cache_type_k"}).config == config
    for given in (replace(config, cache_type_v="bf16"), replace(config, flash_attn="off")):
        assert plan_attention(given, ()).config == given


def test_llama_cpp_decides_on_a_gpu_and_deterministic_keeps_its_cache(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_times(monkeypatch, Attention("off", "f16", "f16"))
    for other in (replace(config, deterministic=True), replace(config, draft_model="draft.gguf")):
        assert plan_attention(other, ()).config == other
    monkeypatch.setattr(attention, "has_gpu", lambda: True)
    assert plan_attention(config, ()) == AttentionPlan(config)
    assert plan_attention(replace(config, n_gpu_layers=0), ()).line


@pytest.mark.parametrize("types", [("q8_0", "bf16"), ("bf16", "bf16"), ("q8_0", "f16")])
def test_an_engine_computes_with_what_was_chosen_in_both_layouts(shallow: EngineConfig, types: tuple[str, str]) -> None:
    k, v = types
    chosen = replace(shallow, cache_type_k=k, cache_type_v=v, stream_flash_attn="off", n_ctx=512)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with BatchInferenceEngine(chosen) as engine:
        short = engine.generate([[5, 6, 7]], params)[0].tokens
        engine.generate([[5 + i % 200 for i in range(350)]], params)  # longer than a stream: the layout changes
        assert engine.stats().kv_layout == "unified"
        assert len(short) == 8


def test_the_divergence_of_cache_types_is_measured_and_kept(shallow: EngineConfig) -> None:
    result = CliRunner().invoke(models, ["cache-types", shallow.model_path, "--json"])
    assert result.exit_code == 0, result.output
    source, order, *others = json.loads(result.stdout)["rows"]
    assert [(row["flash_attn"], row["keys"], row["values"]) for row in (source, order)] == [
        ("on", "f16", "f16"),
        ("off", "f16", "f16"),
    ]
    assert {f"{row['keys']} {row['values']}": row["excess"] for row in others} == known_excess(Path(shallow.model_path))
    assert all(row["kl_divergence"] == pytest.approx(row["excess"] + order["kl_divergence"]) for row in others)
    assert all(row["kl_divergence"] > 0 for row in (order, *others))


def test_tune_measures_what_would_be_faster(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    use_times(monkeypatch, Attention("on", "bf16", "bf16"))
    sentence = measure_proposal(config, ())
    assert sentence
    assert sentence.startswith("-ctk bf16 -ctv bf16 is faster, and its KL divergence from f16 is ")
    assert known_excess(Path(config.model_path)).keys() == {"bf16 bf16"}
    assert measure_proposal(config, ()) is None


def test_a_model_that_returns_vectors_has_no_types_to_compare(tiny_encoder: Path) -> None:
    result = CliRunner().invoke(models, ["cache-types", str(tiny_encoder)])
    assert "is an embedding model" in str(result.exception)
