"""Answers have the properties that a schema names, and no others unless it mentions them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from cppbatch import SamplingParams
from cppbatch.chat.lark_grammar import LarkGrammar
from cppbatch.engine.sampling.grammar_child import bytes_tokenizer
from cppbatch.engine.sampling.structured_output import GrammarChecker
from cppbatch.json_schema import close_objects, compact_schema, drop_other_formats

INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}}


def accepts(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (A, {"a": 1, "more": 2}),
        ({"type": "array", "items": A}, [{"a": 1}, {"more": 2}]),
        ({"type": "object", "properties": {"inner": A}}, {"inner": {"a": 1, "more": 2}}),
        ({"$defs": {"A": A}, "$ref": "#/$defs/A"}, {"more": 2}),
        ({"anyOf": [A, INTEGER]}, {"more": 2}),
        ({"prefixItems": [A]}, [{"more": 2}]),
    ],
)
def test_properties_that_are_not_named_are_left_out(schema: Any, value: Any) -> None:
    before = json.dumps(schema)
    assert accepts(schema, value)
    assert not accepts(close_objects(schema), value)
    assert json.dumps(schema) == before


SECRET = {"type": "string", "format": "password", "writeOnly": True}
"""As pydantic writes `SecretStr`."""
PLAIN = {"type": "string", "writeOnly": True}


@pytest.mark.parametrize(
    ("schema", "changed"),
    [
        (SECRET, PLAIN),
        ({"type": "integer", "format": "int32"}, {"type": "integer"}),
        ({"anyOf": [SECRET, {"type": "null"}]}, {"anyOf": [PLAIN, {"type": "null"}]}),
        ({"$defs": {"S": SECRET}, "$ref": "#/$defs/S"}, {"$defs": {"S": PLAIN}, "$ref": "#/$defs/S"}),
        ({"prefixItems": [SECRET], "items": SECRET}, {"prefixItems": [PLAIN], "items": PLAIN}),
        ({"type": "object", "additionalProperties": SECRET}, {"type": "object", "additionalProperties": PLAIN}),
        ({"allOf": [SECRET]}, {"allOf": [PLAIN]}),
    ],
)
def test_formats_that_json_schema_does_not_define_are_ignored(schema: Any, changed: Any) -> None:
    before = json.dumps(schema)
    assert drop_other_formats(schema) == changed
    assert json.dumps(schema) == before
    grammar = LarkGrammar({})
    assert '"format"' not in grammar.source(grammar.json(schema))


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "string", "format": "date-time"},
        {"type": "string", "format": "regex"},
        {"type": "string", "format": 5},
        {"properties": {"format": {"const": {"format": "binary"}}}, "enum": [{"format": "binary"}]},
    ],
)
def test_all_else_about_formats_is_kept(schema: Any) -> None:
    assert drop_other_formats(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": INTEGER},
        {**A, "patternProperties": {"^x": INTEGER}},
        {**A, "minProperties": 3},
        {**A, "required": ["a", "unnamed"]},
        {**A, "required": [["a"]]},
        {"allOf": [A, {"properties": {"b": INTEGER}}]},
        {**A, "anyOf": [{"required": ["b"]}, {"properties": {"c": INTEGER}}]},
        {"$defs": {"A": A}, "$ref": "#/$defs/A", "properties": {"b": INTEGER}},
        {"oneOf": [A, {"type": "object", "properties": {"b": INTEGER}}]},
        {"type": "object", "properties": [1]},
    ],
)
def test_a_schema_that_may_mean_others_is_left_as_it_is(schema: Any) -> None:
    assert close_objects(schema) == schema


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    schema = {"type": "object", "properties": {"allOf": INTEGER, "properties": A}}
    closed = close_objects(schema)
    assert accepts(closed, {"allOf": 1, "properties": {"a": 1}})
    assert not accepts(closed, {"if": 1})


def test_a_deep_schema_does_not_recurse() -> None:
    schema: Any = A
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    inner = close_objects(schema)
    for _ in range(5000):
        inner = inner["items"]
    assert inner == {**A, "additionalProperties": False}


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("as_rule", [False, True], ids=["json_schema", "a rule of a grammar"])
def test_compact_json_has_no_white_space_between_its_tokens(compact: bool, as_rule: bool) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}
    wanted = compact_schema(schema) if compact else schema
    if as_rule:
        lark = LarkGrammar({})
        definition = lark.source(lark.json(wanted))
    else:
        params = SamplingParams(json_schema=schema, compact_json=compact)
        checker = GrammarChecker()
        definition = checker.definition("json_schema", str(params.json_schema))
        checker.close()
    for text, is_allowed in (('{"a":[1,"b c"]}', True), ('{"a": [1, 2]}', not compact)):
        matcher = LLMatcher(bytes_tokenizer(), definition)
        assert (matcher.try_consume_tokens(list(text.encode())) == len(text)) == is_allowed
    assert compact_schema(True) == {"x-guidance": {"whitespace_pattern": ""}}
    assert compact_schema(False) is False
