"""What an engine promises, on the GGUF files of a folder: models that people run have windows, large vocabularies and
kernels that tiny ones do not (`./scripts/test models FOLDER`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from tests.support.near_ties import TOP_TWO_TIE, gap_where_it_parts

FILES = sorted(Path(os.environ["CPPBATCH_REAL_MODELS"]).expanduser().glob("*.gguf"))
assert FILES, "the folder has no GGUF file"
N_SEQUENCES = 8
RULES = "Answer in one sentence, name the place, and never guess. " * 40
QUESTIONS = ["Where is the river?", "Who built the bridge?", "When does it flood?", "What grows in the valley?"]
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "1, 2, 3, 4,", "Once upon a time"]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.stem)
def engine(request: pytest.FixtureRequest) -> Iterator[BatchInferenceEngine]:
    with BatchInferenceEngine(request.param, n_ctx=8192, n_parallel=N_SEQUENCES, n_gpu_layers=0) as opened:
        yield opened


def test_later_requests_take_the_common_prefix_from_the_cache(engine: BatchInferenceEngine) -> None:
    engine.clear_prefix_cache()
    (first,) = engine.generate([RULES + QUESTIONS[0]], GREEDY)
    others = engine.generate([RULES + question for question in QUESTIONS[1:]], GREEDY)
    assert first.usage.cached_tokens == 0
    for each in others:
        assert each.usage.cached_tokens > 0.9 * first.usage.prompt_tokens


def test_the_next_message_of_a_conversation_takes_the_earlier_ones_from_the_cache(engine: BatchInferenceEngine) -> None:
    engine.clear_prefix_cache()
    (first,) = engine.generate([RULES + QUESTIONS[0]], GREEDY)
    (second,) = engine.generate([RULES + QUESTIONS[0] + first.text + "\n" + QUESTIONS[1]], GREEDY)
    assert second.usage.cached_tokens > 0.9 * first.usage.prompt_tokens


def test_greedy_texts_in_a_batch_part_from_those_alone_only_where_two_tokens_are_nearly_tied(
    engine: BatchInferenceEngine,
) -> None:
    for prompt, ours in zip(PROMPTS * 2, engine.generate(PROMPTS * 2, GREEDY), strict=True):
        assert gap_where_it_parts(Path(engine.config.model_path), prompt, list(ours.tokens)) < TOP_TWO_TIE


def test_no_request_is_lost_when_the_cells_are_full(engine: BatchInferenceEngine) -> None:
    with BatchInferenceEngine(
        engine.config.model_path, n_ctx=512, n_parallel=N_SEQUENCES, n_gpu_layers=0, kv_layout="unified"
    ) as small:
        texts = small.generate(PROMPTS * 4, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        assert [len(each.tokens) for each in texts] == [100] * 16
