"""Required tool calls on the default model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cppbatch import BatchInferenceEngine, FinishReason, SamplingParams
from cppbatch.chat.chat_format import ChatFormat, ChatTurn
from cppbatch.chat.template import ChatTemplate
from cppbatch.chat.tools import ToolChoice
from tests.support.chat_families import message, tool
from tests.support.fixtures import shared_engine
from tests.support.schemas import array, fault, record, text, whole

KINDS = [
    tool("set_colour", {"colour": {"enum": ["red", "green", "blue"]}, "brightness": whole(0, 100)}, "brightness"),
    tool("add", {"numbers": array(whole(0, 99), 1, 3)}),
    tool("remind", {"text": text(12), "in": record({"hours": whole(0, 23)})}),
    tool("measure", {"unit": {"type": ["string", "null"], "maxLength": 4}, "exact": {"type": "boolean"}}),
    tool("ping"),
]

WISHES = [
    "Make the lamp blue.", "What is 3 + 4?", "Remind me to eat.", "How tall is it in cm?", "Are you there?",
    "I like red.", "Sum up 1, 2 and 3.", "Wake me up.", "Weigh it, please.", "Hello!",
]  # fmt: skip

engine = shared_engine("default_model", n_ctx=16384, n_parallel=25, n_threads=1)


@pytest.mark.parametrize(("wishes", "n_seeds"), [(WISHES[:5], 1), pytest.param(WISHES, 10, marks=pytest.mark.soak)])
def test_all_of_the_required_calls_name_a_tool_and_match_its_schema(
    engine: BatchInferenceEngine, wishes: list[str], n_seeds: int
) -> None:
    form = ChatFormat(ChatTemplate(engine.info.chat_template, bos=engine.info.bos, eos=engine.info.eos))
    assert form.tool_format.name == "generic"
    choice = ToolChoice(mode="required", parallel=False)
    turns = [
        form.render(ChatTurn([{"role": "user", "content": wish}], tools=KINDS, choice=choice)) for wish in wishes
    ] * n_seeds
    drawn: dict[str, Any] = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 200}
    params = [SamplingParams(seed=seed, **drawn, **its.params) for seed, its in enumerate(turns)]
    results = engine.generate([its.prompt for its in turns], params)
    named: Counter[str] = Counter()
    schemas = {each["function"]["name"]: each["function"].get("parameters", record({})) for each in KINDS}
    for its, result in zip(turns, results, strict=True):
        assert result.finish_reason is FinishReason.STOP, result.text
        read = message(its, [result.text])
        (call,) = read.calls
        assert not read.text
        assert fault(call.arguments, schemas[call.name]) is None, call
        named[call.name] += 1
    print(f"{named.total()} of {len(turns)} calls match: {dict(named)}")
    assert named.total() == len(turns)
    assert len(named) >= 2
