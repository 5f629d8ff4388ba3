"""Finding markers and the ends of JSON values in streamed text."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterable
from typing import Any

from cppbatch.json_schema import find

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]|[^\s\w.,:+\-]')  # the second: characters that JSON has only in strings
_END_OF_SCALAR = re.compile(r"[^\w.+\-]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CLOSING = {"{": "}", "[": "]"}


class MarkerFinder:
    """Finds the first of several strings; of those that start at the same place, the longest."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = tuple(sorted(dict.fromkeys(markers), key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self.markers)))
        self._longest = max(map(len, self.markers), default=0)
        self._prefixes = frozenset(marker[:n] for marker in self.markers for n in range(1, len(marker)))

    def __bool__(self) -> bool:
        return bool(self.markers)

    def split(self, text: str) -> tuple[str, str | None, str]:
        """Returns the text before the first marker, that marker, and the text after it.

        Without a marker: the text that cannot be part of one, None, and the end of the text if it may start a marker.
        """
        if not self.markers:
            return text, None, ""
        if found := self._pattern.search(text):
            if text[found.start() :] in self._prefixes:  # perhaps a longer one
                return text[: found.start()], None, text[found.start() :]
            return text[: found.start()], found[0], text[found.end() :]
        first = max(0, len(text) - self._longest + 1)
        start = next((i for i in range(first, len(text)) if text[i:] in self._prefixes), None)
        return (text, None, "") if start is None else (text[:start], None, text[start:])

    def at_start(self, text: str) -> str | None:
        """Returns the marker at the start of the text; "" if more text may complete one; else None."""
        if text in self._prefixes:
            return ""
        found = self._pattern.match(text) if self.markers else None
        return found[0] if found else None


class InvalidJson(ValueError):
    """`at`: index of the invalid character in the text that was pushed."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class JsonValueScanner:
    """Finds the end of a JSON value, which starts with the first character pushed.

    Brackets must match. The positions of numbers, words and commas are not checked.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = self._escaped = self._in_scalar = False

    def push(self, text: str) -> int | None:
        """Returns the index in `text` at which the value ends; None if it continues. Raises `InvalidJson`."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
            elif self._in_string:
                found = _IN_STRING.search(text, at)
                if found is None:
                    return None
                at = found.end()
                self._escaped, self._in_string = found[0] == "\\", found[0] == "\\"
            elif self._in_scalar:
                found = _END_OF_SCALAR.search(text, at)
                return found.start() if found else None
            else:
                found = _OUTSIDE_STRINGS.search(text, at) if self._open else None
                if self._open and found is None:
                    return None
                at = self._read_structure(text, found.start() if found else at)
            if not (self._open or self._in_string or self._in_scalar):
                return at
        return None

    def _read_structure(self, text: str, at: int) -> int:
        """Reads one character outside strings. Returns the next index."""
        character = text[at]
        if character == '"':
            self._in_string = True
        elif character in _CLOSING:
            self._open.append(_CLOSING[character])
        elif self._open and character == self._open[-1]:
            self._open.pop()
        elif not self._open and re.match(r"[\w\-]", character):
            self._in_scalar = True
        else:
            raise InvalidJson(at)
        return at + 1


def parse_json(text: str) -> Any:
    """Decodes JSON text. Raises `ValueError`, also for NaN, infinity and values that are nested too deeply."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not valid JSON")


def dump_json(value: Any) -> str:
    """Encodes a value as JSON text with spaces after commas and colons, as models write it. Unpaired surrogates, which
    have no UTF-8 encoding, are escaped."""
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", json.dumps(value, ensure_ascii=False))


# --- schema types ----------------------------------------------------------------------------------------------------
# Types and constraints of values that a model writes without JSON's quotes, from their JSON schema.


Json = dict[str, Any]

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates write Python's values
_ANY_KEYS = {"type", "title", "description", "default", "examples", "deprecated"}
_STRING_KEYS = _ANY_KEYS | {"enum", "const", "minLength", "maxLength"}
_OBJECT_KEYS = _ANY_KEYS | {"properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_ARRAY_KEYS = _ANY_KEYS | {"items", "minItems", "maxItems"}
_MAX_BRACKETS = 100  # more may overflow the stack of Python's parser
_MAX_REFERENCES = _MAX_DEPTH = 16


def json_types(schema: Any, root: Json, depth: int = 0) -> frozenset[str]:
    """Returns the JSON types that a value may have; empty: any. `root`: the whole schema, to resolve references."""
    schema = resolve_ref(schema, root)
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return frozenset()
    if "type" in schema:
        given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset(given) if all(isinstance(kind, str) for kind in given) else frozenset()
    if "const" in schema or isinstance(schema.get("enum"), list):
        return frozenset(map(json_type_of, enum_values(schema) or ()))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = [json_types(part, root, depth + 1) for part in schema[key]]
            return frozenset().union(*parts) if all(parts) else frozenset()
    every = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    known = [types for part in every if (types := json_types(part, root, depth + 1))]
    return frozenset.intersection(*known) if known else frozenset()


def json_type_of(value: Any) -> str:
    """Returns the name of a value's JSON type."""
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


def resolve_ref(schema: Any, root: Json) -> Any:
    """Replaces a reference within the same document by its target."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not str(schema.get("$ref", "")).startswith("#/"):
            break
        schema = find(root, schema["$ref"])
    return schema


def coerce_to_json(text: str, types: Iterable[str]) -> str:
    """Converts a value that a model wrote into JSON text.

    The result is a string if the text is not JSON, or if `types` include strings but not the type of the value.
    """
    wanted = frozenset(types)
    written = _PYTHON_WORDS.get(text.strip(), text.strip())
    if wanted & {"object", "array"} and "string" not in wanted:
        written = _from_python(written)
    try:
        kind = json_type_of(parse_json(written))
    except ValueError:
        return dump_json(text)
    fits = not wanted or kind in wanted or (kind == "integer" and "number" in wanted)
    return dump_json(text) if kind == "string" or not (fits or "string" not in wanted) else written


def _from_python(text: str) -> str:
    """Converts a Python literal of an object or array, as some templates write it, to JSON. Other text is unchanged."""
    with contextlib.suppress(ValueError):
        parse_json(text)
        return text
    if sum(map(text.count, "([{")) > _MAX_BRACKETS:
        return text
    with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return dump_json(ast.literal_eval(text))
    return text


class UnsupportedSchema(Exception):
    """The schema has constraints that cannot be enforced outside JSON."""


def object_members(schema: Json) -> list[tuple[str, Any, bool]]:
    """Returns an object's members: name, schema, required. Raises `UnsupportedSchema` if others are allowed."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if schema.keys() - _OBJECT_KEYS or schema.get("additionalProperties"):
        raise UnsupportedSchema
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise UnsupportedSchema
    if not all(isinstance(name, str) and name in properties for name in required):
        raise UnsupportedSchema
    return [(name, schema, name in required) for name, schema in properties.items()]


def array_items(schema: Json) -> tuple[Any, int, int | None]:
    """Returns the schema of an array's items, their minimum and maximum number. Raises `UnsupportedSchema`."""
    minimum, maximum = schema.get("minItems", 0), schema.get("maxItems")
    if schema.keys() - _ARRAY_KEYS or "items" not in schema:
        raise UnsupportedSchema
    if not isinstance(minimum, int) or not isinstance(maximum, int | None):
        raise UnsupportedSchema
    if maximum is not None and maximum < minimum:
        raise UnsupportedSchema
    return schema["items"], minimum, maximum


def string_lengths(schema: Json) -> tuple[int, int | None]:
    """Returns a string's minimum and maximum length. Raises `UnsupportedSchema` if there are other constraints."""
    minimum, maximum = schema.get("minLength", 0), schema.get("maxLength")
    if schema.keys() - _STRING_KEYS or not isinstance(minimum, int) or not isinstance(maximum, int | None):
        raise UnsupportedSchema
    return minimum, maximum


def schema_variants(schema: Any, root: Json) -> list[Any]:
    """Returns the alternatives of `anyOf` or of a list of types, else the schema itself. Raises `UnsupportedSchema`."""
    schema = resolve_ref(schema, root)
    if not isinstance(schema, dict):
        raise UnsupportedSchema
    if isinstance(schema.get("anyOf"), list) and schema["anyOf"] and not schema.keys() - _ANY_KEYS - {"anyOf"}:
        return [resolve_ref(part, root) for part in schema["anyOf"]]
    if isinstance(schema.get("type"), list) and schema["type"]:
        return [schema | {"type": kind} for kind in schema["type"]]
    return [schema]


def enum_values(schema: Json) -> list[Any] | None:
    """Returns the values of `enum` or `const`; None if there are none."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) and schema["enum"] else None


def standalone_schema(schema: Any, root: Json) -> Any:
    """Returns a part of a schema as a separate document, with definitions. Raises `UnsupportedSchema`."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    references = re.findall(r'"\$ref": "([^"]*)', dump_json([schema, definitions]))
    if any(not reference.startswith(("#/$defs/", "#/definitions/")) for reference in references):
        raise UnsupportedSchema
    if not references:
        return schema
    if not isinstance(schema, dict):  # true or false
        raise UnsupportedSchema
    return definitions | schema
