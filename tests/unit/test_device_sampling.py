"""Which requests can be sampled from the device's candidates."""

from __future__ import annotations

from typing import Any

import pytest

from cppbatch import SamplingParams
from cppbatch.engine.sampling_plan import make_sampling_plan
from tests.support.fakes import FakeVocab

FROM_CANDIDATES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.0, "temperature": 1.5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5, "penalty_last_n": 32},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"logit_bias": {"11": -100.0, "12": -5.0}, "suppress_tokens": [30, 31]},
    {"ignore_eos": True, "min_tokens": 4},
]

FROM_ALL_LOGITS: list[dict[str, Any]] = [
    {"top_k": 0},
    {"top_k": 1000},
    {"temperature": 0, "logprobs": 2},
    {"logit_bias": {"40": 20.0}},
    {"presence_penalty": -1.0},
    {"typical_p": 0.9},
    {"mirostat": 2},
    {"guided_regex": "[a-z ]{8,12}"},
]


@pytest.mark.parametrize("kind", FROM_CANDIDATES)
def test_a_request_that_only_lowers_some_logits_needs_few_candidates(kind: dict[str, Any]) -> None:
    assert 0 < make_sampling_plan(SamplingParams(**kind), FakeVocab(), 100).n_candidates <= 128


@pytest.mark.parametrize("kind", FROM_ALL_LOGITS)
def test_a_request_that_looks_at_all_logits_or_raises_some_gets_them_all(kind: dict[str, Any]) -> None:
    needed = make_sampling_plan(SamplingParams(**kind), FakeVocab(), 100).n_candidates
    assert needed == 0 or needed > 128
