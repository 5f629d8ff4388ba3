"""The keywords of JSON schemas, and what a schema says of its values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from cppbatch.json_schema import find

Json = dict[str, Any]

_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas", "dependencies")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = (
    "items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
"""The keywords whose values are maps of schemas, lists of schemas, and schemas."""
_HOLDERS = frozenset((*_MAPS, *_LISTS, *_SCHEMAS))
COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
"""The keywords that bound numbers: the direction in which a bound is widened."""
DEFINITIONS = ("$defs", "definitions")
ASSERTIONS = frozenset(
    {*_MAPS, *_LISTS, *_SCHEMAS, *COUNTS, *BOUNDS}
    | {"type", "enum", "const", "multipleOf", "pattern", "format", "required", "uniqueItems", "dependentRequired"}
    | {"$ref", "$dynamicRef", "$recursiveRef"}
) - {*DEFINITIONS}
"""The keywords that may restrict values. All others describe them."""
FORMATS = frozenset((
    "date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uuid",
    "uri", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex",
))  # fmt: skip
"""The values of `format` that JSON Schema defines. Others, such as pydantic's `binary`, restrict nothing."""
_ENFORCED_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_NOT_ENFORCED = frozenset((
    "contains", "minContains", "maxContains", "dependencies", "dependentRequired", "dependentSchemas", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "$dynamicRef", "$recursiveRef", "if", "then", "else",
    "not",
))  # fmt: skip
"""The keywords that the grammar engine does not know."""
UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
APPLICATORS = frozenset(
    ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas", "contains")
)
"""Keywords with schemas for the same value."""
OBJECT = frozenset(("object",))
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
"""The type of a JSON text by its first character."""


def not_enforced(schema: Any) -> str | None:
    """The first keyword of a simplified schema that the grammar engine cannot enforce, and its place; None: it knows
    them all."""
    waiting = [("#", schema)]
    while waiting:
        place, part = waiting.pop()
        if not isinstance(part, dict):
            continue
        for keyword in part:
            if keyword in _NOT_ENFORCED:
                return f"{place}/{keyword}: {keyword} is not supported"
        if isinstance(name := part.get("format"), str) and name in FORMATS - _ENFORCED_FORMATS:
            return f"{place}/format: the format {name!r} is not supported"
        waiting += reversed([(f"{place}/{path}", each) for path, each, _ in inner_schemas(part)])
    return None


def inner_schemas(part: Json) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """The schemas in a schema: their places, the schemas, and what replaces them. Definitions come first."""
    for name in _MAPS:
        if isinstance(inner := part.get(name), dict):
            for key, each in inner.items():
                yield f"{name}/{key.replace('~', '~0').replace('/', '~1')}", each, partial(inner.__setitem__, key)
    for name in _LISTS:
        if isinstance(inner := part.get(name), list):
            yield from ((f"{name}/{i}", each, partial(inner.__setitem__, i)) for i, each in enumerate(inner))
    for name in _SCHEMAS:
        if isinstance(part.get(name), dict):
            yield name, part[name], partial(part.__setitem__, name)


def copy_schema(schema: Any) -> tuple[Any, list[Json]]:
    """A copy whose schemas may be modified, and these schemas, each before those in it."""
    copied: list[Any] = []
    nodes: list[Json] = []
    waiting: list[tuple[Any, Callable[[Any], None]]] = [(schema, copied.append)]
    while waiting:
        part, put = waiting.pop()
        if not isinstance(part, dict):
            put(part)
            continue
        node = dict(part)
        put(node)
        nodes.append(node)
        if not _HOLDERS.isdisjoint(node):
            for name in (*_MAPS, *_LISTS):
                if isinstance(inner := node.get(name), list) or (name != "items" and isinstance(inner, dict)):
                    node[name] = inner.copy()
            waiting += [(each, place) for _, each, place in inner_schemas(node)]
    return copied[0], nodes


def is_neutral(schema: Any) -> bool:
    """Whether any value matches a simplified schema."""
    return schema is True or (isinstance(schema, dict) and ASSERTIONS.isdisjoint(schema))


def resolve_all(schema: Any, root: Any) -> Any:
    """The schema that a chain of references leads to."""
    for _ in range(16):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = find(root, schema["$ref"])
    return schema


def kinds_of(schema: Json) -> frozenset[str]:
    """The types of values, with `number` for all numbers; empty: any."""
    given = schema.get("type", [])
    kinds = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    if not kinds and (values := constants_of(schema)) is not None:
        kinds = [_KINDS.get(value[0], "number") for value in values]
    return frozenset("number" if kind == "integer" else str(kind) for kind in kinds)


def constants_of(schema: Any) -> frozenset[str] | None:
    """The only values, as JSON; None: there may be others. `schema`: of a property, or resolved."""
    if not isinstance(schema, dict):
        return None
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(json.dumps(each, sort_keys=True) for each in listed) if isinstance(listed, list) else None


def properties_of(schema: Json) -> Json:
    """The schemas of the named properties."""
    return given if isinstance(given := schema.get("properties"), dict) else {}


def required_of(schema: Json) -> list[str]:
    """The names of the required properties."""
    given = schema.get("required")
    return [name for name in given if isinstance(name, str)] if isinstance(given, list) else []


def is_closed(schema: Json) -> bool:
    """Whether an object has only the properties that the schema names."""
    return schema.get("additionalProperties") is False and "patternProperties" not in schema
