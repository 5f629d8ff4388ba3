"""The reasoning of a completion ends after its budget with the marker of its family, and the answer follows."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from itertools import accumulate
from typing import Any

import pytest
from msgspec.structs import replace

from cppbatch import BatchInferenceEngine, ChatCompletion, FinishReason, InvalidRequest, SamplingParams
from cppbatch.chat import reasoning
from cppbatch.server.settings import ServerSettings
from tests.support.chat_families import PING, TEMPLATES
from tests.support.fixtures import chat_server, shared_engine
from tests.support.native_engines import SETTINGS
from tests.support.scripted_chat import ChatServer

TAGS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|channel>thought": "<channel|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
ANALYSIS = "<|channel|>analysis<|message|>"
BUDGETS = (0, 1, 7, 40)
QUESTION = "What now?"


def opened(start: str) -> str:
    """A template that ends prompts with this marker."""
    return TEMPLATES["generic"] + start


HARMONY = TEMPLATES["harmony"].replace("assistant{% endif %}", f"assistant{ANALYSIS}{{% endif %}}")

engine = shared_engine(**{**SETTINGS, "n_ctx": 4096, "n_parallel": 8})


def sampled(engine: BatchInferenceEngine, max_tokens: int = 120, **others: Any) -> SamplingParams:
    """Keeps a model with random weights from writing a marker itself: each starts with one of these letters."""
    never = [i for i in range(engine.info.n_vocab) if engine.core.runtime.vocab.piece(i)[-1:] in (b"<", b"[")]
    return SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True, suppress_tokens=never, **others)


def answer(engine: BatchInferenceEngine, template: str, **options: Any) -> ChatCompletion:
    params = options.pop("params", None) or sampled(engine)
    result = engine.chat(QUESTION, params, chat_template=template, **options)
    assert isinstance(result, ChatCompletion)
    return result


def n_before(result: ChatCompletion, marker: str) -> int:
    """Tokens before the marker."""
    ends = list(accumulate(map(len, result.token_texts)))
    text = "".join(result.token_texts)
    assert marker in text
    return sum(end <= text.index(marker) for end in ends)


def test_the_tests_here_have_the_tags_of_every_family() -> None:
    assert tuple(TAGS.items()) == reasoning._KNOWN_TAGS


@pytest.mark.each_value
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("start", TAGS)
def test_reasoning_between_tags_ends_after_its_budget(engine: BatchInferenceEngine, start: str, budget: int) -> None:
    result = answer(engine, opened(start), thinking_budget=budget)
    assert n_before(result, TAGS[start]) == budget
    assert bool(result.reasoning) == bool(budget)
    assert result.text
    assert result.usage.completion_tokens == 120


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_analysis_of_harmony_ends_after_its_budget_and_the_final_channel_follows(
    engine: BatchInferenceEngine, budget: int
) -> None:
    result = answer(engine, HARMONY, thinking_budget=budget)
    assert n_before(result, "<|end|><|start|>assistant<|channel|>final<|message|>") == budget
    assert result.text


def test_with_tools_harmony_chooses_the_channel_after_its_budget(engine: BatchInferenceEngine) -> None:
    result = answer(engine, HARMONY, thinking_budget=5, tools=[PING])
    assert n_before(result, "<|end|><|start|>assistant") == 5
    assert "final" not in "".join(result.token_texts)


@pytest.mark.each_value
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("family", [name for name in TEMPLATES if name != "harmony"])
def test_every_family_that_calls_tools_has_budgets_too(engine: BatchInferenceEngine, family: str, tools: bool) -> None:
    template = TEMPLATES[family]
    tags = reasoning.ReasoningTags.of_template(template) or reasoning.ReasoningTags("<think>", "</think>")
    result = answer(engine, template + tags.start, thinking_budget=7, tools=[PING] if tools else [])
    assert n_before(result, tags.end) == 7
    assert result.reasoning
    assert result.text or result.tool_calls


def test_a_budget_ends_between_two_characters_where_a_grammar_reads_the_text(engine: BatchInferenceEngine) -> None:
    """A model of random weights often writes the first byte of a character of several."""
    template = TEMPLATES["hermes"].replace("{% if opened %}", "{% if true %}")
    n_late = 0
    for n in range(1, 24):
        params = SamplingParams(temperature=1, seed=n, max_tokens=120)
        result = answer(engine, template, params=params, thinking_budget=n, tools=[PING], tool_choice="required")
        if "</think>" in "".join(result.token_texts[:n]):  # the model ended it itself
            continue
        assert result.finish_reason != FinishReason.ERROR
        n_late += n_before(result, "</think>") - n
        assert 0 <= n_before(result, "</think>") - n <= 3
    assert n_late > 0


@pytest.mark.parametrize("start", [*TAGS, ANALYSIS])
def test_a_model_that_starts_to_reason_by_itself_has_the_same_budget(engine: BatchInferenceEngine, start: str) -> None:
    end = TAGS.get(start, "<|end|>")
    template = TEMPLATES["harmony"] if start == ANALYSIS else TEMPLATES["generic"] + f"{{# {start} {end} #}}"
    first = [token.id for token in engine.tokens(start, add_special=False)]
    prompts = set()

    def begins_with_start(tokens: Any, logits: Any) -> None:
        prompts.add(len(tokens))
        if (n := len(tokens) - min(prompts)) < len(first):
            logits[first[n]] = 1e9

    params = replace(sampled(engine), suppress_tokens=(), logits_processor=begins_with_start)
    result = answer(engine, template, params=params, thinking_budget=9)
    assert n_before(result, end) - len(first) == 9
    assert result.reasoning
    assert result.text


def test_a_budget_changes_nothing_before_it_is_spent(engine: BatchInferenceEngine) -> None:
    plain, limited = (answer(engine, opened("<think>"), thinking_budget=n) for n in (-1, 40))
    assert limited.tokens[:40] == plain.tokens[:40]
    assert answer(engine, opened("<think>"), thinking_budget=500).tokens == plain.tokens


def test_a_batch_of_budgets_has_the_texts_of_each_alone(engine: BatchInferenceEngine) -> None:
    alone = [answer(engine, opened("<think>"), thinking_budget=n).tokens for n in BUDGETS]
    for speculate in (True, False):
        params = sampled(engine, speculate=speculate)
        streams = [
            engine.chat_stream(QUESTION, params, chat_template=opened("<think>"), thinking_budget=n) for n in BUDGETS
        ]
        assert [[token for event in stream for token in event.tokens] for stream in streams] == alone


@pytest.mark.parametrize(("effort", "n"), [("none", 0), ("minimal", 128), ("low", 1024)])
def test_efforts_become_budgets_for_templates_that_do_not_support_them(
    engine: BatchInferenceEngine, effort: str, n: int
) -> None:
    params = sampled(engine, n + 20)
    assert n_before(answer(engine, opened("<think>"), params=params, reasoning_effort=effort), "</think>") == n
    knows = opened("<think>") + "{# reasoning_effort #}"
    assert "</think>" not in "".join(answer(engine, knows, params=params, reasoning_effort=effort).token_texts)


def test_a_schema_follows_the_reasoning(engine: BatchInferenceEngine) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"], "additionalProperties": False}
    params = SamplingParams(max_tokens=120, seed=3, json_schema=schema)
    result = answer(engine, opened("<think>"), params=params, thinking_budget=12)
    assert n_before(result, "</think>") <= 12
    assert json.loads(result.text) == {"n": 1}


def test_a_model_that_does_not_reason_ignores_the_budget(engine: BatchInferenceEngine) -> None:
    assert answer(engine, TEMPLATES["generic"], thinking_budget=3).text


server = chat_server(ServerSettings(chat_template=opened("<think>"), thinking_tokens=20), **{**SETTINGS, "n_ctx": 4096})
"""Its model starts with reasoning, limited to 20 tokens by default."""

CHAT = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60, "temperature": 0}


def test_each_api_has_a_budget(server: ChatServer) -> None:
    def reasoning(**fields: Any) -> str:
        answer = server.post("/v1/chat/completions", {**CHAT, **fields})
        return str(answer["choices"][0]["message"]["reasoning_content"])

    six = reasoning(thinking_budget=6)
    assert reasoning(thinking_budget_tokens=6) == reasoning(reasoning_budget_tokens=6) == six
    by_default, unlimited = reasoning(), reasoning(thinking_budget=-1)
    assert by_default.startswith(six.rstrip())
    assert unlimited.startswith(by_default.rstrip())
    assert len(six) < len(by_default) < len(unlimited)
    generated = server.post("/generate", {**CHAT, "thinking_budget": 6})["text"]
    assert generated.startswith(f"{six.rstrip()}")
    assert "</think>" in generated
    body = {"input": QUESTION, "max_output_tokens": 60, "temperature": 0, "thinking_budget": 6}
    answer = server.post("/v1/responses", body)
    assert answer["output"][0]["content"][0]["text"] == six
    thinking = {"type": "enabled", "budget_tokens": 6}
    message = server.post("/v1/messages", {**CHAT, "model": "any", "thinking": thinking})
    assert message["content"][0]["thinking"] == six
    assert message["content"][1]["type"] == "text"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_counted(server: ChatServer, stream: bool) -> None:
    body = {**CHAT, "thinking_budget": 30, "stream": stream, "stream_options": {"include_usage": True}}
    if stream:
        with server.stream("/v1/chat/completions", body) as streamed:
            events = streamed.read().decode().split("\n\n")
        usage = json.loads(events[-3].removeprefix("data: "))["usage"]
    else:
        del body["stream_options"]
        usage = server.post("/v1/chat/completions", body)["usage"]
    n_marker = len("</think>")
    assert 30 <= usage["completion_tokens_details"]["reasoning_tokens"] <= 30 + n_marker
    assert usage["completion_tokens"] == 60


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/v1/chat/completions", {"thinking_budget": -2}, "thinking_budget"),
        ("/v1/chat/completions", {"thinking_budget": 2**31}, "thinking_budget"),
        (
            "/v1/messages",
            {"model": "any", "thinking": {"type": "enabled", "budget_tokens": -5}},
            "thinking.budget_tokens",
        ),
        ("/generate", {"reasoning_budget_tokens": 5}, "reasoning_budget_tokens"),
    ],
)
def test_the_answer_to_a_wrong_budget_names_the_field(server: ChatServer, path: str, fields: Any, field: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        server.post(path, {**CHAT, **fields})
    assert field in refused.value.read().decode()


def test_a_wrong_budget_is_refused(engine: BatchInferenceEngine) -> None:
    with pytest.raises(InvalidRequest, match=r"is -2; .* or -1 for no limit") as refused:
        answer(engine, opened("<think>"), thinking_budget=-2)
    assert refused.value.field == "thinking_budget"
