"""Objects that have only the properties they name."""

from __future__ import annotations

from typing import Any

from cppbatch.generation_schema.alternatives import alternatives_of, exclude_all, separate
from cppbatch.generation_schema.keywords import (
    ASSERTIONS,
    DEFINITIONS,
    Json,
    copy_schema,
    inner_schemas,
    is_closed,
    properties_of,
    required_of,
)
from cppbatch.json_schema import find

_OPENERS = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties")
)
# If a value must match several schemas at once, none of them names all properties.
_COMBINE = frozenset(("allOf", "if", "not", "dependentSchemas", "dependencies", "$dynamicRef", "contains"))
_COMBINE_IF_TWO = frozenset(("properties", "$ref", "anyOf", "oneOf"))


def close_objects(schema: Any) -> Any:
    """A simplified schema with `"additionalProperties": false` in each object that names properties, mentions no
    others, and is not one of several schemas that a value must match at once, and with `anyOf` for `oneOf` whose
    alternatives exclude each other. The argument is not modified."""
    root, nodes = copy_schema(schema)
    if not any("/oneOf/" in str(node.get("$ref")) for node in nodes):
        for node in nodes:
            separate(node, root)
    root, nodes = copy_schema(root)
    for node in nodes:
        _count_properties(node)
    _close(root, nodes)
    return root


def _close(root: Any, nodes: list[Json]) -> None:
    """Closes the objects of a schema in place. `nodes`: all schemas in it."""
    combined: list[Any] = [node for node in nodes if _combines(node, root)]
    is_open: set[int] = set()
    while combined:
        part = combined.pop()
        if isinstance(part, dict) and id(part) not in is_open:
            is_open.add(id(part))
            combined += [each for path, each, _ in inner_schemas(part) if not path.startswith(DEFINITIONS)]
            combined.append(find(root, part.get("$ref", "")))
    for node in nodes:
        if id(node) not in is_open and _names_all_properties(node):
            node["additionalProperties"] = False


def _combines(part: Json, root: Any) -> bool:
    """Includes `oneOf` whose alternatives do not exclude each other: open ones may not do so when closed."""
    two = _COMBINE_IF_TWO & part.keys()
    if not _COMBINE.isdisjoint(part) or (
        len(two) > 1 and not (two == {"properties", "anyOf"} and _only_requires(part))
    ):
        return True
    if "oneOf" not in part or "discriminator" in part:
        return False
    return not exclude_all(alternatives_of(part, root))


def _only_requires(part: Json) -> bool:
    """Whether the alternatives of `anyOf` say nothing but which of the properties are required or left out."""
    known, alternatives = properties_of(part), part["anyOf"]
    return isinstance(alternatives, list) and all(
        isinstance(each, dict)
        and ASSERTIONS & each.keys() <= {"type", "required", "properties", "additionalProperties"}
        and each.get("additionalProperties", True) is True
        and not any(properties_of(each).values())
        and all(name in known for name in (*required_of(each), *properties_of(each)))
        for each in alternatives
    )


def _count_properties(node: Json) -> None:
    """Replaces the number of properties by what the grammar engine knows, if the schema names them all."""
    counted = {"minProperties", "maxProperties", *(("additionalProperties",) if is_closed(node) else ())}
    if not _names_all_properties({key: value for key, value in node.items() if key not in counted}):
        return
    required = {*required_of(node)}
    named = [name for name, each in node["properties"].items() if each is not False]
    least, most = node.get("minProperties"), node.get("maxProperties")
    if isinstance(most, int) and most >= len(named):
        del node["maxProperties"]
    if isinstance(least, int) and least <= len(required.intersection(named)):
        del node["minProperties"]
    elif least == 1 and named and "anyOf" not in node:
        del node["minProperties"]
        node["anyOf"] = [{"required": [name]} for name in named]


def _names_all_properties(part: Json) -> bool:
    """Whether it names properties, including all required ones, and does not mention others."""
    properties, required = part.get("properties"), part.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return _OPENERS.isdisjoint(part) and all(isinstance(name, str) and name in properties for name in required)
