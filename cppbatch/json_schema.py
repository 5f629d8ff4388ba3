"""Checks of JSON schemas, and schemas whose objects have no additional properties."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

_MAX_STEPS = 100_000


def has_finite_instance(schema: Any) -> bool:
    """False only if every instance of the schema must contain itself.

    Example: `{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}`. A grammar does not detect
    this: the model would write `{"a": {"a": {"a": ...` until `max_tokens`. Only keywords that make a part mandatory are
    examined; all others are assumed to be satisfiable.
    """
    return _Search(schema).is_finite(schema)


class _Search:
    """Depth-first search through the mandatory parts. A `$ref` reached again while being followed is infinite."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._following: list[str] = []
        self._targets: dict[str, Any] = {}
        self._steps = 0

    def is_finite(self, schema: Any) -> bool:
        self._steps += 1
        if not isinstance(schema, dict) or self._steps > _MAX_STEPS:
            return True
        return (
            self._reference_is_finite(schema)
            and all(self.is_finite(part) for part in self._list(schema, "allOf"))
            and all(any(map(self.is_finite, parts)) for key in ("anyOf", "oneOf") if (parts := self._list(schema, key)))
            and (self._object_is_finite(schema) or self._array_is_finite(schema) or not self._must_nest(schema))
        )

    def _reference_is_finite(self, schema: dict[str, Any]) -> bool:
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return True
        if reference in self._following:
            return False
        self._following.append(reference)
        try:
            return self.is_finite(self._target(reference))
        finally:
            self._following.pop()

    def _target(self, reference: str) -> Any:
        """The schema that a reference points to. References outside this document are left to the compiler."""
        if reference not in self._targets:
            self._targets[reference] = self._resolve(reference)
        return self._targets[reference]

    def _resolve(self, reference: str) -> Any:
        if reference != "#" and not reference.startswith("#/"):
            return True
        target = self._root
        parts = reference[1:].split("/")[1:]
        self._steps += len(parts)
        for part in parts:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and len(name) < 10 and int(name) < len(target):
                target = target[int(name)]
            else:
                target = target.get(name, True) if isinstance(target, dict) else True
        return target

    def _object_is_finite(self, schema: dict[str, Any]) -> bool:
        given = schema.get("properties")
        properties = given if isinstance(given, dict) else {}
        required = [name for name in self._list(schema, "required") if isinstance(name, str) and name in properties]
        return "object" in self._types(schema) and all(self.is_finite(properties[name]) for name in required)

    def _array_is_finite(self, schema: dict[str, Any]) -> bool:
        least = schema.get("minItems", 0)
        first = self._list(schema, "prefixItems")
        if not isinstance(least, int) or least <= 0:
            return "array" in self._types(schema)
        mandatory = first[:least] if least <= len(first) else [*first, schema.get("items", True)]
        return "array" in self._types(schema) and all(map(self.is_finite, mandatory))

    def _must_nest(self, schema: dict[str, Any]) -> bool:
        """Whether every instance is an object or an array."""
        if "const" in schema or "enum" in schema:
            return False
        kinds = self._types(schema)
        return "type" in schema and len(kinds) > 0 and all(kind in ("object", "array") for kind in kinds)

    def _types(self, schema: dict[str, Any]) -> list[Any]:
        return self._list(schema, "type") or [schema["type"]] if "type" in schema else ["object", "array"]

    def _list(self, schema: dict[str, Any], key: str) -> list[Any]:
        """The list with this key, each of whose entries is a step, as it is read again for each reference to it."""
        value = schema.get(key)
        if not isinstance(value, list):
            return []
        self._steps += len(value)
        return value


# --- closed objects --------------------------------------------------------------------------------------------------
# JSON schemas as used for generation: an object has only the properties named in its schema.
#
# A JSON schema that does not mention other properties allows any, and small models then write them until the text is
# cut off. llama.cpp and vLLM exclude them too, and clients such as instructor rely on it. The result still matches the
# client's schema. `"additionalProperties": true` allows others.


_OPENERS = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties")
)
# If a value must match several schemas at once, none of them names all properties.
_COMBINE = frozenset(("allOf", "if", "not", "dependentSchemas", "dependencies", "$dynamicRef"))
_COMBINE_IF_TWO = frozenset(("properties", "$ref", "anyOf", "oneOf"))
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")

GUIDANCE = "x-guidance"
"""llguidance's options in a schema."""

_Put = Callable[[Any], None]


def close_objects(schema: Any) -> Any:
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
    """Includes `oneOf` without a discriminator: open schemas that exclude each other may not do so when closed."""
    if not _COMBINE.isdisjoint(part) or len(_COMBINE_IF_TWO & part.keys()) > 1:
        return True
    return "oneOf" in part and "discriminator" not in part


def _names_all_properties(part: dict[str, Any]) -> bool:
    """Whether it names properties, including all required ones, and does not mention others."""
    properties, required = part.get("properties"), part.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return _OPENERS.isdisjoint(part) and all(isinstance(name, str) and name in properties for name in required)


# --- formats --------------------------------------------------------------------------------------------------------


_FORMATS = frozenset((
    "date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uuid",
    "uri", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex",
))  # fmt: skip
"""The values of `format` that JSON Schema defines."""
_MAPS_OF_SCHEMAS = (*_MAPS, "patternProperties", "dependentSchemas")
_LISTS_OF_SCHEMAS = (*_LISTS, "allOf")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


def drop_other_formats(schema: Any) -> Any:
    """The schema without formats that JSON Schema does not define, such as `binary` and `password` of pydantic.

    They describe values, like unknown keywords, and restrict none. The argument is not modified.
    """
    changed: list[Any] = []
    waiting: list[tuple[Any, _Put]] = [(schema, changed.append)]
    while waiting:
        part, put = waiting.pop()
        if not isinstance(part, dict):
            put(part)
            continue
        copy: dict[str, Any] = dict(part)
        put(copy)
        if isinstance(value := part.get("format"), str) and value not in _FORMATS:
            del copy["format"]
        for name in _MAPS_OF_SCHEMAS:
            if isinstance(parts := part.get(name), dict):
                copy[name] = dict(parts)
                waiting += [(each, partial(copy[name].__setitem__, key)) for key, each in parts.items()]
        for name in _LISTS_OF_SCHEMAS:
            if isinstance(parts := part.get(name), list):
                copy[name] = list(parts)
                waiting += [(each, partial(copy[name].__setitem__, i)) for i, each in enumerate(parts)]
        waiting += [(part[name], partial(copy.__setitem__, name)) for name in _SCHEMAS if name in part]
    return changed[0]


def compact_schema(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """The schema of the same JSON without whitespace between tokens."""
    if schema is False:
        return schema
    return ({} if schema is True else schema) | {GUIDANCE: {"whitespace_pattern": ""}}
