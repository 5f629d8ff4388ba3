"""Twenty JSON schemas of different kinds, each with a question, and a judge of the answers that is not ours."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

Schema = dict[str, Any]


def fault(answer: str, schema: Schema) -> str | None:
    """The fault of an answer: not JSON, or, according to jsonschema, not JSON of this schema."""
    try:
        parsed = json.loads(answer)
    except ValueError as error:
        return str(error)
    errors = Draft202012Validator(schema, format_checker=FormatChecker()).iter_errors(parsed)
    return next((error.message for error in errors), None)


def record(properties: Schema, *optional: str) -> Schema:
    """An object of these properties and no others; all but the `optional` ones are required."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def text(longest: int) -> Schema:
    return {"type": "string", "maxLength": longest}


def pattern(regex: str) -> Schema:
    return {"type": "string", "pattern": f"^{regex}$"}


def whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def number(least: float, most: float) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most}


def array(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


FLAG: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}

SCHEMAS: dict[str, tuple[str, Schema]] = {
    "an object": ("Describe a person.", record({"name": text(20), "age": whole(0, 120), "member": FLAG})),
    "objects in objects": (
        "Where is the Eiffel Tower?",
        record({"city": record({"name": text(16), "country": record({"code": {"enum": ["FR", "DE", "IT"]}})})}),
    ),
    "an enum of strings": ("What colour is the sky?", record({"colour": {"enum": ["red", "green", "blue", "black"]}})),
    "an enum of anything, as the whole text": (
        "How many wheels has a car?",
        {"enum": [4, "four", None, True, [4, 4], {"wheels": 4}, -2.5]},
    ),
    "an array of numbers": ("Tell me a few prime numbers.", array(whole(2, 99), 2, 5)),
    "an array of objects": (
        "Which fruit do you have?",
        record({"fruit": array(record({"kind": text(12), "count": whole(1, 12)}), 1, 2)}),
    ),
    "a tuple": (
        "Name a planet and its number.",
        {"type": "array", "prefixItems": [text(10), whole(1, 8), FLAG], "items": False, "minItems": 3},
    ),
    "numbers with bounds": (
        "What are the coordinates of Rome?",
        record({"latitude": number(-90, 90), "longitude": number(-180, 180)}),
    ),
    "numbers that exclude their bounds": (
        "How likely is rain?",
        record(
            {
                "probability": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                "hour": {"type": "integer", "exclusiveMinimum": -1, "exclusiveMaximum": 24},
            }
        ),
    ),
    "a multiple": ("How many minutes does it take?", record({"minutes": {**whole(0, 120), "multipleOf": 5}})),
    "patterns": (
        "How can I reach you?",
        record(
            {"phone": pattern("[0-9]{3}-[0-9]{4}"), "mail": {"allOf": [text(16), pattern(r"[a-z]+@[a-z]+\.(com|org)")]}}
        ),
    ),
    "a format": (
        "Where do you live on the internet?",
        record({"address": {"type": "string", "format": "ipv4"}, "port": whole(1, 65535)}),
    ),
    "references": (
        "Draw a line.",
        {
            **record({"from": {"$ref": "#/$defs/a~1point"}, "to": {"$ref": "#/$defs/a~1point"}}),
            "$defs": {"a/point": record({"x": {"$ref": "#/$defs/digit"}, "y": whole(-9, 9)}), "digit": whole(0, 9)},
        },
    ),
    "a schema within itself": ("Count down from 3.", record({"n": whole(0, 9), "next": {"$ref": "#"}}, "next")),
    "one of several types": (
        "What is the article's number?",
        record({"article": {"anyOf": [whole(1, 9999), pattern("[A-Z]{2}[0-9]{2}")]}}),
    ),
    "objects distinguished by a constant": (
        "Draw a shape.",
        {
            "anyOf": [
                record({"shape": {"const": "circle"}, "radius": whole(1, 50)}),
                record({"shape": {"const": "rectangle"}, "width": whole(1, 50), "height": whole(1, 50)}),
            ]
        },
    ),
    "types that may be null": (
        "Who wrote the Iliad?",
        record({"author": {"type": ["string", "null"], "maxLength": 16}, "born": {"anyOf": [whole(-999, 2100), NULL]}}),
    ),
    "optional properties": (
        "Configure the server.",
        record({"host": text(12), "port": whole(1, 65535), "secure": FLAG, "note": text(16)}, "port", "secure", "note"),
    ),
    "names that are not words": (
        "Translate.",
        record({'naïve "quotes"': {"const": "\\ / \n é 日本 🙂"}, "日本": text(6), "": NULL}),
    ),
    "any names, a few at most": (
        "How many of each are there?",
        {
            "type": "object",
            "patternProperties": {"^[a-z]{1,8}$": whole(0, 100)},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 3,
        },
    ),
}
"""By the feature of each: a question, and the schema of its answer, which takes a small model 10 to 60 tokens."""
