"""JSON schemas as they are used for generation: simplified, and with objects that have only the properties they name.

The grammar engine does not know all keywords, and many schemas use those only in ways that restrict nothing:
`"uniqueItems": false`, `"propertyNames": {"type": "string"}`. Such keywords are dropped, whatever the draft.

A schema that does not mention other properties allows any, and small models then write them until the text is cut off.
llama.cpp and vLLM exclude them too, and clients such as instructor rely on it. The result still matches the client's
schema. `"additionalProperties": true` allows others.

The grammar engine takes `oneOf` only if it sees that no value matches two alternatives. Where types, constants or
required properties tell, `anyOf` replaces it, and an alternative does not allow what would make another one match.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from urllib.parse import quote

from cppbatch.json_schema import GUIDANCE, find

Json = dict[str, Any]

_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas", "dependencies")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = (
    "items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
"""The keywords whose values are maps of schemas, lists of schemas, and schemas."""
_HOLDERS = frozenset((*_MAPS, *_LISTS, *_SCHEMAS))
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
"""The keywords that bound numbers: the direction in which a bound is widened."""
_DEFINITIONS = ("$defs", "definitions")
_ASSERTIONS = frozenset(
    {*_MAPS, *_LISTS, *_SCHEMAS, *_COUNTS, *_BOUNDS}
    | {"type", "enum", "const", "multipleOf", "pattern", "format", "required", "uniqueItems", "dependentRequired"}
    | {"$ref", "$dynamicRef", "$recursiveRef"}
) - {*_DEFINITIONS}
"""The keywords that may restrict values. All others describe them."""
_IDENTIFIERS = {*_DEFINITIONS, "$id", "id", "$anchor", "$dynamicAnchor", "$schema", GUIDANCE}
_URI = "%#/:?@!$&'()*+,;=~"
"""The characters of a reference that are not escaped, apart from letters and digits: Go writes `#/$defs/List[int]`."""
_FORMATS = frozenset((
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
_MAX_ALTERNATIVES = 40
"""Pairs of more alternatives are not compared."""
_LARGEST = 10**17
_SMALLEST = 1e-15
"""Bounds that the grammar engine can express."""


def generation_schema(schema: Any) -> Any:
    """`close_objects` of what `simplify` returns."""
    return close_objects(simplify(schema))


def close_objects(schema: Any) -> Any:
    """A simplified schema with `"additionalProperties": false` in each object that names properties, mentions no
    others, and is not one of several schemas that a value must match at once, and with `anyOf` for `oneOf` whose
    alternatives exclude each other. The argument is not modified."""
    root, nodes = _copy(schema)
    if not any("/oneOf/" in str(node.get("$ref")) for node in nodes):
        for node in nodes:
            _separate(node, root)
    root, nodes = _copy(root)
    for node in nodes:
        _count_properties(node)
    _close(root, nodes)
    return root


def simplify(schema: Any) -> Any:
    """The schema without keywords that restrict nothing, with bounds that the grammar engine can express, and with
    `allOf` merged where the result means the same. The argument is not modified."""
    root, nodes = _copy(schema)
    pointed = "\n".join(str(node["$ref"]) for node in nodes if "$ref" in node) + "\n"
    has_empty = any("not" in node for node in nodes)
    is_dynamic = any("$dynamicRef" in node for node in nodes)
    is_collected = any(not _is_neutral(node.get(name, True)) for node in nodes for name in _UNEVALUATED)
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
    merger = _Merger(root)
    for node in reversed(nodes):
        if "/allOf/" not in pointed:
            merger.merge(node)
        _evaluate(node)
    return root


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
        if isinstance(name := part.get("format"), str) and name in _FORMATS - _ENFORCED_FORMATS:
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


def _copy(schema: Any) -> tuple[Any, list[Json]]:
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


# --- keywords that restrict nothing ----------------------------------------------------------------------------------


def _is_neutral(schema: Any) -> bool:
    """Whether any value matches a simplified schema."""
    return schema is True or (isinstance(schema, dict) and _ASSERTIONS.isdisjoint(schema))


def _is_empty(schema: Any) -> bool:
    """Whether a simplified schema says that no value matches: zod's `never`."""
    return isinstance(schema, dict) and _ASSERTIONS & schema.keys() == {"not"} and _is_neutral(schema["not"])


def _names_any(given: Any, _: Json) -> bool:
    """Whether each name matches a schema of names."""
    if not isinstance(given, dict) or given.get("type") not in ("string", ["string"]):
        return _is_neutral(given)
    return not _ASSERTIONS & given.keys() - {"type"}


_COLLECTING = frozenset(
    ("if", "then", "else", "not", "contains", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties")
)
"""Keywords that tell `unevaluatedProperties` and `unevaluatedItems` around them what is evaluated."""

_NEUTRAL: dict[str, Callable[[Any, Json], bool]] = {
    "$schema": lambda given, _: not _DRAFTS.fullmatch(str(given)),
    "uniqueItems": lambda given, node: given is False or node.get("maxItems") in (0, 1),
    "propertyNames": _names_any,
    "unevaluatedProperties": lambda given, _: _is_neutral(given),
    "unevaluatedItems": lambda given, _: _is_neutral(given),
    "contains": lambda _, node: node.get("minContains") == 0 and "maxContains" not in node,
    "minContains": lambda given, node: "contains" not in node or (given == 0 and "maxContains" not in node),
    "maxContains": lambda _, node: "contains" not in node,
    "not": lambda given, _: given is False,
    "then": lambda given, node: _is_neutral(given) or "if" not in node or node["if"] is False,
    "else": lambda given, node: _is_neutral(given) or "if" not in node or _is_neutral(node["if"]),
    "if": lambda _, node: not node.keys() & {"then", "else"},
    "dependentRequired": lambda given, _: isinstance(given, dict) and not any(given.values()),
    "dependentSchemas": lambda given, _: isinstance(given, dict) and all(map(_is_neutral, given.values())),
    "dependencies": lambda given, _: (
        isinstance(given, dict) and all(each == [] or _is_neutral(each) for each in given.values())
    ),
    "format": lambda given, _: isinstance(given, str) and given not in _FORMATS,
    "$recursiveAnchor": lambda *_: True,
    "$vocabulary": lambda *_: True,
}
"""For each keyword: whether its value restricts nothing, in its schema, whose inner schemas are simplified. Keywords on
which another one depends come after it."""


def _name_properties(node: Json, root: Any) -> None:
    """Replaces `propertyNames` with a list or a pattern of names by what the grammar engine knows."""
    names, others = _resolve_all(node.get("propertyNames"), root), node.get("additionalProperties", True)
    plain = isinstance(node.get("properties", {}), dict) and not node.keys() & {"patternProperties", *_UNEVALUATED}
    if not isinstance(names, dict) or not plain or "string" not in (_kinds(names) or ("string",)):
        return
    kept = _ASSERTIONS & names.keys() - {"type"}
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
    for name in _COUNTS:
        if isinstance(count := node.get(name), float) and count.is_integer():
            node[name] = int(count)
    for name, direction in _BOUNDS.items():
        bound = node.get(name)
        if isinstance(bound, bool) or not isinstance(bound, (int, float)):
            continue
        if bound * direction >= 2.0**53:  # doubles cannot tell larger integers apart; also infinite
            del node[name]
        elif abs(bound) > _LARGEST:
            node[name] = -direction * _LARGEST
        elif 0 < abs(bound) < _SMALLEST:
            node[name] = direction * _SMALLEST if bound * direction > 0 else 0


# --- schemas that a value must match at once -------------------------------------------------------------------------


class _Merger:
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
        merged: Json | None = {key: value for key, value in node.items() if key not in ("allOf", *_UNEVALUATED)}
        for part in parts:
            merged = None if merged is None else self._both(merged, part)
        self._merging.pop()
        if merged is not None:
            evaluated = {key: node[key] for key in _UNEVALUATED if key in node}
            node.clear()
            node.update(merged | evaluated)

    def _both(self, first: Json, second: Any) -> Json | None:
        """What matches both; None: no plain schema says so."""
        if second is True or not isinstance(second, dict):
            return first if second is True else None
        if _is_neutral(second) or ("$ref" in second and not first.keys() & _APPLIED):
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
        if not _ASSERTIONS.isdisjoint(rest):
            return None
        inlined = {key: value for key, value in target.items() if key not in _DEFINITIONS} | rest
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
    for key in first.keys() & second.keys() & _ASSERTIONS:
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


def _evaluate(node: Json) -> None:
    """Replaces keywords about what no schema beside them has named, if no schema is beside them. Drops what only
    describes a reference: the grammar engine refuses it if the reference is circular."""
    if "$ref" in node:
        for name in node.keys() - _ASSERTIONS - _IDENTIFIERS:
            del node[name]
    if not node.keys() & _APPLICATORS:
        if "unevaluatedProperties" in node:
            node.setdefault("additionalProperties", node.pop("unevaluatedProperties"))
        if "unevaluatedItems" in node and not isinstance(node.get("items"), list):
            node.setdefault("items", node.pop("unevaluatedItems"))


_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
_APPLICATORS = frozenset(
    ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas", "contains")
)
"""Keywords with schemas for the same value."""
_APPLIED = _APPLICATORS | {"$id", "properties", "patternProperties", "additionalProperties"}
_GROUPS: tuple[tuple[set[str], set[str]], ...] = (
    ({"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"}, {"properties"}),
    ({"prefixItems", "items", "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains"}, set()),
    ({"if", "then", "else"}, set()),
)
"""Keywords that refer to each other, so that two schemas with some of them cannot be merged, unless these are all."""


def _agree(first: Any, second: Any) -> bool:
    """Whether no property has two different schemas."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return False
    return all(first[name] == second[name] for name in first.keys() & second.keys())


# --- alternatives that exclude each other ----------------------------------------------------------------------------


def _separate(node: Json, root: Any) -> None:
    """Replaces `oneOf` by `anyOf` if its alternatives exclude each other, or do so without properties that another
    one requires."""
    given, parts = node.get("oneOf"), node.get("allOf", [])
    if not isinstance(given, list) or not isinstance(parts, list):
        return
    if "type" not in node and (types := _types_of_one(given)):
        node["type"] = types
        del node["oneOf"]
        return
    alternatives = _alternatives(node, root)
    left_out: list[list[str] | None] = []
    if not _exclude_all(alternatives):
        left_out = (
            [_left_out(i, alternatives) for i in range(len(given))] if len(given) <= _MAX_ALTERNATIVES else [None]
        )
    if None in left_out:
        return
    for i, names in enumerate(left_out):
        if names:
            kept = {key: value for key, value in alternatives[i].items() if key not in _DEFINITIONS}
            given[i] = kept | {"properties": _properties(kept) | dict.fromkeys(names, False)}
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
        if not isinstance(one, dict) or not isinstance(other, dict) or _OBJECT not in (_kinds(one), _kinds(other)):
            return None
        if _is_closed(other) and any(name not in _properties(other) for name in _required(one)):
            continue
        unnamed = [name for name in _required(other) if name not in _properties(one)]
        if unnamed and _is_closed(one):
            continue
        free = [name for name in unnamed if name not in _required(one)]
        if not free or "$id" in one or not _APPLICATORS.isdisjoint(one):
            return None
        names.append(free[0])
    return names


def _types_of_one(alternatives: list[Any]) -> list[str]:
    """The types of the values that match one of `{}` and others that are only types: NJsonSchema writes
    `[{}, {"type": "null"}]`. Empty: the alternatives are not these."""
    named = [_kinds(each) for each in alternatives if isinstance(each, dict) and _ASSERTIONS & each.keys() == {"type"}]
    excluded = frozenset[str]().union(*named)
    if len(alternatives) != len(named) + 1 or "number" in excluded or not any(map(_is_neutral, alternatives)):
        return []
    return [kind for kind in ("object", "array", "string", "number", "boolean", "null") if kind not in excluded]


def _is_closed(schema: Json) -> bool:
    return schema.get("additionalProperties") is False and "patternProperties" not in schema


def _properties(schema: Json) -> Json:
    return given if isinstance(given := schema.get("properties"), dict) else {}


def _required(schema: Json) -> list[str]:
    given = schema.get("required")
    return [name for name in given if isinstance(name, str)] if isinstance(given, list) else []


def _count_properties(node: Json) -> None:
    """Replaces the number of properties by what the grammar engine knows, if the schema names them all."""
    counted = {"minProperties", "maxProperties", *(("additionalProperties",) if _is_closed(node) else ())}
    if not _names_all_properties({key: value for key, value in node.items() if key not in counted}):
        return
    required = {*_required(node)}
    named = [name for name, each in node["properties"].items() if each is not False]
    least, most = node.get("minProperties"), node.get("maxProperties")
    if isinstance(most, int) and most >= len(named):
        del node["maxProperties"]
    if isinstance(least, int) and least <= len(required.intersection(named)):
        del node["minProperties"]
    elif least == 1 and named and "anyOf" not in node:
        del node["minProperties"]
        node["anyOf"] = [{"required": [name]} for name in named]


# --- closed objects --------------------------------------------------------------------------------------------------


_OPENERS = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties")
)
# If a value must match several schemas at once, none of them names all properties.
_COMBINE = frozenset(("allOf", "if", "not", "dependentSchemas", "dependencies", "$dynamicRef", "contains"))
_COMBINE_IF_TWO = frozenset(("properties", "$ref", "anyOf", "oneOf"))


def _close(root: Any, nodes: list[Json]) -> None:
    """Closes the objects of a schema in place. `nodes`: all schemas in it."""
    combined: list[Any] = [node for node in nodes if _combines(node, root)]
    is_open: set[int] = set()
    while combined:
        part = combined.pop()
        if isinstance(part, dict) and id(part) not in is_open:
            is_open.add(id(part))
            combined += [each for path, each, _ in inner_schemas(part) if not path.startswith(_DEFINITIONS)]
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
    return not _exclude_all(_alternatives(part, root))


def _only_requires(part: Json) -> bool:
    """Whether the alternatives of `anyOf` say nothing but which of the properties are required or left out."""
    known, alternatives = _properties(part), part["anyOf"]
    return isinstance(alternatives, list) and all(
        isinstance(each, dict)
        and _ASSERTIONS & each.keys() <= {"type", "required", "properties", "additionalProperties"}
        and each.get("additionalProperties", True) is True
        and not any(_properties(each).values())
        and all(name in known for name in (*_required(each), *_properties(each)))
        for each in alternatives
    )


def _alternatives(part: Json, root: Any) -> list[Any]:
    """The alternatives of `oneOf`, each with the type of the schema around it unless it has its own. Those that are
    only references are resolved."""
    given = part["oneOf"] if isinstance(part["oneOf"], list) else []
    around = {"type": part["type"]} if "type" in part else {}
    resolved = [_resolve_all(each, root) if _is_reference(each) else each for each in given]
    return [{**around, **each} if isinstance(each, dict) else each for each in resolved]


def _is_reference(schema: Any) -> bool:
    return isinstance(schema, dict) and _ASSERTIONS & schema.keys() == {"$ref"}


def _resolve_all(schema: Any, root: Any) -> Any:
    for _ in range(16):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = find(root, schema["$ref"])
    return schema


def _exclude_all(alternatives: list[Any]) -> bool:
    """Whether no value matches two of them. Compares pairs only where a few sets do not tell: there may be thousands
    of alternatives."""
    constants: list[Any] = []
    objects: list[Any] = []
    others: list[Any] = []
    for each in alternatives:
        is_object = isinstance(each, dict) and _kinds(each) == _OBJECT
        (constants if _constants(each) is not None else objects if is_object else others).append(each)
    named = [_discriminators(each) for each in objects]
    shared = set[str].intersection(*(set(each) for each in named)) if named else set()
    pairs: Iterable[tuple[Any, Any]] = itertools.combinations(alternatives, 2)
    if _are_disjoint(map(_constants, constants)) and (
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
    kinds = _kinds(first), _kinds(second)
    if all(kinds) and kinds[0].isdisjoint(kinds[1]):
        return True
    values = _constants(first), _constants(second)
    if values[0] is not None and values[1] is not None:
        return values[0].isdisjoint(values[1])
    ours, theirs = _discriminators(first), _discriminators(second)
    return _OBJECT in kinds and any(ours[name].isdisjoint(theirs[name]) for name in ours.keys() & theirs.keys())


def _kinds(schema: Json) -> frozenset[str]:
    """The types of values, with `number` for all numbers; empty: any."""
    given = schema.get("type", [])
    kinds = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    if not kinds and (values := _constants(schema)) is not None:
        kinds = [_KINDS.get(value[0], "number") for value in values]
    return frozenset("number" if kind == "integer" else str(kind) for kind in kinds)


_OBJECT = frozenset(("object",))
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
"""The type of a JSON text by its first character."""


def _constants(schema: Any) -> frozenset[str] | None:
    """The only values, as JSON; None: there may be others. `schema`: of a property, or resolved."""
    if not isinstance(schema, dict):
        return None
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(json.dumps(each, sort_keys=True) for each in listed) if isinstance(listed, list) else None


def _discriminators(schema: Json) -> dict[str, frozenset[str]]:
    """The required properties that have only listed values, and these."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    found = {name: _constants(properties.get(name)) for name in required if isinstance(name, str)}
    return {name: values for name, values in found.items() if values is not None}


def _names_all_properties(part: Json) -> bool:
    """Whether it names properties, including all required ones, and does not mention others."""
    properties, required = part.get("properties"), part.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return _OPENERS.isdisjoint(part) and all(isinstance(name, str) and name in properties for name in required)
