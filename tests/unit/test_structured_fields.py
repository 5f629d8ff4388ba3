"""Constraints of the text, under every API's name: each reaches `SamplingParams`, or is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from cppbatch.chat.chat_format import ChatTurn
from cppbatch.chat.tools import ToolChoice, callable_tools
from cppbatch.engine.params import GRAMMARS, SamplingParams
from cppbatch.errors import InvalidRequest
from cppbatch.server.api.anthropic.conversion import message_turn
from cppbatch.server.api.anthropic.types import CountTokensRequest
from cppbatch.server.api.generate.generate_endpoint import GenerateRequest
from cppbatch.server.api.openai.chat_types import ChatCompletionRequest
from cppbatch.server.api.openai.completions import CompletionRequest
from cppbatch.server.api.responses.conversion import response_turn
from cppbatch.server.api.responses.types import ResponsesRequest
from cppbatch.server.fields.sampling import SamplingFields
from cppbatch.typed_json import convert
from tests.support.chat_families import PING, chat_format

Json = dict[str, Any]

SCHEMA: Json = {"type": "array", "items": {"type": "integer"}}
COMPACT: Json = SCHEMA | {"x-guidance": {"whitespace_pattern": ""}}

GBNF = 'root ::= "a"'

FORMS: dict[str, tuple[Json, Json]] = {
    "vLLM's json": ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    "vLLM's json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": SCHEMA}),
    "vLLM's json object": ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
    "vLLM's regex": ({"structured_outputs": {"regex": "a+"}}, {"guided_regex": "a+"}),
    "vLLM's choice": ({"structured_outputs": {"choice": ["a", "b"]}}, {"guided_choice": ["a", "b"]}),
    "vLLM's grammar": ({"structured_outputs": {"grammar": GBNF}}, {"grammar": GBNF}),
    "as vLLM's class is written": (
        {"structured_outputs": {"regex": "a+", "json": None, "json_object": None, "disable_any_whitespace": False,
                                "whitespace_pattern": None, "_backend": None, "_backend_was_auto": False}},
        {"guided_regex": "a+"},
    ),
    "guided_json": ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
    "compact": ({"guided_json": SCHEMA, "compact_json": True}, {"json_schema": COMPACT}),
    "vLLM's compact": (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, {"json_schema": COMPACT},
    ),
    "a compact response_format": (
        {"response_format": {"type": "json_object", "schema": SCHEMA}, "compact_json": True}, {"json_schema": COMPACT},
    ),
    "guided_json as text": ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
    "guided_regex": ({"guided_regex": "a+"}, {"guided_regex": "a+"}),
    "guided_choice": ({"guided_choice": ["a"]}, {"guided_choice": ["a"]}),
    "guided_grammar": ({"guided_grammar": GBNF}, {"grammar": GBNF}),
    "SGLang's regex": ({"regex": "a+"}, {"guided_regex": "a+"}),
    "SGLang's ebnf": ({"ebnf": GBNF}, {"grammar": GBNF}),
    "TGI's json_object": ({"response_format": {"type": "json_object", "value": SCHEMA}}, {"json_schema": SCHEMA}),
    "TGI's json": ({"response_format": {"type": "json", "value": SCHEMA}}, {"json_schema": SCHEMA}),
    "TGI's regex": ({"response_format": {"type": "regex", "value": "a+"}}, {"guided_regex": "a+"}),
    "llama-server's": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
    "OpenAI's": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"json_schema": SCHEMA},
    ),
    "no schema": ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
    "text": ({"response_format": {"type": "text"}}, {}),
}  # fmt: skip

REFUSED: dict[str, tuple[Json, str]] = {
    "no json_schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    "json_schema without schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    "a schema in its place": (
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "response_format.json_schema.schema",
    ),
    "json without value": ({"response_format": {"type": "json"}}, "response_format.value"),
    "regex without value": ({"response_format": {"type": "regex", "value": {}}}, "response_format.value"),
    "structural_tag": ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.type"),
    "vLLM's structural_tag": ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    "white space": (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern",
    ),
    "none": ({"structured_outputs": {}}, "structured_outputs"),
    "several of vLLM's": ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
    "two names": ({"guided_json": SCHEMA, "json_schema": SCHEMA}, "guided_json"),
    "two kinds": ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    "not JSON": ({"guided_json": "{"}, "guided_json"),
    "no schema": ({"guided_json": "[1]"}, "guided_json"),
    "too deep": ({"guided_json": "[" * 100_000}, "guided_json"),
}  # fmt: skip


def params(kind: type[SamplingFields], fields: Json) -> SamplingParams:
    """As the endpoints make them for a model that does not reason."""
    required = {"input": "x"} if kind is ResponsesRequest else {"prompt": "x", "messages": []}
    body = convert(required | fields, kind)
    schema = body.schema()
    return body.params(**({} if schema is None else {"json_schema": schema}))


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest, GenerateRequest])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_reaches_the_sampler(kind: type[SamplingFields], form: str) -> None:
    fields, expected = FORMS[form]
    made = msgspec.to_builtins(params(kind, fields))
    given = {name: made[name] for name in GRAMMARS if made[name] is not None}
    if "json_schema" in given:
        given["json_schema"] = json.loads(given["json_schema"])
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()} == expected


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest, GenerateRequest])
@pytest.mark.parametrize("form", REFUSED)
def test_unsupported_constraints_are_refused_with_their_field(kind: type[SamplingFields], form: str) -> None:
    fields, field = REFUSED[form]
    with pytest.raises(InvalidRequest) as refused:
        params(kind, fields)
    assert refused.value.field == field


def test_json_without_a_schema_names_the_type_for_any_object() -> None:
    with pytest.raises(InvalidRequest, match=r"to allow any JSON object, use type json_object$"):
        params(ChatCompletionRequest, {"response_format": {"type": "json"}})


@pytest.mark.parametrize("form", ["guided_json", "guided_regex", "vLLM's choice"])
def test_responses_take_them_too_but_not_with_a_format_of_their_own(form: str) -> None:
    fields, expected = FORMS[form]
    assert params(ResponsesRequest, fields).grammar_field in expected
    with pytest.raises(InvalidRequest, match="cannot be combined"):
        params(ResponsesRequest, {**fields, "text": {"format": {"type": "json_object"}}})


def test_with_a_tool_call_that_is_required_no_constraint_is_dropped() -> None:
    body = convert({"messages": [], "guided_regex": "a+"}, ChatCompletionRequest)
    with pytest.raises(InvalidRequest, match=r"guided_regex: cannot be combined .* tool call"):
        body.params(grammar=GBNF)


def test_an_error_of_the_grammar_has_the_clients_name() -> None:
    body = convert({"prompt": "", "guided_grammar": "x" * 200_000}, CompletionRequest)
    with pytest.raises(InvalidRequest) as refused:
        body.params()
    assert refused.value.field == "guided_grammar"
    assert body.field_names == {"grammar": "guided_grammar"}


NEVER: Json = {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}, "$ref": "#/$defs/a"}
"""No finite JSON matches it."""
TALK: Json = {"messages": [{"role": "user", "content": "Hi."}]}

FAMILIES: dict[str, tuple[ChatTurn, str]] = {
    "chat completions": (
        convert(
            TALK | {"response_format": {"type": "json_schema", "json_schema": {"schema": NEVER}}}, ChatCompletionRequest
        ).turn(),
        "response_format",
    ),
    "vLLM's field there": (convert(TALK | {"guided_json": NEVER}, ChatCompletionRequest).turn(), "guided_json"),
    "messages": (
        message_turn(
            convert(TALK | {"output_config": {"format": {"type": "json_schema", "schema": NEVER}}}, CountTokensRequest)
        ),
        "output_config.format",
    ),
    "vLLM's field in messages": (
        message_turn(convert(TALK | {"guided_json": NEVER}, CountTokensRequest)),
        "guided_json",
    ),
    "responses": (
        response_turn(
            convert({"input": "Hi.", "text": {"format": {"type": "json_schema", "schema": NEVER}}}, ResponsesRequest)
        ),
        "text.format",
    ),
}


@pytest.mark.parametrize(("turn", "field"), FAMILIES.values(), ids=FAMILIES)
def test_a_schema_that_nothing_matches_is_refused_under_the_clients_name(turn: ChatTurn, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat_format("hermes").render(turn)
    assert refused.value.field == field


def test_a_tool_is_refused_under_its_index_in_the_request() -> None:
    bad = {"type": "function", "function": {"name": "b", "parameters": {"type": "string"}}}
    with pytest.raises(InvalidRequest) as refused:
        callable_tools([PING, bad], ToolChoice(allowed=("b",)))
    assert refused.value.field == "tools[1].function.parameters"
