"""Schemas without keywords that restrict nothing, and with bounds that the grammar engine can express."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote

from cppbatch.generation_schema.keywords import (
    APPLICATORS,
    ASSERTIONS,
    BOUNDS,
    COUNTS,
    DEFINITIONS,
    FORMATS,
    UNEVALUATED,
    Json,
    copy_schema,
    inner_schemas,
    is_neutral,
    kinds_of,
    resolve_all,
)
from cppbatch.generation_schema.merge import Merger
from cppbatch.json_schema import GUIDANCE

_IDENTIFIERS = {*DEFINITIONS, "$id", "id", "$anchor", "$dynamicAnchor", "$schema", GUIDANCE}
_URI = "%#/:?@!$&'()*+,;=~"
"""The characters of a reference that are not escaped, apart from letters and digits: Go writes `#/$defs/List[int]`."""
_DRAFTS = re.compile(
    r"http://json-schema\.org/draft-0[467]/schema#?|https://json-schema\.org/draft/20(19-09|20-12)/schema#?"
)
"""The values of `$schema` that the grammar engine knows."""
_NAMES_OF_FORMAT = {
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "date": "^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$",
}
"""Formats of names as patterns: those of Python's `dict[UUID, ...]` and `dict[date, ...]`."""
_FRACTION = r"^[^.]*(\.[0-9]{1,9}([^0-9].*)?)?$"
"""Bounds the digits of a second's fraction: a weak model could write them forever."""
_LARGEST = 10**17
_SMALLEST = 1e-15
"""Bounds that the grammar engine can express."""


def simplify(schema: Any) -> Any:
    """The schema without keywords that restrict nothing, with bounds that the grammar engine can express, and with
    `allOf` merged where the result means the same. The argument is not modified."""
    root, nodes = copy_schema(schema)
    pointed = "\n".join(str(node["$ref"]) for node in nodes if "$ref" in node) + "\n"
    has_empty = any("not" in node for node in nodes)
    is_dynamic = any("$dynamicRef" in node for node in nodes)
    is_collected = any(not is_neutral(node.get(name, True)) for node in nodes for name in UNEVALUATED)
    for node in reversed(nodes):  # inner ones first
        if "$dynamicAnchor" in node and not is_dynamic:
            node["$anchor"] = node.pop("$dynamicAnchor")
        for name, restricts_nothing in _NEUTRAL.items():
            if name not in node or (is_collected and name in _COLLECTING):
                continue
            is_pointed = f"/{name}/" in pointed or f"/{name}\n" in pointed
            if not is_pointed and restricts_nothing(node[name], node):
                del node[name]
        _spell(node, pointed)
        if has_empty:
            for _, inner, put in inner_schemas(node):
                if _is_empty(inner):
                    put(False)
        if "propertyNames" in node:
            _name_properties(node, root)
        _bound(node)
    merger = Merger(root)
    for node in reversed(nodes):
        if "/allOf/" not in pointed:
            merger.merge(node)
        _evaluate(node)
    return root


def _is_empty(schema: Any) -> bool:
    """Whether a simplified schema says that no value matches: zod's `never`."""
    return isinstance(schema, dict) and ASSERTIONS & schema.keys() == {"not"} and is_neutral(schema["not"])


def _names_any(given: Any, _: Json) -> bool:
    """Whether each name matches a schema of names."""
    if not isinstance(given, dict) or given.get("type") not in ("string", ["string"]):
        return is_neutral(given)
    return not ASSERTIONS & given.keys() - {"type"}


_COLLECTING = frozenset(
    ("if", "then", "else", "not", "contains", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties")
)
"""Keywords that tell `unevaluatedProperties` and `unevaluatedItems` around them what is evaluated."""
_NEUTRAL: dict[str, Callable[[Any, Json], bool]] = {
    "$schema": lambda given, _: not _DRAFTS.fullmatch(str(given)),
    "uniqueItems": lambda given, node: given is False or node.get("maxItems") in (0, 1),
    "propertyNames": _names_any,
    "unevaluatedProperties": lambda given, _: is_neutral(given),
    "unevaluatedItems": lambda given, _: is_neutral(given),
    "contains": lambda _, node: node.get("minContains") == 0 and "maxContains" not in node,
    "minContains": lambda given, node: "contains" not in node or (given == 0 and "maxContains" not in node),
    "maxContains": lambda _, node: "contains" not in node,
    "not": lambda given, _: given is False,
    "then": lambda given, node: is_neutral(given) or "if" not in node or node["if"] is False,
    "else": lambda given, node: is_neutral(given) or "if" not in node or is_neutral(node["if"]),
    "if": lambda _, node: not node.keys() & {"then", "else"},
    "dependentRequired": lambda given, _: isinstance(given, dict) and not any(given.values()),
    "dependentSchemas": lambda given, _: isinstance(given, dict) and all(map(is_neutral, given.values())),
    "dependencies": lambda given, _: (
        isinstance(given, dict) and all(each == [] or is_neutral(each) for each in given.values())
    ),
    "format": lambda given, _: isinstance(given, str) and given not in FORMATS,
    "$recursiveAnchor": lambda *_: True,
    "$vocabulary": lambda *_: True,
}
"""For each keyword: whether its value restricts nothing, in its schema, whose inner schemas are simplified. Keywords on
which another one depends come after it."""


def _name_properties(node: Json, root: Any) -> None:
    """Replaces `propertyNames` with a list or a pattern of names by what the grammar engine knows."""
    names, others = resolve_all(node.get("propertyNames"), root), node.get("additionalProperties", True)
    plain = isinstance(node.get("properties", {}), dict) and not node.keys() & {"patternProperties", *UNEVALUATED}
    if not isinstance(names, dict) or not plain or "string" not in (kinds_of(names) or ("string",)):
        return
    kept = ASSERTIONS & names.keys() - {"type"}
    listed = names.get("enum", [names["const"]] if "const" in names else None)
    if len(kept) == 1 and isinstance(listed, list):
        known = node.get("properties", {})
        node["properties"] = {name: known.get(name, others) for name in listed if isinstance(name, str)}
    elif not node.get("properties") and (pattern := _pattern(names, kept)):
        node["patternProperties"] = {pattern: others}
    else:
        return
    node["additionalProperties"] = False
    del node["propertyNames"]


def _pattern(names: Json, kept: Iterable[str]) -> str | None:
    """The regular expression of the names that match a schema; None: it has other keywords."""
    if {*kept} == {"format"}:
        return _NAMES_OF_FORMAT.get(str(names["format"]))
    if "pattern" in kept and {*kept} <= {"pattern", "format"} and isinstance(names["pattern"], str):
        return str(names["pattern"])
    if {*kept} <= {"minLength", "maxLength"}:
        return f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


def _spell(node: Json, pointed: str) -> None:
    """Escapes characters of a reference, and writes a single alternative as `allOf`, which can be merged."""
    if isinstance(reference := node.get("$ref"), str):
        node["$ref"] = quote(reference, safe=_URI)
    for name in ("anyOf", "oneOf"):
        given, parts = node.get(name), node.get("allOf", [])
        if isinstance(given, list) and len(given) == 1 and isinstance(parts, list) and f"/{name}/" not in pointed:
            node["allOf"] = [*parts, *node.pop(name)]


def _bound(node: Json) -> None:
    """Bounds what a model could write forever, and widens bounds of numbers that the grammar engine cannot express."""
    if node.get("format") in ("date-time", "time"):
        if "pattern" not in node:
            node["pattern"] = _FRACTION
        elif isinstance(parts := node.setdefault("allOf", []), list) and {"pattern": _FRACTION} not in parts:
            parts.append({"pattern": _FRACTION})
    for name in COUNTS:
        if isinstance(count := node.get(name), float) and count.is_integer():
            node[name] = int(count)
    for name, direction in BOUNDS.items():
        bound = node.get(name)
        if isinstance(bound, bool) or not isinstance(bound, (int, float)):
            continue
        if bound * direction >= 2.0**53:  # doubles cannot tell larger integers apart; also infinite
            del node[name]
        elif abs(bound) > _LARGEST:
            node[name] = -direction * _LARGEST
        elif 0 < abs(bound) < _SMALLEST:
            node[name] = direction * _SMALLEST if bound * direction > 0 else 0


def _evaluate(node: Json) -> None:
    """Replaces keywords about what no schema beside them has named, if no schema is beside them. Drops what only
    describes a reference: the grammar engine refuses it if the reference is circular."""
    if "$ref" in node:
        for name in node.keys() - ASSERTIONS - _IDENTIFIERS:
            del node[name]
    if not node.keys() & APPLICATORS:
        if "unevaluatedProperties" in node:
            node.setdefault("additionalProperties", node.pop("unevaluatedProperties"))
        if "unevaluatedItems" in node and not isinstance(node.get("items"), list):
            node.setdefault("items", node.pop("unevaluatedItems"))
