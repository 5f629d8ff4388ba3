"""With tool_choice auto, a call has valid arguments, and all other text is free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, SamplingParams
from tests.support.chat_families import TEMPLATES, tool
from tests.support.native_engines import SETTINGS
from tests.support.schemas import fault

MARKER = "<|im_start|>"
TEMPLATE = TEMPLATES["nemo"].replace("[TOOL_CALLS]", MARKER)
WEATHER = tool("get_weather", {"city": {"enum": ["Oslo", "Rome"]}, "now": {"type": "boolean"}}, "now")
N_BEFORE = 6  # tokens of text before the model calls


@pytest.fixture(scope="module", params=["per-sequence", "unified"])
def engine(tiny_llama: Path, request: pytest.FixtureRequest) -> Iterator[BatchInferenceEngine]:
    settings: dict[str, Any] = {**SETTINGS, "n_ctx": 4096, "n_parallel": 8, "kv_layout": request.param}
    with BatchInferenceEngine(tiny_llama, **settings) as engine:
        yield engine


class CallsSoon:
    """Makes a random model write the marker after some tokens, as a trained one would."""

    def __init__(self, marker: int) -> None:
        self.marker, self.n_prompt = marker, 0

    def __call__(self, tokens: Any, logits: Any) -> None:
        self.n_prompt = self.n_prompt or len(tokens)
        logits[self.marker] = 1e9 if len(tokens) == self.n_prompt + N_BEFORE else -1e9


def test_each_call_matches_its_schema_and_text_before_it_is_free(engine: BatchInferenceEngine) -> None:
    (marker,) = engine.tokens(MARKER, add_special=False, parse_special=True)
    n_texts, schema = 0, WEATHER["function"]["parameters"]
    for seed in range(12):
        params = SamplingParams(temperature=1, seed=seed, max_tokens=200, logits_processor=CallsSoon(marker.id))
        result = engine.chat("What now?", params, chat_template=TEMPLATE, tools=[WEATHER])
        assert result.finish_reason == "stop"
        assert result.tool_calls, result
        n_texts += bool(result.text)
        for call in result.tool_calls:
            assert fault(call.arguments, schema) is None
    assert n_texts
