"""Validates the tools of a request."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NamedTuple

import msgspec

from cppbatch.chat.custom_tools import as_function
from cppbatch.chat.schema_types import resolve_ref
from cppbatch.errors import InvalidRequest
from cppbatch.generation_schema.simplify import simplify
from cppbatch.json_schema import has_finite_instance

Json = dict[str, Any]

ToolChoiceMode = Literal["none", "auto", "required"]
TOOL_CHOICE_MODES: tuple[ToolChoiceMode, ...] = ("none", "auto", "required")

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ALLOWS_OTHER_ARGUMENTS = frozenset(("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"))


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model calls tools."""

    mode: ToolChoiceMode = "auto"
    name: str | None = None
    """With `required`: the function to call; None: any."""
    allowed: tuple[str, ...] | None = None
    """The allowed functions; None: all."""
    parallel: bool = True
    """Whether a message may contain several calls."""


def tool_choice_of(given: str, *, parallel: bool) -> ToolChoice:
    """The choice of this mode. Raises `InvalidRequest` for another word."""
    for mode in TOOL_CHOICE_MODES:
        if given == mode:
            return ToolChoice(mode=mode, parallel=parallel)
    modes = ", ".join(TOOL_CHOICE_MODES)
    raise InvalidRequest("tool_choice", f"is {given!r:.80}; it must be {modes}, or an object that names a tool")


def allowed_choice(field: str, mode: str, names: list[str], *, parallel: bool) -> ToolChoice:
    """The choice among the tools of these names. `field`: of the mode, in errors. Raises `InvalidRequest`."""
    if mode not in ("auto", "required"):
        raise InvalidRequest(field, f"is {mode!r:.80}; it must be auto or required")
    choice = tool_choice_of(mode, parallel=parallel)
    return msgspec.structs.replace(choice, allowed=tuple(names))


class CallableTools(NamedTuple):
    """The allowed tools."""

    functions: list[Json]
    """OpenAI's objects; a custom tool is a function with one argument."""
    schemas: dict[str, Any]
    """The JSON schema of each function's arguments, by name."""
    custom: dict[str, Json]
    """The custom tools, by name."""


def callable_tools(tools: list[Json], choice: ToolChoice) -> CallableTools:
    """The allowed tools among a request's tools (OpenAI's objects).

    Raises `InvalidRequest` for an invalid, repeated or unknown name, for parameters or a format that no call can
    satisfy, and if a call is required but no tool is given.
    """
    functions: dict[str, Json] = {}
    for i, tool in enumerate(tools):
        function = as_function(i, tool["custom"]) if tool["type"] == "custom" else tool
        name = function["function"]["name"]
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            message = f"is {name!r:.80}; it must be 1 to 64 letters, digits, underscores or hyphens"
            raise InvalidRequest(f"tools[{i}].function.name", message)
        if name in functions:
            raise InvalidRequest(
                f"tools[{i}].function.name", f"is {name!r}, the name of an earlier tool; names must be unique"
            )
        functions[name] = function
    if choice.mode == "none":
        return CallableTools([], {}, {})
    if choice.mode == "required" and not tools:
        raise InvalidRequest("tool_choice", "requires a tool call, but tools is empty")
    wanted = choice.allowed if choice.name is None else (choice.name,)
    if wanted == ():
        raise InvalidRequest("tool_choice", "allows no tools; name at least one, or use none")
    for name in wanted or ():
        if name not in functions:
            raise InvalidRequest(
                "tool_choice", f"names {name!r}, which is not one of the tools ({', '.join(functions)})"
            )
    called = {name: i for i, name in enumerate(functions) if wanted is None or name in wanted}
    return CallableTools(
        functions=[functions[name] for name in called],
        schemas={
            name: _argument_schema(f"tools[{i}].function.parameters", functions[name]) for name, i in called.items()
        },
        custom={name: tools[i]["custom"] for name, i in called.items() if tools[i]["type"] == "custom"},
    )


def _argument_schema(field: str, tool: Json) -> Json:
    """The JSON schema of a function's arguments: an object that only has the named properties, unless the schema allows
    others."""
    given = tool["function"].get("parameters") or {"properties": {}}
    if not isinstance(given, dict):
        raise InvalidRequest(field, f"is {given!r:.80}; it must be the JSON schema of an object")
    schema: Json = {"type": "object"} | simplify(given)
    if isinstance(schema.get("$ref"), str) and isinstance(target := resolve_ref(schema, schema), dict):
        schema = schema | target  # parsers look for the properties here
        schema.pop("$ref", None)
    if isinstance(schema["type"], list) and "object" in schema["type"]:
        schema["type"] = "object"
    if schema["type"] != "object":
        raise InvalidRequest(field, f"is of type {schema['type']!r:.80}; arguments must be an object")
    if not isinstance(schema.get("properties", {}), dict):
        raise InvalidRequest(f"{field}.properties", f"is {schema['properties']!r:.80}; it must be an object")
    if "properties" in schema and not _ALLOWS_OTHER_ARGUMENTS & schema.keys():
        schema["additionalProperties"] = False
    check_satisfiable(field, schema)
    return schema


def check_satisfiable(field: str, schema: Json | bool) -> None:
    """Raises `InvalidRequest` for a schema that no finite JSON satisfies, or that is nested too deeply."""
    try:
        if not has_finite_instance(schema):
            raise InvalidRequest(field, "no finite JSON satisfies the schema: it is infinitely recursive")
        json.dumps(schema)
    except RecursionError:
        raise InvalidRequest(field, "is nested too deeply") from None
