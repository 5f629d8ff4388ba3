"""Whether a JSON schema has an instance that ends at all."""

from __future__ import annotations

from typing import Any

_MOST_STEPS = 100_000


def has_finite_instance(schema: Any) -> bool:
    """False only when every instance of the schema would have to contain itself.

    A grammar cannot tell: it would let the model write `{"a": {"a": {"a": ...` until its tokens are spent. Keywords
    other than those that make a part mandatory are taken as satisfiable.
    """
    return _Search(schema).ends(schema)


class _Search:
    """Depth first along what is mandatory; meeting a `$ref` that is being followed means that it never ends."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._following: list[str] = []
        self._targets: dict[str, Any] = {}
        self._steps = 0

    def ends(self, schema: Any) -> bool:
        self._steps += 1
        if not isinstance(schema, dict) or self._steps > _MOST_STEPS:
            return True
        return (
            self._reference_ends(schema)
            and all(self.ends(part) for part in _list(schema, "allOf"))
            and all(any(map(self.ends, parts)) for key in ("anyOf", "oneOf") if (parts := _list(schema, key)))
            and (self._object_ends(schema) or self._array_ends(schema) or not _must_nest(schema))
        )

    def _reference_ends(self, schema: dict[str, Any]) -> bool:
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return True
        if reference in self._following:
            return False
        self._following.append(reference)
        try:
            return self.ends(self._target(reference))
        finally:
            self._following.pop()

    def _target(self, reference: str) -> Any:
        """The schema that a reference within this document names; anything else is left to the compiler."""
        if reference not in self._targets:
            self._targets[reference] = self._found(reference)
        return self._targets[reference]

    def _found(self, reference: str) -> Any:
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

    def _object_ends(self, schema: dict[str, Any]) -> bool:
        given = schema.get("properties")
        properties = given if isinstance(given, dict) else {}
        required = [name for name in _list(schema, "required") if isinstance(name, str) and name in properties]
        return "object" in _types(schema) and all(self.ends(properties[name]) for name in required)

    def _array_ends(self, schema: dict[str, Any]) -> bool:
        least = schema.get("minItems", 0)
        first = _list(schema, "prefixItems")
        if not isinstance(least, int) or least <= 0:
            return "array" in _types(schema)
        mandatory = first[:least] if least <= len(first) else [*first, schema.get("items", True)]
        return "array" in _types(schema) and all(map(self.ends, mandatory))


def _types(schema: dict[str, Any]) -> tuple[Any, ...]:
    given = schema.get("type", ("object", "array"))
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _must_nest(schema: dict[str, Any]) -> bool:
    """Whether only objects and arrays will do."""
    if "const" in schema or "enum" in schema:
        return False
    kinds = _types(schema)
    return "type" in schema and len(kinds) > 0 and all(kind in ("object", "array") for kind in kinds)


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
