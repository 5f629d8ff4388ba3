"""What JSON schemas are asked: references, whether there is a finite instance, options for the grammar engine."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote


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
        if not isinstance(schema, dict) or self._steps > 100_000:
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
            self._steps += reference.count("/")
            self._targets[reference] = find(self._root, reference)
        return self._targets[reference]

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


def find(root: Any, reference: Any) -> Any:
    """The target of a reference within a document; None if it is not found."""
    if reference != "#" and not str(reference).startswith("#/"):
        return None
    target = root
    for part in str(reference)[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and re.fullmatch(r"\d{1,9}", name) and int(name) < len(target):
            target = target[int(name)]
        else:
            target = target.get(name) if isinstance(target, dict) else None
    return target


GUIDANCE = "x-guidance"
"""llguidance's options in a schema."""


def compact_schema(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """The schema of the same JSON without whitespace between tokens."""
    if schema is False:
        return schema
    return ({} if schema is True else schema) | {GUIDANCE: {"whitespace_pattern": ""}}
