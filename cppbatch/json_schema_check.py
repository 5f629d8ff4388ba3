"""Whether a JSON schema has any finite instance."""

from __future__ import annotations

from typing import Any

_MAX_STEPS = 100_000


def has_finite_instance(schema: Any) -> bool:
    """False only if every instance of the schema would have to contain itself.

    Example: `{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}`. A grammar does not detect
    this: the model would write `{"a": {"a": {"a": ...` until `max_tokens`. Only keywords that make a part mandatory are
    examined; all others are assumed to be satisfiable.
    """
    return _Search(schema).is_finite(schema)


class _Search:
    """Depth-first search through the mandatory parts. A `$ref` that is met while it is followed is not finite."""

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
            and all(self.is_finite(part) for part in _list(schema, "allOf"))
            and all(any(map(self.is_finite, parts)) for key in ("anyOf", "oneOf") if (parts := _list(schema, key)))
            and (self._object_is_finite(schema) or self._array_is_finite(schema) or not _must_nest(schema))
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
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                target = target.get(name, True) if isinstance(target, dict) else True
        return target

    def _object_is_finite(self, schema: dict[str, Any]) -> bool:
        given = schema.get("properties")
        properties = given if isinstance(given, dict) else {}
        required = [name for name in _list(schema, "required") if isinstance(name, str) and name in properties]
        return "object" in _types(schema) and all(self.is_finite(properties[name]) for name in required)

    def _array_is_finite(self, schema: dict[str, Any]) -> bool:
        least = schema.get("minItems", 0)
        first = _list(schema, "prefixItems")
        if not isinstance(least, int) or least <= 0:
            return "array" in _types(schema)
        mandatory = first[:least] if least <= len(first) else [*first, schema.get("items", True)]
        return "array" in _types(schema) and all(map(self.is_finite, mandatory))


def _types(schema: dict[str, Any]) -> tuple[Any, ...]:
    given = schema.get("type", ("object", "array"))
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _must_nest(schema: dict[str, Any]) -> bool:
    """Whether every instance is an object or an array."""
    if "const" in schema or "enum" in schema:
        return False
    kinds = _types(schema)
    return "type" in schema and len(kinds) > 0 and all(kind in ("object", "array") for kind in kinds)


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
