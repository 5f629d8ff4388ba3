"""`--deterministic`: the same logits bit for bit, alone or in any batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, EngineConfig, GenerationEvent, GenerationRequest, SamplingParams
from cppbatch.engine import runtime
from cppbatch.engine.request import ResumeState
from cppbatch.errors import ConfigError, ModelError
from cppbatch.llama.quantize_child import quantize
from cppbatch.models import kernels
from cppbatch.models.synthetic import QUANTS, LlamaShape, write_llama

SHAPE = LlamaShape(n_layer=2, n_embd=256, n_head=4, n_head_kv=2, n_ff=512)
N, N_TOP = 6, 5
PROMPTS = [
    [3 + (7 * i + k * (i + 1)) % 250 for k in range(n)] for i, n in enumerate((1, 3, 17, 48, 600, 96, 130, 5, 64))
]
PARAMS = SamplingParams(temperature=0, max_tokens=N, ignore_eos=True, logprobs=N_TOP)

Results = list[list[tuple[int, float]]]


@pytest.fixture(scope="module", params=["Q8_0", "Q4_0", "Q4_1", "Q6_K", "F32", "BF16", "F16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, kind = tmp_path_factory.mktemp("models"), request.param
    if kind not in QUANTS:
        return quantize(write_llama(folder / "floats.gguf", SHAPE), folder / "tiny.gguf", kind)
    return write_llama(folder / "tiny.gguf", SHAPE, quant=kind)


def engine(model: Path, **settings: Any) -> BatchInferenceEngine:
    defaults = {"n_ctx": 8192, "n_parallel": 8, "n_threads": 1, "n_gpu_layers": 0, "deterministic": True}
    return BatchInferenceEngine(model, **{**defaults, **settings})


def top(events: list[GenerationEvent], request_id: str) -> list[tuple[int, float]]:
    """The exact log-probabilities of the most likely tokens in these events of a request."""
    entries = [entry for event in events if event.request_id == request_id for entry in event.logprobs]
    return [(id, logprob) for entry in entries for id, _, logprob in entry.top]


def logprobs(engine: BatchInferenceEngine, prompts: list[list[int]]) -> Results:
    """The exact log-probabilities of the most likely tokens at every position."""
    results = engine.generate(prompts, PARAMS)
    return [[(id, logprob) for each in r.logprobs or () for id, _, logprob in each.top] for r in results]


@pytest.fixture(scope="module")
def alone(model: Path) -> Results:
    """The result of each prompt alone in the batch."""
    with engine(model, prefix_cache=False) as alone:
        return [logprobs(alone, [prompt])[0] for prompt in PROMPTS]


COMPANIES: list[dict[str, Any]] = [
    {"n_threads": 2},
    {"n_parallel": 16, "n_ctx": 16384},
    {"n_parallel": 3},
    {"n_parallel": 1, "n_ctx": 1024},
    {"n_batch": 64},
    {"n_ubatch": 32},
    {"prefer": "latency"},
]


@pytest.mark.each_value
@pytest.mark.parametrize("settings", COMPANIES, ids=str)
def test_every_bit_is_the_same_alone_and_in_batches_of_any_company(
    model: Path, alone: Results, settings: dict[str, Any]
) -> None:
    assert all(len(each) >= N for each in alone)
    order = random.Random(str(settings)).sample(range(len(PROMPTS)), len(PROMPTS))
    with engine(model, **settings) as batched:
        for _ in range(2):  # the second time, prompts continue cached prefixes
            got = logprobs(batched, [PROMPTS[i] for i in order])
            assert got == [alone[i] for i in order]


@pytest.mark.each_value
@pytest.mark.parametrize("swap_space", [0, 64])
def test_every_bit_is_the_same_after_a_preemption(model: Path, alone: Results, swap_space: int) -> None:
    """With and without host memory: the sequence is restored, or computed again in other pieces."""
    first, second = PROMPTS[:4], PROMPTS[5:9]
    with engine(model, n_parallel=4, swap_space=swap_space, prefix_cache=False) as preempting:
        ids = [preempting.add_request(prompt, PARAMS) for prompt in first]
        events = [event for _ in range(3) for event in preempting.step()]
        ids += [preempting.add_request(prompt, PARAMS, priority=-1) for prompt in second]
        while preempting.has_work:
            events += preempting.step()
        stats = preempting.stats()
        assert (stats.swaps, stats.recomputes) == ((4, 0) if swap_space else (0, 4))
    assert [top(events, id) for id in ids] == alone[:4] + alone[5:9]


def test_every_bit_is_the_same_where_another_engine_continues(model: Path, alone: Results) -> None:
    known = [[token for token, _ in each[::N_TOP]][:2] for each in alone]  # text is greedy
    with engine(model) as other:
        for i, prompt in enumerate(PROMPTS):
            progress = ResumeState(tokens=known[i], age=1.0, first_token_seconds=0.2)
            other.add(other.prepare(GenerationRequest(id=str(i), prompt=prompt, params=PARAMS), progress))
        events = []
        while other.has_work:
            events += other.step()
    for i, each in enumerate(alone):
        assert top(events, str(i)) == each[len(known[i]) * N_TOP :]


def test_a_model_with_logits_that_still_depend_on_the_rows_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_llama(tmp_path / "tiny.gguf", SHAPE)
    monkeypatch.setattr(runtime, "least_rows_for_equal_bits", lambda _context: None)
    with pytest.raises(ModelError, match=r"gguf depend on the number of rows.*requantize FILE --type Q8_0"):
        engine(model)


def test_measured_times_do_not_decide_about_its_kernels(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They depend on the number of sequences: weights that were repacked for 4 were not for 8, and had other bits."""
    monkeypatch.setattr(kernels, "why_not_repacked", lambda path, n_parallel: "weights are not repacked")
    for is_set in (True, False):
        config = EngineConfig(str(tiny_llama), n_gpu_layers=0, n_parallel=8, deterministic=is_set)
        assert runtime.repacks(config) == is_set


def test_settings_that_contradict_it_are_refused() -> None:
    contradictions: list[dict[str, Any]] = [{"kv_layout": "unified"}, {"flash_attn": "off"}]
    for settings in contradictions:
        with pytest.raises(ConfigError, match=r"leave out kv_layout \(--kv-layout\) and flash_attn \(-fa\)"):
            engine(Path("any.gguf"), **settings)


def test_no_batch_is_computed_on_a_gpu_beside_the_cpu(tiny_llama: Path) -> None:
    """llama.cpp copies the weights of large batches to a GPU, with n_gpu_layers 0 too, and rounds otherwise there."""
    for is_set in (True, False):
        config = EngineConfig(str(tiny_llama), n_gpu_layers=0, deterministic=is_set)
        with runtime.load_model(config) as loaded:
            assert loaded.context_params.get("op_offload", True) != is_set
