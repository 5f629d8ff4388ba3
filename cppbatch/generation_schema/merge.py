"""Schemas that a value must match at once, merged into one: `allOf`."""

from __future__ import annotations

from typing import Any

from cppbatch.generation_schema.keywords import APPLICATORS, ASSERTIONS, DEFINITIONS, UNEVALUATED, Json, is_neutral
from cppbatch.json_schema import find

_APPLIED = APPLICATORS | {"$id", "properties", "patternProperties", "additionalProperties"}
_GROUPS: tuple[tuple[set[str], set[str]], ...] = (
    ({"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"}, {"properties"}),
    ({"prefixItems", "items", "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains"}, set()),
    ({"if", "then", "else"}, set()),
)
"""Keywords that refer to each other, so that two schemas with some of them cannot be merged, unless these are all."""


class Merger:
    """Merges the schemas of `allOf` into the schema around them."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._merging: list[int] = []

    def merge(self, node: Json) -> None:
        """Merges in place, if the result means the same."""
        parts = node.get("allOf")
        if not isinstance(parts, list) or id(node) in self._merging:
            return
        self._merging.append(id(node))
        merged: Json | None = {key: value for key, value in node.items() if key not in ("allOf", *UNEVALUATED)}
        for part in parts:
            merged = None if merged is None else self._both(merged, part)
        self._merging.pop()
        if merged is not None:
            evaluated = {key: node[key] for key in UNEVALUATED if key in node}
            node.clear()
            node.update(merged | evaluated)

    def _both(self, first: Json, second: Any) -> Json | None:
        """What matches both; None: no plain schema says so."""
        if second is True or not isinstance(second, dict):
            return first if second is True else None
        if is_neutral(second) or ("$ref" in second and not first.keys() & _APPLIED):
            return second | first
        known = self._resolve(first), self._resolve(second)
        return None if known[0] is None or known[1] is None else _union(known[0], known[1])

    def _resolve(self, part: Json) -> Json | None:
        """The schema with the target of its reference; None: that is not known, or contains this schema."""
        if "$ref" not in part:
            return part
        target = find(self._root, part["$ref"])
        if not isinstance(target, dict) or id(target) in self._merging or "$id" in target:
            return None
        self.merge(target)
        rest = {key: value for key, value in part.items() if key != "$ref"}
        if not ASSERTIONS.isdisjoint(rest):
            return None
        inlined = {key: value for key, value in target.items() if key not in DEFINITIONS} | rest
        self._merging.append(id(target))
        resolved = self._resolve(inlined)
        self._merging.pop()
        return resolved


def _union(first: Json, second: Json) -> Json | None:
    """The keywords of both; None: they do not go together."""
    for group, alone in _GROUPS:
        ours, theirs = group & first.keys(), group & second.keys()
        if ours and theirs and not ours | theirs <= alone:
            return None
    merged = second | first
    for key in first.keys() & second.keys() & ASSERTIONS:
        one, other = first[key], second[key]
        if one == other:
            continue
        if key == "required" and isinstance(one, list) and isinstance(other, list):
            merged[key] = [*one, *(name for name in other if name not in one)]
        elif key == "properties" and _agree(one, other):
            merged[key] = one | other
        else:
            return None
    return merged


def _agree(first: Any, second: Any) -> bool:
    """Whether no property has two different schemas."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return False
    return all(first[name] == second[name] for name in first.keys() & second.keys())
