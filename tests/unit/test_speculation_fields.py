"""Speculative decoding in requests: every API can turn it off, and OpenAI's `prediction` reaches the engine."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cppbatch import EngineConfig
from cppbatch.errors import ConfigError, InvalidRequest
from cppbatch.server.api.anthropic.types import MessagesRequest
from cppbatch.server.api.generate.generate_endpoint import GenerateRequest
from cppbatch.server.api.llama_server.completion import LlamaCompletionRequest
from cppbatch.server.api.openai.chat_types import ChatCompletionRequest
from cppbatch.server.api.openai.completions import CompletionRequest
from cppbatch.server.api.responses.types import ResponsesRequest
from cppbatch.server.fields.parse import parse
from cppbatch.server.fields.sampling import SamplingFields, merge_fields

MESSAGES = [{"role": "user", "content": "hello"}]
FAMILIES: dict[type[SamplingFields], dict[str, Any]] = {
    CompletionRequest: {"prompt": "x"},
    ChatCompletionRequest: {"messages": MESSAGES},
    ResponsesRequest: {"input": "x"},
    MessagesRequest: {"model": "a", "messages": MESSAGES, "max_tokens": 3},
    GenerateRequest: {"prompt": "x"},
    LlamaCompletionRequest: {"prompt": "x"},
}


def read(kind: type[SamplingFields], **fields: Any) -> SamplingFields:
    return parse(json.dumps({**FAMILIES[kind], **fields}).encode(), kind)


@pytest.mark.parametrize("kind", FAMILIES, ids=lambda kind: kind.__name__)
def test_every_api_can_turn_drafts_off(kind: type[SamplingFields]) -> None:
    assert read(kind).params().speculate
    assert not read(kind, speculate=False).params().speculate
    for n_max, speculates in ((0, False), (-1, False), (1, True), (16, True)):
        assert read(kind, **{"speculative.n_max": n_max}).params().speculate is speculates
    assert not read(kind, **{"speculate": True, "speculative.n_max": 0}).params().speculate
    assert not read(kind, **{"speculate": False, "speculative.n_max": 4}).params().speculate


def test_an_item_of_a_batch_overrides_the_shared_field_under_either_name() -> None:
    for own in ({"speculate": True}, {"speculative.n_max": 4}):
        assert merge_fields({"speculative.n_max": 0}, own) == own
        assert merge_fields({"speculate": False}, own) == own


def prediction(given: object) -> object:
    return read(ChatCompletionRequest, prediction=given).options().get("prediction")


def test_a_prediction_is_a_text_or_parts_of_text() -> None:
    assert prediction({"type": "content", "content": "def f():"}) == "def f():"
    parts = [{"type": "text", "text": "def "}, {"type": "text", "text": "f():"}]
    assert prediction({"type": "content", "content": parts}) == "def f():"
    assert prediction(None) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "content", "content": [{"type": "image_url"}]}, "only text is supported"),
        ({"type": "text", "content": "a"}, "type"),
        ({"type": "content"}, "content"),
        ("a text", "prediction"),
    ],
)
def test_another_prediction_is_refused_by_its_name(given: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        prediction(given)
    assert caught.value.field.startswith("prediction")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spec": "ngram"}, "spec (--spec) is 'ngram'; it must be one of auto, off, suffix, draft"),
        ({"draft_max": 0}, "--draft"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig(model_path="a.gguf", **settings)
