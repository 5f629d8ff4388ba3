"""The grammar of required tool calls: all text that it allows is parsed as calls that match."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from

from cppbatch.chat.chat_format import ChatFormat, ChatTurn, PreparedChat
from cppbatch.chat.template import ChatTemplate
from cppbatch.chat.tools import ToolChoice
from cppbatch.errors import InvalidRequest
from tests.support.chat_families import PING, QUESTION, TEMPLATES, TOOLS, WEATHER, chat_format, message, turn
from tests.support.schemas import SCHEMAS, Schema, array, fault, number, record, text, whole

OPTIONAL_TEXT: Schema = {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "Perhaps."}

ARGUMENTS: dict[str, Schema] = {
    **{name: schema for name, (_, schema) in SCHEMAS.items() if schema.get("type") == "object"},
    "many kinds": record(
        {
            "text": text(12), "whole": whole(-5, 500), "real": number(0, 1), "flag": {"type": "boolean"},
            "words": array(text(6), 0, 3), "point": record({"x": whole(0, 9), "y": whole(0, 9)}, "y"),
            "unit": {"enum": ["°C", "K<[0]>"]}, "level": {"enum": [1, 2, None]},
        },
        "flag", "real", "words",
    ),
    "all optional": record({name: whole(0, 9) for name in "abc"}, *"abc"),
    "none": {},
}  # fmt: skip

FREE_TEXT = record({"note": {"type": "string"}, "more": OPTIONAL_TEXT}, "more")

FUNCTIONS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": f"tool-{i}", "parameters": schema}}
    for i, schema in enumerate([*ARGUMENTS.values(), FREE_TEXT])
]

SCHEMA_OF = {each["function"]["name"]: each["function"]["parameters"] for each in FUNCTIONS}


class Bytes:
    """A vocabulary of single bytes, an end, and a token for each marker."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        self.ids = {marker: 257 + i for i, marker in enumerate(markers)}
        self.tokens = [*(bytes([i]) for i in range(256)), b"\xff<end>", *(b"\xff" + m.encode() for m in markers)]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id, self.bos_token_id = 256, None

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def text(self, tokens: list[int]) -> str:
        return b"".join(self.tokens[token].removeprefix(b"\xff") for token in tokens).decode()


def make_vocabulary(markers: tuple[str, ...]) -> tuple[Bytes, LLTokenizer]:
    vocab = Bytes(markers)
    return vocab, LLTokenizer(TokenizerWrapper(vocab))


@cache
def vocabulary(family: str) -> tuple[Bytes, LLTokenizer]:
    return make_vocabulary(chat_format(family).markers)


ENDS = [
    "</think>", "</parameter>", "</arg_value>", "\n</parameter>\n", '<|"|>', "<|end|>", "<channel|>", '"', '"}', "}",
]  # fmt: skip
"""What a random walk would rarely find."""


def random_text(family: str, grammar: str, seed: int, *, longest: int = 4000) -> str:
    """A text that the grammar allows."""
    return random_text_of(vocabulary(family), grammar, seed, longest=longest)


@lru_cache(64)
def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, grammar_from("grammar", grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def random_text_of(
    known: tuple[Bytes, LLTokenizer], grammar: str, seed: int, *, longest: int = 4000, more_ends: Sequence[str] = ()
) -> str:
    vocab, tokenizer = known
    rng = random.Random(seed)
    matcher = new_matcher(tokenizer, grammar).deep_copy()
    tokens: list[int] = []
    ends = [list(end.encode()) for end in [*ENDS, *more_ends]]
    while not matcher.is_stopped():
        assert len(tokens) < longest, vocab.text(tokens)[-200:]
        end = rng.choice(ends)
        if rng.random() < 0.3 and matcher.validate_tokens(end) == len(end):
            new = end
        else:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(mask, count=len(vocab.tokens), bitorder="little").nonzero()[0].tolist()
            new = [rng.choice(allowed)]
        if new == [vocab.eos_token_id]:
            break
        assert all(matcher.consume_token(token) for token in new), matcher.get_error()
        tokens += new
    assert matcher.is_accepting()
    return vocab.text(tokens)


def check(its: PreparedChat, written: str) -> int:
    """How many calls the text has; each is of a tool and matches its schema, and there is nothing else."""
    read = message(its, [written])
    assert read.text == "", written
    for call in read.calls:
        assert fault(call.arguments, SCHEMA_OF[call.name]) is None, (call, written)
    return len(read.calls)


# --- random texts that the grammars allow ----------------------------------------------------------------------------


@pytest.mark.parametrize("as_tokens", [True, False], ids=["markers are tokens", "markers are text"])
@pytest.mark.parametrize("family", TEMPLATES)
def test_whatever_a_grammar_lets_through_is_read_as_calls_that_match(family: str, as_tokens: bool) -> None:
    ids = vocabulary(family)[0].ids if as_tokens else {}
    for seed, function in enumerate(FUNCTIONS):
        name = function["function"]["name"]
        its = turn(family, tools=FUNCTIONS, mode="required", name=name, parallel=False, token_ids=ids)
        assert check(its, random_text(family, its.params["grammar"], seed)) == 1


@pytest.mark.parametrize("family", TEMPLATES)
def test_up_to_eight_of_all_tools_may_be_called_where_the_family_can(family: str) -> None:
    its = turn(family, tools=FUNCTIONS, mode="required", token_ids=vocabulary(family)[0].ids)
    counts = {check(its, random_text(family, its.params["grammar"], seed, longest=20_000)) for seed in range(8)}
    several = chat_format(family).tool_format.parallel_calls
    assert min(counts) >= 1
    assert 1 < max(counts) <= 8 if several else counts == {1}


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("family", ["hermes", "qwen_xml", "gemma4", "harmony"])
def test_a_thought_may_come_first_and_must_if_the_prompt_started_one(
    family: str, opened: bool, as_tokens: bool
) -> None:
    ids = vocabulary(family)[0].ids if as_tokens else {}
    its = turn(family, mode="required", parallel=False, tools=[PING], opened=opened, token_ids=ids)
    closing = {"gemma4": "<channel|>", "harmony": "<|end|>"}.get(family, "</think>")
    texts = [random_text(family, its.params["grammar"], seed) for seed in range(12)]
    with_thought = [written for written in texts if closing in written]
    for written in texts:
        (call,) = message(its, [written]).calls
        assert (call.name, json.loads(call.arguments)) == ("ping", {})
    assert with_thought
    if opened and family in ("hermes", "qwen_xml"):
        assert with_thought == texts
    quick = turn(family, mode="required", tools=[PING], quick=True, token_ids=ids)
    if family in ("hermes", "qwen_xml"):
        assert "think" not in quick.params["grammar"]


@pytest.mark.parametrize("family", ["hermes", "harmony", "gemma4"])
def test_an_answer_that_must_be_json_may_follow_a_thought(family: str) -> None:
    schema = ARGUMENTS["many kinds"]
    its = turn(family, tools=[], schema=schema, opened=True, token_ids=vocabulary(family)[0].ids)
    for seed in range(8):
        read = message(its, [random_text(family, its.params["grammar"], seed)])
        assert fault(read.text, schema) is None
    assert set(its.field_names) >= {"grammar"}


@pytest.mark.parametrize("family", TEMPLATES)
def test_where_an_answer_must_be_json_tools_may_still_be_called(family: str) -> None:
    schema = ARGUMENTS["many kinds"]
    its = turn(family, tools=FUNCTIONS[:4], schema=schema, token_ids=vocabulary(family)[0].ids)
    n_calls = []
    for seed in range(16):
        written = random_text(family, its.params["grammar"], seed, longest=20_000)
        read = message(its, [written])
        n_calls.append(check(its, written) if read.calls else 0)
        assert read.calls or fault(read.text, schema) is None
    assert min(n_calls) == 0 < max(n_calls)


@pytest.mark.parametrize("family", TEMPLATES)
def test_an_answer_that_must_be_a_call_has_no_text_that_a_schema_could_describe(family: str) -> None:
    """Clients send both, as instructor does: text.format with the schema of the function that must be called."""
    ids = vocabulary(family)[0].ids
    both = turn(family, tools=FUNCTIONS, mode="required", schema=ARGUMENTS["many kinds"], token_ids=ids)
    assert both.params == turn(family, tools=FUNCTIONS, mode="required", token_ids=ids).params


@pytest.mark.parametrize("family", sorted(TEMPLATES.keys() - {"generic", "llama3"}))  # in these nothing marks a call
def test_strict_functions_are_called_with_valid_arguments_or_not_at_all(family: str) -> None:
    strict = [{**each, "function": {**each["function"], "strict": True}} for each in FUNCTIONS[:4]]
    its = turn(family, tools=strict, token_ids=vocabulary(family)[0].ids)
    n_calls = []
    for seed in range(16):
        read = message(its, [random_text(family, its.params["grammar"], seed, longest=20_000)])
        n_calls.append(len(read.calls))
        assert all(fault(call.arguments, SCHEMA_OF[call.name]) is None for call in read.calls)
    assert min(n_calls) == 0
    if family not in ("typed_tags", "numbered"):  # a random walk hardly finds the start of these
        assert max(n_calls) > 0


def test_an_answer_that_must_be_json_is_plainly_that_where_no_thought_can_come() -> None:
    for its in (turn("llama3", tools=[], schema=FREE_TEXT), turn("hermes", tools=[], schema=FREE_TEXT, quick=True)):
        assert its.params["json_schema"] == FREE_TEXT
        assert "grammar" not in its.params
        assert its.field_names["json_schema"] == "response_format"


# --- what is refused -------------------------------------------------------------------------------------------------


def nested(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return {"type": "object", "properties": {"a": schema}}


def bad(parameters: Any, name: str = "f") -> list[Any]:
    return [{"type": "function", "function": {"name": name, "parameters": parameters}}]


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        ({"tools": bad({}, name="a b")}, "tools[0].function.name", "'a b'"),
        ({"tools": bad({}, name="")}, "tools[0].function.name", "''"),
        ({"tools": bad({}, name='"x')}, "tools[0].function.name", "letters"),
        ({"tools": bad({}, name="x" * 65)}, "tools[0].function.name", "64"),
        ({"tools": [PING, PING]}, "tools[1].function.name", "names must be unique"),
        ({"tools": [], "mode": "required"}, "tool_choice", "tools is empty"),
        ({"name": "other", "mode": "required"}, "tool_choice", "'other'"),
        ({"tools": bad([1])}, "tools[0].function.parameters", "schema of an object"),
        ({"tools": bad(nested(100_000))}, "tools[0].function.parameters", "nested too deeply"),
        ({"tools": bad({"properties": [1]})}, "tools[0].function.parameters.properties", "must be an object"),
        ({"tools": bad({"type": "string"})}, "tools[0].function.parameters", "'string'"),
        (
            {"tools": bad({"properties": {"a": {"$ref": "#"}}, "required": ["a"]})},
            "tools[0].function.parameters", "no finite JSON",
        ),
    ],
)  # fmt: skip
def test_invalid_chat_options_are_refused_with_their_field(asked: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        turn("hermes", **asked)
    assert caught.value.field == field


@pytest.mark.parametrize("family", TEMPLATES)
def test_odd_schemas_end_in_a_grammar_or_a_refusal(family: str) -> None:
    odd: list[Any] = [
        nested(1000),
        {"properties": {"a": {"type": 5}}},
        {"properties": {"a": {"type": [{}]}}, "required": "a"},
        {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}]}}},
        {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/a"}}},
        {"properties": {"a": True, "b": {"enum": []}, "c": {"const": "x\n"}, "</parameter>": {"type": "string"}}},
        {"properties": {"a": {"enum": 5}, "b": {"minLength": "x", "type": "string"}}},
        {"properties": [1]},
        {"$defs": 5, "properties": {"a": {"$ref": "#/$defs/x"}}},
        {"required": ["x"]},
        {"properties": {"a": {"const": 1, "enum": None}, "b": {"const": "x", "enum": []}}},
        {"properties": {"a": {"anyOf": []}, "b": {"oneOf": []}, "c": {"type": []}}},
        {"anyOf": []},
    ]
    for parameters in odd:
        with contextlib.suppress(InvalidRequest):
            its = turn(family, tools=bad(parameters), mode="required")
            assert its.params["grammar"].startswith("start: ")


# --- the form for templates without tools ----------------------------------------------------------------------------


CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}

TALK: list[Any] = [
    {"role": "user", "content": "And in Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "c2"}]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "30 degrees"}]},
    {"role": "user", "content": "So?"},
]


def test_without_tools_in_the_template_the_system_message_describes_them() -> None:
    prompt = turn("generic", messages=[{"role": "system", "content": "Be brief."}, *TALK]).prompt
    system, user, assistant, results = prompt.split("<|im_start|>")[1:5]
    assert system.startswith("system\nBe brief.\n\n")
    assert json.dumps(WEATHER["function"]["parameters"]) in system
    assert user == "user\nAnd in Rome?<|im_end|>\n"
    wanted = {"name": "get_weather", "arguments": {"city": "Rome"}}
    assert json.loads(assistant.removeprefix("assistant\n").removesuffix("<|im_end|>\n")) == {
        "tool_calls": [wanted] * 2
    }
    assert results == "user\nResult of get_weather: sunny\nResult of get_weather: 30 degrees\nSo?<|im_end|>\n"


def test_without_a_system_role_in_the_template_the_user_message_describes_the_tools() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    form = ChatFormat(ChatTemplate(source, bos="", eos=""))
    prompt = form.render(ChatTurn(TALK, tools=TOOLS, choice=ToolChoice())).prompt
    assert prompt.startswith("user: You can call functions.")
    assert "\n\nAnd in Rome?\n" in prompt
    assert form.render(ChatTurn(QUESTION, tools=TOOLS, choice=ToolChoice(mode="none"))).prompt == "user: What now?\n"
