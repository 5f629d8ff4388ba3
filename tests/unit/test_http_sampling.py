"""Sampling fields of HTTP requests: all of them reach the engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from cppbatch import SamplingParams
from cppbatch.engine.params import SAMPLERS
from cppbatch.server.api.openai.chat_types import ChatCompletionRequest
from cppbatch.server.api.openai.completions import CompletionRequest
from cppbatch.server.fields.parse import parse

Json = dict[str, Any]

if TYPE_CHECKING:  # slow to import
    from openai.types.chat import ChatCompletionMessageParam

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]

OTHERS: Json = {
    "max_tokens": 5, "min_tokens": 2, "seed": 3, "temperature": 0.5, "dynatemp_range": 0.25, "dynatemp_exponent": 2.0,
    "top_k": 7, "top_p": 0.5, "min_p": 0.25, "typical_p": 0.75, "top_n_sigma": 2.0, "xtc_probability": 0.5,
    "xtc_threshold": 0.25, "mirostat": 1, "mirostat_tau": 4.0, "mirostat_eta": 0.25, "adaptive_target": -0.5,
    "adaptive_decay": 0.5, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25,
    "penalty_last_n": 10, "dry_multiplier": 0.5, "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": 20,
    "dry_sequence_breakers": ["x"], "samplers": list(reversed(SAMPLERS)), "logit_bias": {"5": 1.5, "word": -2.0},
    "suppress_tokens": [1, 2], "ignore_eos": True, "speculate": False, "stop": ["a", "b"], "stop_token_ids": [7],
    "include_stop": True, "skip_special_tokens": False, "visible_tokens": ["<|im_start|>"], "echo": True, "logprobs": 4,
    "post_sampling_probs": True, "compact_json": True,
    "json_schema": {"type": "array"}, "guided_regex": "a+", "guided_choice": ["a", "b"], "grammar": 'root ::= "a"',
}  # fmt: skip
"""A value for each field that is not its default."""


def test_every_field_of_sampling_params_may_be_given_in_a_request() -> None:
    assert set(OTHERS) == set(SamplingParams.__struct_fields__) - {
        "logits_processor",
        "reasoning_budget",
        "lazy_grammar",
        "penalize_prompt",
    }
    assert set(OTHERS) <= set(CompletionRequest.__struct_encode_fields__)
    assert set(OTHERS) - set(ChatCompletionRequest.__struct_encode_fields__) == {"echo"}


@pytest.mark.parametrize("field", OTHERS)
def test_the_engine_gets_the_values_of_the_request(field: str) -> None:
    fields: dict[str, Any] = {field: OTHERS[field]}
    expected = SamplingParams(**fields)
    assert expected != SamplingParams()
    assert parse(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest).params() == expected
    if field not in ("echo", "logprobs"):
        assert parse(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatCompletionRequest).params() == expected


def test_a_top_k_of_minus_1_means_all_tokens_as_in_vllm() -> None:
    for top_k in (-1, 0):
        body = json.dumps({"prompt": "x", "top_k": top_k}).encode()
        assert parse(body, CompletionRequest).params() == SamplingParams(top_k=0)
