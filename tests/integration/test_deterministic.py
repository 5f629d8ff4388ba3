"""`--deterministic`: the same logits bit for bit, alone or in any batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from cppbatch.errors import ConfigError, ModelError
from cppbatch.models.synthetic import LlamaShape, write_llama

SHAPE = LlamaShape(n_layer=2, n_embd=256, n_head=4, n_head_kv=2, n_ff=512)
N = 12
PROMPTS = [
    [3 + (7 * i + k * (i + 1)) % 250 for k in range(n)] for i, n in enumerate((1, 3, 17, 48, 600, 96, 130, 511, 5, 64))
]
PARAMS = SamplingParams(temperature=0, max_tokens=N, ignore_eos=True, logprobs=5)

Results = list[list[tuple[int, float]]]


@pytest.fixture(scope="module", params=["Q8_0", "Q4_0", "Q4_1"])
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", SHAPE, quant=request.param)


def engine(model: Path, **settings: Any) -> BatchInferenceEngine:
    defaults = {"n_ctx": 8192, "n_parallel": 8, "n_threads": 2, "n_gpu_layers": 0, "deterministic": True}
    return BatchInferenceEngine(model, **{**defaults, **settings})


def logprobs(engine: BatchInferenceEngine, prompts: list[list[int]]) -> Results:
    """The exact log-probabilities of the likeliest tokens at every position."""
    results = engine.generate(prompts, PARAMS)
    return [[(id, logprob) for each in r.logprobs or () for id, _, logprob in each.top] for r in results]


def test_every_bit_is_the_same_alone_and_in_batches_of_any_company(quantised: Path) -> None:
    with engine(quantised, prefix_cache=False) as alone:
        expected = [logprobs(alone, [prompt])[0] for prompt in PROMPTS]
    assert all(len(each) >= N for each in expected)
    companies: list[dict[str, Any]] = [
        {},
        {"n_parallel": 16, "n_ctx": 16384},
        {"n_parallel": 3},
        {"n_batch": 64},
        {"prefer": "latency"},
    ]
    for seed, settings in enumerate(companies):
        order = random.Random(seed).sample(range(len(PROMPTS)), len(PROMPTS))
        with engine(quantised, **settings) as batched:
            for _ in range(2):  # the second time, prompts continue cached prefixes
                got = logprobs(batched, [PROMPTS[i] for i in order])
                assert got == [expected[i] for i in order]


def test_a_model_of_float_weights_is_refused_with_the_remedy(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny.gguf", SHAPE, quant="F16")
    with pytest.raises(ModelError, match=r"tiny.gguf depend on the number of rows.*requantize FILE --type Q8_0"):
        engine(model)


def test_settings_that_contradict_it_are_refused(quantised: Path) -> None:
    contradictions: list[dict[str, Any]] = [{"kv_layout": "unified"}, {"flash_attn": "off"}]
    for settings in contradictions:
        with pytest.raises(ConfigError, match=r"leave out kv_layout \(--kv-layout\) and flash_attn \(-fa\)"):
            engine(quantised, **settings)
