"""What a text must look like that has to be a call, or JSON, perhaps after a thought."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from cppbatch.chat.lark_grammar import LarkGrammar
from cppbatch.chat.reasoning import ReasoningState, ReasoningTags
from cppbatch.chat.tool_formats.tool_format import ToolCallFormat
from cppbatch.chat.tool_parser import ToolSchemas
from cppbatch.engine.sampling.json_schema_check import has_finite_instance
from cppbatch.errors import InvalidRequest

Json = dict[str, Any]

_NEW_LINES = r"/\n{1,2}/"
_OTHER_SHAPES = frozenset(("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"))


def argument_schemas(tools: list[Json]) -> ToolSchemas:
    """For each function, what its arguments must be: an object, with no arguments that its parameters do not name,
    unless they say that there are others. Raises `InvalidRequest` for parameters that no arguments can satisfy.
    """
    schemas: ToolSchemas = {}
    for i, tool in enumerate(tools):
        given = tool["function"].get("parameters") or {"properties": {}}
        field = f"tools[{i}].function.parameters"
        if not isinstance(given, dict):
            raise InvalidRequest(field, f"is {given!r:.80}; it must be the JSON schema of an object")
        schema: Json = {"type": "object"} | given
        if schema["type"] != "object":
            raise InvalidRequest(field, f"has the type {schema['type']!r:.80}; arguments are always an object")
        if not isinstance(schema.get("properties", {}), dict):
            raise InvalidRequest(f"{field}.properties", f"is {schema['properties']!r:.80}; it must be an object")
        if "properties" in schema and not _OTHER_SHAPES & schema.keys():
            schema["additionalProperties"] = False
        _check_finite(field, schema)
        schemas[tool["function"]["name"]] = schema
    return schemas


@dataclass(frozen=True)
class Place:
    """Where in what kind of message the text begins."""

    family: ToolCallFormat
    token_ids: dict[str, int]
    """Of markers that are one token."""
    thinking: ReasoningTags | None
    thought: ReasoningState


def calls_grammar(tools: ToolSchemas, place: Place, *, several: bool) -> str:
    """A grammar for one call of these tools, or with `several` up to eight, perhaps after a thought."""
    lark = LarkGrammar(place.token_ids)
    return lark.grammar(_after_thought(lark, _calls(lark, tools, place, several=several), place))


def answer_params(schema: Json | bool, tools: ToolSchemas, place: Place, *, several: bool) -> Json:
    """The fields of `SamplingParams` for an answer that is JSON of the schema, or calls if there are tools.

    Raises `InvalidRequest` for a schema that nothing can satisfy.
    """
    is_all = (
        place.thought in (ReasoningState.NONE, ReasoningState.OVER) and not place.family.parses_reasoning and not tools
    )
    if is_all:
        return {"json_schema": schema}
    _check_finite("response_format", schema)
    lark = LarkGrammar(place.token_ids)
    answer = place.family.answer_grammar(lark, lark.json(schema))
    if tools:
        answer = lark.one_of([_calls(lark, tools, place, several=several), answer])
    return {"grammar": lark.grammar(_after_thought(lark, answer, place))}


def _calls(lark: LarkGrammar, tools: ToolSchemas, place: Place, *, several: bool) -> str:
    return place.family.calls_grammar(lark, tools, several=several and place.family.parallel_calls)


def _after_thought(lark: LarkGrammar, then: str, place: Place) -> str:
    if place.thinking is None or place.thought in (ReasoningState.NONE, ReasoningState.OVER):
        return then
    rest = f"{lark.up_to(place.thinking.closing)} {lark.terminal(_NEW_LINES)}?"
    if place.thought is ReasoningState.POSSIBLE:
        rest = f"({lark.text(place.thinking.opening)} {rest})?"
    return f"{rest} {then}"


def _check_finite(field: str, schema: Json | bool) -> None:
    try:
        if not has_finite_instance(schema):
            raise InvalidRequest(field, "no finite JSON satisfies the schema: it requires itself within itself")
        json.dumps(schema)
    except RecursionError:
        raise InvalidRequest(field, "is nested too deeply") from None
