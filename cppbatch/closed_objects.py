"""JSON schemas as they are generated from: an object has only the properties that its schema names.

A JSON schema that does not mention other properties allows any of them, and small models then write them until the
text is cut off. llama.cpp and vLLM leave them out too, and clients such as instructor rely on it. The result matches
the client's schema all the same. `"additionalProperties": true` asks for others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

_OPENERS = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties")
)
# Where a value must match several schemas at once, none of them names all properties.
_COMBINE = frozenset(("allOf", "if", "not", "dependentSchemas", "dependencies", "$dynamicRef"))
_COMBINE_IF_TWO = frozenset(("properties", "$ref", "anyOf", "oneOf"))
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")

GUIDANCE = "x-guidance"
"""llguidance's options in a schema."""

_Put = Callable[[Any], None]


def closed_objects(schema: Any) -> Any:
    """The schema with `"additionalProperties": false` where an object names properties and does not mention others.

    Unchanged if a value must match several of its schemas at once (`allOf` ...). The argument is not modified.
    """
    closed: list[Any] = []
    waiting: list[tuple[Any, _Put]] = [(schema, closed.append)]
    while waiting:
        part, put = waiting.pop()
        if not isinstance(part, dict):
            put(part)
            continue
        if _combines(part):
            return schema
        copy: dict[str, Any] = dict(part)
        put(copy)
        if _names_all_properties(part):
            copy["additionalProperties"] = False
        for name in _MAPS:
            if isinstance(parts := part.get(name), dict):
                copy[name] = dict(parts)
                waiting += [(value, partial(copy[name].__setitem__, key)) for key, value in parts.items()]
        for name in _LISTS:
            if isinstance(parts := part.get(name), list):
                copy[name] = list(parts)
                waiting += [(value, partial(copy[name].__setitem__, i)) for i, value in enumerate(parts)]
        if "items" in part:
            waiting.append((part["items"], partial(copy.__setitem__, "items")))
    return closed[0]


def _combines(part: dict[str, Any]) -> bool:
    """Also for `oneOf` without a discriminator: open schemas that exclude each other may not do so when closed."""
    if not _COMBINE.isdisjoint(part) or len(_COMBINE_IF_TWO & part.keys()) > 1:
        return True
    return "oneOf" in part and "discriminator" not in part


def _names_all_properties(part: dict[str, Any]) -> bool:
    """Whether it names properties, all that are required, and says nothing about others."""
    properties, required = part.get("properties"), part.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return _OPENERS.isdisjoint(part) and all(name in properties for name in required)


def compact_schema(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """The schema of the same JSON without white space between its tokens."""
    if schema is False:
        return schema
    return ({} if schema is True else schema) | {GUIDANCE: {"whitespace_pattern": ""}}
