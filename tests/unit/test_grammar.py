"""Whether a JSON schema has a finite instance, found in bounded time; the characters of GBNF."""

from __future__ import annotations

from time import thread_time
from typing import Any

import pytest
from hypothesis import strategies as st
from llguidance import LLMatcher

from cppbatch.engine.grammar.grammar_child import bytes_tokenizer, check
from cppbatch.json_schema import has_finite_instance
from tests.support.randomised import randomised

LOOP: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["#", "#/", "#/$defs/a", "#/properties/a", "#/anyOf/0", "object", "array", "string", "a", "b"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(
            ["$ref", "$defs", "type", "properties", "required", "items", "prefixItems", "minItems", "anyOf", "oneOf",
             "allOf", "const", "enum", "a", "b", ""]
        ),
        inner,
        max_size=5,
    ),
    max_leaves=25,
)  # fmt: skip


def without_references(schema: Any) -> Any:
    if isinstance(schema, list):
        return [without_references(part) for part in schema]
    if isinstance(schema, dict):
        return {key: without_references(part) for key, part in schema.items() if key != "$ref"}
    return schema


@randomised(ring=100, soak=500, schema=ANYTHING)
def test_any_json_has_a_finite_instance_or_none(schema: Any) -> None:
    assert has_finite_instance(schema) in (True, False)


@randomised(ring=100, soak=500, schema=ANYTHING)
def test_references_without_a_base_case_are_replaced(schema: Any) -> None:
    assert has_finite_instance(without_references(schema))


FINITE: dict[str, Any] = {
    "true": True,
    "false, which has none at all": False,
    "no schema": None,
    "an optional property": {**LOOP, "required": []},
    "a property that may be null": {
        **LOOP, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    },
    "one of them ends": {"oneOf": [{"$ref": "#"}, {"type": "integer"}]},
    "objects, or no objects": {**LOOP, "type": ["object", "string"]},
    "an array that may be empty": {"type": "array", "items": {"$ref": "#"}},
    "an array with a sufficient tuple": {
        "type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1,
    },
    "no type": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "a constant": {**LOOP, "const": {"a": 1}},
    "a reference twice, but not within itself": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#/$defs/x"}},
        "required": ["a", "b"],
        "$defs": {"x": {"type": "integer"}},
    },
    "a reference to nowhere": {"$ref": "#/$defs/none"},
    "a reference to elsewhere": {"$ref": "https://example.com"},
    "a reference by a name": {
        "type": "object",
        "properties": {"a": {"$ref": "#leaf"}},
        "required": ["a"],
        "$defs": {"leaf": {"$anchor": "leaf", "type": "integer"}},
    },
    "a reference into an array": {"anyOf": [{"$ref": "#/anyOf/1"}, {"type": "integer"}]},
    "a reference with escapes": {"$ref": "#/$defs/a~1b~0", "$defs": {"a/b~": {"type": "integer"}}},
    "required, but not described": {"type": "object", "required": ["a"]},
}  # fmt: skip

INFINITE: dict[str, Any] = {
    "itself": {"$ref": "#"},
    "a property": LOOP,
    "a property of a property": {
        "$ref": "#/$defs/x",
        "$defs": {
            "x": {"type": "object", "properties": {"b": {"$ref": "#/$defs/y"}}, "required": ["b"]},
            "y": {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]},
        },
    },
    "two names for each other": {
        "$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}},
    },
    "an array": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "a tuple": {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2},
    "beyond a tuple": {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 2},
    "all of them": {"allOf": [{"type": "object"}, {"$ref": "#"}]},
    "any of them": {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
    "objects and arrays": {**LOOP, "type": ["object", "array"], "items": {"$ref": "#"}, "minItems": 1},
    "within a list": {**LOOP, "properties": {"a": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}},
}  # fmt: skip


@pytest.mark.parametrize("schema", FINITE.values(), ids=FINITE)
def test_a_schema_that_can_end_is_not_refused(schema: Any) -> None:
    assert has_finite_instance(schema)


@pytest.mark.parametrize("schema", INFINITE.values(), ids=INFINITE)
def test_a_schema_that_requires_itself_within_itself_never_ends(schema: Any) -> None:
    assert not has_finite_instance(schema)


def test_a_schema_of_many_branches_is_looked_at_in_bounded_time() -> None:
    names: dict[str, Any] = {f"{i}": {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 9} for i in range(60)}
    began = thread_time()
    has_finite_instance(
        {"$ref": "#/$defs/0", "$defs": {**names, "60": LOOP | {"properties": {"a": {"$ref": "#/$defs/0"}}}}}
    )
    assert thread_time() - began < 5


def test_lists_that_many_references_share_are_read_within_bounds() -> None:
    defs = {"a": {"type": "object", "required": ["x"] * 200_000, "properties": {}}}
    began = thread_time()
    assert has_finite_instance({"$defs": defs, "allOf": [{"$ref": "#/$defs/a"}] * 20_000})
    assert thread_time() - began < 5  # each reference read the whole list


def test_a_schema_with_long_references_is_searched_within_bounds() -> None:
    """It took minutes, beyond all limits: each step may walk a path of tens of thousands of parts."""
    defs: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(14)}
    defs["d14"] = {"$ref": "#/" + "/" * 60_000}
    began = thread_time()
    assert has_finite_instance({"$ref": "#/$defs/d0", "$defs": defs})
    assert thread_time() - began < 5  # mostly 0.1 s; it was 77


@pytest.mark.parametrize(
    ("grammar", "matching", "other"),
    [
        (r'root ::= "\u00e9"', "é", "e"),
        (r"root ::= [\u00C0-\u00FF]", "À", "a"),
        (r'root ::= "\U0001F642"', "🙂", "x"),
        (r"root ::= [\U0001F600-\U0001F64F]", "🙂", "a"),
        (r'root ::= "\u0022\u005c" [\u005d\u002d\u005e]', '"\\]', '"\\a'),
        (r"root ::= [^\u0000-\u001F]", "a", "\n"),
        (r'root ::= "\\u0041"', r"\u0041", "A"),
        (r'root ::= "\x41\n"', "A\n", "A"),
    ],
)
def test_characters_of_gbnf_are_read_as_in_llama_cpp(grammar: str, matching: str, other: str) -> None:
    definition = check(bytes_tokenizer(), "grammar", grammar)["definition"]
    for text, is_allowed in ((matching, True), (other, False)):
        matcher, tokens = LLMatcher(bytes_tokenizer(), definition), list(text.encode())
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == is_allowed
