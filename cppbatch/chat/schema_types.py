"""What a JSON schema says of a value that a model writes without JSON's quotes."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable
from typing import Any

from cppbatch.chat.json_text import dump_json, parse_json

Json = dict[str, Any]

_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates print Python's
_SAID_OF_ALL = {"type", "title", "description", "default", "examples", "deprecated"}
_SAID_OF_STRINGS = _SAID_OF_ALL | {"enum", "const", "minLength", "maxLength"}
_SAID_OF_OBJECTS = _SAID_OF_ALL | {"properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_SAID_OF_ARRAYS = _SAID_OF_ALL | {"items", "minItems", "maxItems"}
_MOST_BRACKETS = 100  # Python's own parser may overflow the stack
_MOST_REFERENCES = _DEEPEST = 16


def json_types(schema: Any, root: Json, depth: int = 0) -> frozenset[str]:
    """JSON's types that a value may have; none: any. `root`: the whole schema, for references."""
    schema = resolve_ref(schema, root)
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return frozenset()
    if "type" in schema:
        given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset(given) if all(isinstance(kind, str) for kind in given) else frozenset()
    if "const" in schema or isinstance(schema.get("enum"), list):
        return frozenset(map(json_type_of, schema.get("enum", [schema.get("const")])))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = [json_types(part, root, depth + 1) for part in schema[key]]
            return frozenset().union(*parts) if all(parts) else frozenset()
    return frozenset()


def json_type_of(value: Any) -> str:
    """JSON's name for the type of a value."""
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


def resolve_ref(schema: Any, root: Json) -> Any:
    """A schema in place of a reference to it within the same document."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(schema, dict) or not str(schema.get("$ref", "")).startswith("#/"):
            break
        target: Any = root
        for part in schema["$ref"][2:].split("/"):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        schema = target
    return schema


def coerce_to_json(text: str, kinds: Iterable[str]) -> str:
    """A value as a model wrote it, as JSON text of one of these types if it can be; else as a string."""
    wanted = frozenset(kinds)
    written = _WORDS.get(text.strip(), text.strip())
    if wanted & {"object", "array"} and "string" not in wanted:
        written = _from_python(written)
    try:
        kind = json_type_of(parse_json(written))
    except ValueError:
        return dump_json(text)
    fits = not wanted or kind in wanted or (kind == "integer" and "number" in wanted)
    return dump_json(text) if kind == "string" or not (fits or "string" not in wanted) else written


def _from_python(text: str) -> str:
    """An object or array as some templates print Python's, as JSON; any other text as it is."""
    with contextlib.suppress(ValueError):
        parse_json(text)
        return text
    if sum(map(text.count, "([{")) > _MOST_BRACKETS:
        return text
    with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return dump_json(ast.literal_eval(text))
    return text


class UnsupportedSchema(Exception):
    """A schema says more than can be enforced outside of JSON."""


def object_members(schema: Json) -> list[tuple[str, Any, bool]]:
    """An object's members: name, schema, required. Raises `UnsupportedSchema` if there may be others."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if schema.keys() - _SAID_OF_OBJECTS or schema.get("additionalProperties"):
        raise UnsupportedSchema
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise UnsupportedSchema
    if not all(isinstance(name, str) and name in properties for name in required):
        raise UnsupportedSchema
    return [(name, schema, name in required) for name, schema in properties.items()]


def array_items(schema: Json) -> tuple[Any, int, int | None]:
    """The schema of an array's items, and how many there may be. Raises `UnsupportedSchema`."""
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if schema.keys() - _SAID_OF_ARRAYS or "items" not in schema:
        raise UnsupportedSchema
    if not isinstance(least, int) or not isinstance(most, int | None) or (most is not None and most < least):
        raise UnsupportedSchema
    return schema["items"], least, most


def string_lengths(schema: Json) -> tuple[int, int | None]:
    """The bounds of a string of which nothing else is said. Raises `UnsupportedSchema`."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if schema.keys() - _SAID_OF_STRINGS or not isinstance(least, int) or not isinstance(most, int | None):
        raise UnsupportedSchema
    return least, most


def schema_variants(schema: Any, root: Json) -> list[Any]:
    """The schemas that `anyOf` or a list of types offers; one if there is no choice. Raises `UnsupportedSchema`."""
    schema = resolve_ref(schema, root)
    if not isinstance(schema, dict):
        raise UnsupportedSchema
    if isinstance(schema.get("anyOf"), list) and not schema.keys() - _SAID_OF_ALL - {"anyOf"}:
        return [resolve_ref(part, root) for part in schema["anyOf"]]
    if isinstance(schema.get("type"), list):
        return [schema | {"type": kind} for kind in schema["type"]]
    return [schema]


def enum_values(schema: Json) -> list[Any] | None:
    """The values that are listed, None if there is no list."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) and schema["enum"] else None


def standalone_schema(schema: Any, root: Json) -> Any:
    """A part of a schema as a document of its own. Raises `UnsupportedSchema`."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    references = re.findall(r'"\$ref": "([^"]*)', dump_json([schema, definitions]))
    if any(not reference.startswith(("#/$defs/", "#/definitions/")) for reference in references):
        raise UnsupportedSchema
    return definitions | schema if references else schema
