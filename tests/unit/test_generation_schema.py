"""JSON schemas as they are used for generation: keywords that restrict nothing are dropped, and objects closed."""

from __future__ import annotations

import json
from time import monotonic
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from cppbatch import SamplingParams
from cppbatch.chat.lark_grammar import LarkGrammar
from cppbatch.engine.grammar.grammar_check import GrammarChecker
from cppbatch.engine.grammar.grammar_child import bytes_tokenizer, check
from cppbatch.engine.grammar.structured_output import GrammarCompiler
from cppbatch.errors import InvalidRequest
from cppbatch.generation_schema import generation_schema
from cppbatch.generation_schema.keywords import not_enforced
from cppbatch.generation_schema.simplify import simplify
from cppbatch.json_schema import compact_schema

INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}}


def kind(name: str) -> dict[str, Any]:
    """One of several objects that a constant tells apart."""
    return {"type": "object", "properties": {"kind": {"const": name}, name: INTEGER}, "required": ["kind"]}


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
        ({"type": "object", "additionalProperties": A}, {"x": {"more": 2}}),
        ({"allOf": [A]}, {"more": 2}),
        ({"allOf": [A, {"properties": {"b": INTEGER}}]}, {"b": 1, "more": 2}),
        ({"$defs": {"A": A}, "properties": {"x": {"allOf": [{"$ref": "#/$defs/A"}], "title": "X"}}}, {"x": {"c": 1}}),
        ({"oneOf": [A, INTEGER]}, {"more": 2}),
        ({"oneOf": [{"const": 1}, {"const": 2}, A]}, {"more": 2}),
        ({"oneOf": [kind("a"), kind("b")]}, {"kind": "a", "more": 2}),
    ],
)
def test_properties_that_are_not_named_are_left_out(schema: Any, value: Any) -> None:
    before = json.dumps(schema)
    assert accepts(schema, value)
    assert not accepts(generation_schema(schema), value)
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
        ({"allOf": [SECRET]}, PLAIN),
    ],
)
def test_formats_that_json_schema_does_not_define_are_ignored(schema: Any, changed: Any) -> None:
    before = json.dumps(schema)
    assert simplify(schema) == changed
    assert json.dumps(schema) == before
    grammar = LarkGrammar({})
    assert '"format"' not in grammar.source(grammar.json(simplify(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "string", "format": "date"},
        {"type": "string", "format": "regex"},
        {"type": "string", "format": 5},
        {"properties": {"format": {"const": {"format": "binary"}}}, "enum": [{"format": "binary"}]},
    ],
)
def test_all_else_about_formats_is_kept(schema: Any) -> None:
    assert simplify(schema) == schema


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
        {"allOf": [A, {"properties": {"a": {"minimum": 3}}}]},
        {"allOf": [A, {"anyOf": [A, {"properties": {"b": INTEGER}}]}, {"anyOf": [INTEGER, A]}]},
        {**A, "anyOf": [{"required": ["b"]}, {"properties": {"c": INTEGER}}]},
        {"$defs": {"A": A}, "$ref": "#/$defs/A", "properties": {"b": INTEGER}},
        {"oneOf": [A, {"type": "object", "properties": {"b": INTEGER}}]},
        {"type": "object", "properties": [1]},
    ],
)
def test_a_schema_that_may_mean_others_is_left_as_it_is(schema: Any) -> None:
    assert generation_schema(schema) == schema


def test_an_object_is_closed_beside_one_that_must_match_several_schemas() -> None:
    both = {"allOf": [A, {"properties": {"a": {"minimum": 3}}}]}
    schema = {"type": "object", "properties": {"both": both, "one": A}}
    closed = generation_schema(schema)
    assert accepts(closed, {"both": {"a": 4, "more": 1}, "one": {"a": 1}})
    assert not accepts(closed, {"one": {"a": 1, "more": 1}})
    assert not accepts(closed, {"more": 1})


def test_an_object_that_is_also_part_of_several_schemas_stays_open() -> None:
    part = {"$ref": "#/$defs/A"}
    schema = {"$defs": {"A": A}, "properties": {"x": {"anyOf": [part, {"required": ["b"]}], **part}, "y": part}}
    assert accepts(generation_schema(schema), {"x": {"a": 1, "b": 2}, "y": {"more": 1}})


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    schema = {"type": "object", "properties": {"allOf": INTEGER, "properties": A}}
    closed = generation_schema(schema)
    assert accepts(closed, {"allOf": 1, "properties": {"a": 1}})
    assert not accepts(closed, {"if": 1})


def test_a_deep_schema_does_not_recurse() -> None:
    schema: Any = A
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    inner = generation_schema(schema)
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


@pytest.mark.parametrize(
    "neutral",
    [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {}},
        {"propertyNames": True},
        {"uniqueItems": False},
        {"unevaluatedProperties": True},
        {"unevaluatedItems": {"description": "Any."}},
        {"minContains": 0},
        {"contains": INTEGER, "minContains": 0},
        {"maxContains": 2},
        {"not": False},
        {"if": True},
        {"if": INTEGER},
        {"then": INTEGER},
        {"if": INTEGER, "then": {}, "else": True},
        {"dependentRequired": {}},
        {"dependentRequired": {"a": []}},
        {"dependentSchemas": {"a": {}}},
        {"dependencies": {"a": [], "b": True}},
        {"$dynamicAnchor": "here", "$anchor": "here"},
        {"minimum": -(2**63)},
        {"maximum": 2**63 - 1},
        {"exclusiveMaximum": 3.4028234663852886e38},
        {"minimum": -1.7976931348623157e308},
        {"allOf": [{}]},
        {"uniqueItems": True, "maxItems": 1},
        {"$schema": "https://spec.openapis.org/oas/3.0/schema/2024-10-18"},
    ],
    ids=str,
)
def test_a_keyword_that_restricts_nothing_is_dropped(neutral: Any) -> None:
    kept = {key: neutral[key] for key in ("$anchor", "maxItems") if key in neutral}
    assert simplify({"title": "T", **neutral}) == {"title": "T", **kept}
    inner = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/D"}]}, "$defs": {"D": {"title": "T", **neutral}}}
    assert simplify(inner)["$defs"]["D"] == {"title": "T", **kept}


def test_a_keyword_into_which_a_reference_points_is_kept() -> None:
    schema = {"$ref": "#/then", "then": INTEGER}
    assert simplify(schema) == schema


def test_whole_numbers_may_be_written_as_decimals() -> None:
    assert simplify({"minLength": 1.0, "maxLength": 4.0}) == {"minLength": 1, "maxLength": 4}


@pytest.mark.parametrize(
    ("bound", "widened"),
    [
        ({"minimum": 1e19}, {"minimum": 10**17}),
        ({"maximum": -(2**63)}, {"maximum": -(10**17)}),
        ({"minimum": 5e-324}, {"minimum": 0}),
        ({"exclusiveMaximum": 5e-324}, {"exclusiveMaximum": 1e-15}),
        ({"minimum": -5e-324}, {"minimum": -1e-15}),
        ({"minimum": 0.1, "maximum": 2**53 - 1}, {"minimum": 0.1, "maximum": 2**53 - 1}),
    ],
)
def test_bounds_that_the_grammar_engine_cannot_express_are_widened(bound: Any, widened: Any) -> None:
    assert simplify(bound) == widened
    for kind in ("integer", "number"):
        if "5e-324" not in str(bound) or kind == "number":
            compile_schema({"type": kind, **bound})


@pytest.mark.parametrize(
    ("names", "good", "bad"),
    [
        ({"enum": ["a", "b"]}, {"a": 1}, {"c": 1}),
        ({"type": "string", "const": "a"}, {"a": 1}, {"b": 1}),
        ({"type": "string", "pattern": "^x-"}, {"x-1": 1}, {"y": 1}),
        ({"minLength": 2, "maxLength": 3}, {"ab": 1}, {"abcd": 1}),
        ({"format": "date"}, {"2024-02-28": 1}, {"2024-13-01": 1}),
        ({"format": "uuid"}, {"01234567-89ab-cdef-0123-456789ABCDEF": 1}, {"0123": 1}),
    ],
)
def test_names_of_properties_are_enforced_where_the_grammar_engine_can(names: Any, good: Any, bad: Any) -> None:
    schema = {"type": "object", "propertyNames": names, "additionalProperties": INTEGER}
    for value, is_allowed in ((good, True), (bad, False), ({next(iter(good)): "x"}, False)):
        assert accepts(simplify(schema), value) == matches(schema, value) == is_allowed
        assert accepts(schema, value) == is_allowed or "format" in names


def test_properties_that_may_not_have_their_names_are_left_out() -> None:
    schema = {"properties": {"a": INTEGER, "b": INTEGER}, "propertyNames": {"enum": ["a", "c"]}}
    assert simplify(schema) == {"properties": {"a": INTEGER, "c": True}, "additionalProperties": False}


def test_what_is_evaluated_by_no_other_schema_is_additional() -> None:
    base = {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": INTEGER}}]}
    schema = {**base, "unevaluatedProperties": False}
    assert simplify(schema) == {
        "$defs": {"A": A}, "type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "additionalProperties": False
    }  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"pattern": "Z$"}, {"pattern": "Z$", "allOf": [{"pattern": "^2"}]}])
@pytest.mark.parametrize("kind", ["date-time", "time"])
def test_a_second_has_at_most_nine_digits_after_the_point(kind: str, more: Any) -> None:
    for n in (0, 1, 9, 10, 30):
        text = ("2024-05-06T" if kind == "date-time" else "") + "23:59:59" + ("." + "1" * n if n else "") + "Z"
        assert matches({"type": "string", "format": kind, **more}, text) == (n < 10)
    assert matches({"type": "string", "format": "date-time"}, "2024-05-06T23:59:59.123+02:00")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": {"contains": INTEGER}}}, "#/properties/a/contains: contains is not supported"),
        ({"items": {"anyOf": [{}, {"not": INTEGER}]}}, "#/items/anyOf/1/not: not is not supported"),
        ({"$defs": {"U": {"format": "iri"}}}, "#/$defs/U/format: the format 'iri' is not supported"),
    ],
)
def test_a_keyword_that_cannot_be_enforced_is_named_with_its_place(schema: Any, said: str) -> None:
    assert not_enforced(simplify(schema)) == said
    assert not_enforced(simplify({"uniqueItems": False, "propertyNames": {"pattern": "^a"}})) is None


def test_a_reference_may_have_any_characters() -> None:
    name = "Map[string,*a/b~c|d]"
    schema = {"$defs": {name: {**A, "additionalProperties": False}}, "$ref": f"#/$defs/{name}"}
    for reference in ("#/$defs/Map[string,*a~1b~0c|d]", "#/$defs/Map%5Bstring,*a~1b~0c%7Cd%5D"):
        given = {**schema, "$ref": reference}
        assert matches(given, {"a": 1})
        assert not matches(given, {"a": "x"})


def test_a_reference_to_a_schema_around_it_may_be_described_and_nullable() -> None:
    """NJsonSchema writes both."""
    for more in ({"oneOf": [{"$ref": "#"}], "x-nullable": True}, {"oneOf": [{"type": "null"}, {"$ref": "#"}]}):
        schema = {"type": "object", "properties": {"next": {"description": "The next one.", **more}}}
        assert matches(schema, {"next": {"next": {}}})
        assert not matches(schema, {"next": 1})
        assert matches(schema, {"next": None}) == ("x-nullable" not in more)


TEXT = {"type": "string"}
REQUIRED = [{"required": ["a"]}, {"required": ["b"]}]
AB = {"type": "object", "properties": {"a": INTEGER, "b": TEXT}}
FLAT = [{"properties": {"a": INTEGER}, "required": ["a"]}, {"properties": {"b": TEXT}, "required": ["b"]}]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({**AB, "oneOf": REQUIRED}, [{"a": 1}, {"b": "x"}], [{}, {"a": 1, "b": "x"}, {"a": 1, "c": 1}]),
        ({**AB, "anyOf": REQUIRED}, [{"a": 1}, {"a": 1, "b": "x"}], [{}, {"a": 1, "c": 1}]),
        ({**AB, "oneOf": REQUIRED, "anyOf": REQUIRED}, [{"a": 1}], [{}, {"a": 1, "b": "x"}]),
        ({"type": "object", "oneOf": FLAT}, [{"a": 1}, {"b": "x"}], [{"a": 1, "b": "x"}, {"a": 1, "b": 1}]),
        ({"type": "object", "properties": {"c": TEXT}, "oneOf": FLAT}, [{"c": "x", "a": 1}], [{"a": 1, "b": "x"}]),
        ({"oneOf": [{"type": "null"}, A, TEXT]}, [None, {"a": 1}, "x"], [1]),
        ({"oneOf": [{}, {"type": "null"}]}, [1, "x", [], {}], [None]),
        ({**AB, "minProperties": 1}, [{"a": 1}, {"b": "x"}], [{}, {"c": 1}]),
        ({**AB, "minProperties": 1, "maxProperties": 2, "required": ["a"]}, [{"a": 1}], [{}, {"a": 1, "c": 1}]),
    ],
    ids=str,
)
def test_alternatives_and_numbers_of_properties_are_enforced(schema: Any, good: Any, bad: Any) -> None:
    for value in good:
        assert accepts(schema, value)
        assert matches(schema, value), value
    for value in bad:
        assert not matches(schema, value), value


@pytest.mark.parametrize(
    "alternatives",
    [
        FLAT,  # a text matches both
        [A, {"type": "object", "properties": {"b": TEXT}, "required": ["b"]}],  # {"b": "x"} matches both
        [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["a", "b"], "properties": {"a": {}}}],
        [True, True],
        [{"$ref": "#/$defs/A", "required": ["a"]}, {"$ref": "#/$defs/A", "required": ["b"]}],
    ],
    ids=str,
)
def test_alternatives_that_may_match_at_once_are_left_to_the_grammar_engine(alternatives: Any) -> None:
    schema = {"oneOf": alternatives, "$defs": {"A": A}}
    assert generation_schema(schema)["oneOf"] == generation_schema({"oneOf": alternatives})["oneOf"] == alternatives


def test_a_thousand_alternatives_do_not_take_a_thousand_times_as_long_each() -> None:
    alternatives = [kind(f"v{i}") for i in range(1_000)]
    began = monotonic()
    assert generation_schema({"oneOf": alternatives})["anyOf"]
    assert generation_schema({"oneOf": [*alternatives, A]})["oneOf"]
    assert monotonic() - began < 5


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a/b": {"pattern": "(?=x)"}}}, "#/properties/a~1b/pattern: regex parse error"),
        ({"allOf": [A, {"properties": {"b": {"uniqueItems": True}}}]}, "#/allOf/1/properties/b/uniqueItems: uniqueI"),
        ({"uniqueItems": True, "contains": INTEGER}, "#/uniqueItems: uniqueItems is not supported"),
        ({"properties": {"a": {"$ref": "#/$defs/None"}}}, "#/properties/a/$ref: Pointer '/$defs/None' does not exist"),
        ({"items": {"type": "bigint"}}, "#/items/type: Invalid type: bigint"),
        ({"format": ["uuid"], "not": TEXT}, "#/not: not is not supported"),
    ],
    ids=str,
)
def test_a_schema_is_refused_with_the_keyword_and_its_place_in_what_the_client_sent(schema: Any, said: str) -> None:
    compiler = GrammarCompiler(bytes_tokenizer)
    try:
        with pytest.raises(InvalidRequest) as refused:
            compiler.constraint(SamplingParams(json_schema=schema))
    finally:
        compiler.close()
    assert refused.value.message.startswith(said)


def compile_schema(schema: Any) -> LLMatcher:
    """Its matcher; fails if it does not compile."""
    compiled = check(bytes_tokenizer(), "json_schema", json.dumps(generation_schema(schema)))
    assert "error" not in compiled, compiled["error"]
    return LLMatcher(bytes_tokenizer(), compiled["definition"])


def matches(schema: Any, value: Any) -> bool:
    """Whether the grammar lets the value through."""
    matcher, text = compile_schema(schema), list(json.dumps(value).encode())
    return matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()
