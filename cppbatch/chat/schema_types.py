"""Types and constraints of values that a model writes without JSON's quotes, from their JSON schema."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable
from typing import Any

from cppbatch.chat.scanning import dump_json, parse_json
from cppbatch.json_schema import find

Json = dict[str, Any]

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates write Python's values
_ANY_KEYS = {"type", "title", "description", "default", "examples", "deprecated"}
_STRING_KEYS = _ANY_KEYS | {"enum", "const", "minLength", "maxLength"}
_OBJECT_KEYS = _ANY_KEYS | {"properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_ARRAY_KEYS = _ANY_KEYS | {"items", "minItems", "maxItems"}
_MAX_BRACKETS = 100  # more may overflow the stack of Python's parser
_MAX_REFERENCES = _MAX_DEPTH = 16


def json_types(schema: Any, root: Json, depth: int = 0) -> frozenset[str]:
    """Returns the JSON types that a value may have; empty: any. `root`: the whole schema, to resolve references."""
    schema = resolve_ref(schema, root)
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return frozenset()
    if "type" in schema:
        given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset(given) if all(isinstance(kind, str) for kind in given) else frozenset()
    if "const" in schema or isinstance(schema.get("enum"), list):
        return frozenset(map(json_type_of, enum_values(schema) or ()))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = [json_types(part, root, depth + 1) for part in schema[key]]
            return frozenset().union(*parts) if all(parts) else frozenset()
    every = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    known = [types for part in every if (types := json_types(part, root, depth + 1))]
    return frozenset.intersection(*known) if known else frozenset()


def json_type_of(value: Any) -> str:
    """Returns the name of a value's JSON type."""
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


def resolve_ref(schema: Any, root: Json) -> Any:
    """Replaces a reference within the same document by its target."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not str(schema.get("$ref", "")).startswith("#/"):
            break
        schema = find(root, schema["$ref"])
    return schema


def coerce_to_json(text: str, types: Iterable[str]) -> str:
    """Converts a value that a model wrote into JSON text.

    The result is a string if the text is not JSON, or if `types` include strings but not the type of the value.
    """
    wanted = frozenset(types)
    written = _PYTHON_WORDS.get(text.strip(), text.strip())
    if wanted & {"object", "array"} and "string" not in wanted:
        written = _from_python(written)
    try:
        kind = json_type_of(parse_json(written))
    except ValueError:
        return dump_json(text)
    fits = not wanted or kind in wanted or (kind == "integer" and "number" in wanted)
    return dump_json(text) if kind == "string" or not (fits or "string" not in wanted) else written


def _from_python(text: str) -> str:
    """Converts a Python literal of an object or array, as some templates write it, to JSON. Other text is unchanged."""
    with contextlib.suppress(ValueError):
        parse_json(text)
        return text
    if sum(map(text.count, "([{")) > _MAX_BRACKETS:
        return text
    with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return dump_json(ast.literal_eval(text))
    return text


class UnsupportedSchema(Exception):
    """The schema has constraints that cannot be enforced outside JSON."""


def object_members(schema: Json) -> list[tuple[str, Any, bool]]:
    """Returns an object's members: name, schema, required. Raises `UnsupportedSchema` if others are allowed."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if schema.keys() - _OBJECT_KEYS or schema.get("additionalProperties"):
        raise UnsupportedSchema
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise UnsupportedSchema
    if not all(isinstance(name, str) and name in properties for name in required):
        raise UnsupportedSchema
    return [(name, schema, name in required) for name, schema in properties.items()]


def array_items(schema: Json) -> tuple[Any, int, int | None]:
    """Returns the schema of an array's items, their minimum and maximum number. Raises `UnsupportedSchema`."""
    minimum, maximum = schema.get("minItems", 0), schema.get("maxItems")
    if schema.keys() - _ARRAY_KEYS or "items" not in schema:
        raise UnsupportedSchema
    if not isinstance(minimum, int) or not isinstance(maximum, int | None):
        raise UnsupportedSchema
    if maximum is not None and maximum < minimum:
        raise UnsupportedSchema
    return schema["items"], minimum, maximum


def string_lengths(schema: Json) -> tuple[int, int | None]:
    """Returns a string's minimum and maximum length. Raises `UnsupportedSchema` if there are other constraints."""
    minimum, maximum = schema.get("minLength", 0), schema.get("maxLength")
    if schema.keys() - _STRING_KEYS or not isinstance(minimum, int) or not isinstance(maximum, int | None):
        raise UnsupportedSchema
    return minimum, maximum


def schema_variants(schema: Any, root: Json) -> list[Any]:
    """Returns the alternatives of `anyOf` or of a list of types, else the schema itself. Raises `UnsupportedSchema`."""
    schema = resolve_ref(schema, root)
    if not isinstance(schema, dict):
        raise UnsupportedSchema
    if isinstance(schema.get("anyOf"), list) and schema["anyOf"] and not schema.keys() - _ANY_KEYS - {"anyOf"}:
        return [resolve_ref(part, root) for part in schema["anyOf"]]
    if isinstance(schema.get("type"), list) and schema["type"]:
        return [schema | {"type": kind} for kind in schema["type"]]
    return [schema]


def enum_values(schema: Json) -> list[Any] | None:
    """Returns the values of `enum` or `const`; None if there are none."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) and schema["enum"] else None


def standalone_schema(schema: Any, root: Json) -> Any:
    """Returns a part of a schema as a separate document, with definitions. Raises `UnsupportedSchema`."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    references = re.findall(r'"\$ref": "([^"]*)', dump_json([schema, definitions]))
    if any(not reference.startswith(("#/$defs/", "#/definitions/")) for reference in references):
        raise UnsupportedSchema
    if not references:
        return schema
    if not isinstance(schema, dict):  # true or false
        raise UnsupportedSchema
    return definitions | schema
