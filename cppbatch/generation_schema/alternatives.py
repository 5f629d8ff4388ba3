"""Alternatives that exclude each other: `oneOf` that means the same as `anyOf`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from cppbatch.generation_schema.keywords import (
    APPLICATORS,
    ASSERTIONS,
    DEFINITIONS,
    OBJECT,
    Json,
    constants_of,
    is_closed,
    is_neutral,
    kinds_of,
    properties_of,
    required_of,
    resolve_all,
)

_MAX_ALTERNATIVES = 40
"""Pairs of more alternatives are not compared."""


def separate(node: Json, root: Any) -> None:
    """Replaces `oneOf` by `anyOf` if its alternatives exclude each other, or do so without properties that another
    one requires."""
    given, parts = node.get("oneOf"), node.get("allOf", [])
    if not isinstance(given, list) or not isinstance(parts, list):
        return
    if "type" not in node and (types := _types_of_one(given)):
        node["type"] = types
        del node["oneOf"]
        return
    alternatives = alternatives_of(node, root)
    left_out: list[list[str] | None] = []
    if not exclude_all(alternatives):
        left_out = (
            [_left_out(i, alternatives) for i in range(len(given))] if len(given) <= _MAX_ALTERNATIVES else [None]
        )
    if None in left_out:
        return
    for i, names in enumerate(left_out):
        if names:
            kept = {key: value for key, value in alternatives[i].items() if key not in DEFINITIONS}
            given[i] = kept | {"properties": properties_of(kept) | dict.fromkeys(names, False)}
            if "properties" in node:  # these are additional in the alternative
                given[i].setdefault("additionalProperties", True)
    del node["oneOf"]
    if "anyOf" in node:
        node["allOf"] = [*parts, {"anyOf": given}]
    else:
        node["anyOf"] = given


def _left_out(i: int, alternatives: list[Any]) -> list[str] | None:
    """The properties without which a value of an alternative matches no other one; None: nothing says so."""
    one, names = alternatives[i], []
    for j, other in enumerate(alternatives):
        if i == j or _exclude_each_other(one, other):
            continue
        if not isinstance(one, dict) or not isinstance(other, dict) or OBJECT not in (kinds_of(one), kinds_of(other)):
            return None
        if is_closed(other) and any(name not in properties_of(other) for name in required_of(one)):
            continue
        unnamed = [name for name in required_of(other) if name not in properties_of(one)]
        if unnamed and is_closed(one):
            continue
        free = [name for name in unnamed if name not in required_of(one)]
        if not free or "$id" in one or not APPLICATORS.isdisjoint(one):
            return None
        names.append(free[0])
    return names


def _types_of_one(alternatives: list[Any]) -> list[str]:
    """The types of the values that match one of `{}` and others that are only types: NJsonSchema writes
    `[{}, {"type": "null"}]`. Empty: the alternatives are not these."""
    named = [kinds_of(each) for each in alternatives if isinstance(each, dict) and ASSERTIONS & each.keys() == {"type"}]
    excluded = frozenset[str]().union(*named)
    if len(alternatives) != len(named) + 1 or "number" in excluded or not any(map(is_neutral, alternatives)):
        return []
    return [kind for kind in ("object", "array", "string", "number", "boolean", "null") if kind not in excluded]


def alternatives_of(part: Json, root: Any) -> list[Any]:
    """The alternatives of `oneOf`, each with the type of the schema around it unless it has its own. Those that are
    only references are resolved."""
    given = part["oneOf"] if isinstance(part["oneOf"], list) else []
    around = {"type": part["type"]} if "type" in part else {}
    resolved = [resolve_all(each, root) if _is_reference(each) else each for each in given]
    return [{**around, **each} if isinstance(each, dict) else each for each in resolved]


def _is_reference(schema: Any) -> bool:
    return isinstance(schema, dict) and ASSERTIONS & schema.keys() == {"$ref"}


def exclude_all(alternatives: list[Any]) -> bool:
    """Whether no value matches two of them. Compares pairs only where a few sets do not tell: there may be thousands
    of alternatives."""
    constants: list[Any] = []
    objects: list[Any] = []
    others: list[Any] = []
    for each in alternatives:
        is_object = isinstance(each, dict) and kinds_of(each) == OBJECT
        (constants if constants_of(each) is not None else objects if is_object else others).append(each)
    named = [_discriminators(each) for each in objects]
    shared = set[str].intersection(*(set(each) for each in named)) if named else set()
    pairs: Iterable[tuple[Any, Any]] = itertools.combinations(alternatives, 2)
    if _are_disjoint(map(constants_of, constants)) and (
        len(objects) < 2 or any(_are_disjoint(each[name] for each in named) for name in shared)
    ):
        pairs = itertools.chain(
            itertools.combinations(others, 2),
            itertools.product(others, constants + objects),
            itertools.product(constants, objects),
        )
    compared = list(itertools.islice(pairs, _MAX_ALTERNATIVES**2 + 1))
    return len(compared) <= _MAX_ALTERNATIVES**2 and all(_exclude_each_other(*pair) for pair in compared)


def _are_disjoint(sets: Iterable[frozenset[str] | None]) -> bool:
    given = [each or frozenset() for each in sets]
    return len(frozenset[str]().union(*given)) == sum(map(len, given))


def _exclude_each_other(first: Any, second: Any) -> bool:
    """Whether no value matches both, as far as types, constants, and constants of required properties tell."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return False
    kinds = kinds_of(first), kinds_of(second)
    if all(kinds) and kinds[0].isdisjoint(kinds[1]):
        return True
    values = constants_of(first), constants_of(second)
    if values[0] is not None and values[1] is not None:
        return values[0].isdisjoint(values[1])
    ours, theirs = _discriminators(first), _discriminators(second)
    return OBJECT in kinds and any(ours[name].isdisjoint(theirs[name]) for name in ours.keys() & theirs.keys())


def _discriminators(schema: Json) -> dict[str, frozenset[str]]:
    """The required properties that have only listed values, and these."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    found = {name: constants_of(properties.get(name)) for name in required if isinstance(name, str)}
    return {name: values for name, values in found.items() if values is not None}
