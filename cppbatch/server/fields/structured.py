"""The request fields that constrain the text, with the names of OpenAI, llama-server, vLLM, SGLang and TGI."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from cppbatch.errors import InvalidRequest
from cppbatch.json_bounds import excess
from cppbatch.json_schema import compact_schema

Schema = dict[str, Any] | bool


class Constraint(NamedTuple):
    """A constraint on the text."""

    field: str
    """The client's name for the field."""
    kind: str
    """The equivalent field of `SamplingParams`: one of `GRAMMARS`."""
    value: Any

    @property
    def is_schema(self) -> bool:
        """Whether it is a schema of the answer, as `StructuredFields.schema` returns it. The field `json_schema` is
        read by `SamplingParams`."""
        return self.kind == "json_schema" and self.field != "json_schema"


class NamedSchema(msgspec.Struct):
    """`response_format.json_schema`: a JSON schema with its name."""

    schema: Schema | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """`response_format`."""

    type: str
    """`text`, `json_object` or `json_schema`; also TGI's `json` and `regex`."""
    json_schema: NamedSchema | None = None
    schema: Schema | None = None
    """llama-server's field for the schema."""
    value: Schema | str | None = None
    """TGI's field for the schema or the regular expression."""

    def constraint(self) -> Constraint | None:
        """The constraint, None for free text. Raises `InvalidRequest`."""
        if self.type == "text":
            return None
        if self.type == "regex":
            if not isinstance(self.value, str):
                raise InvalidRequest("response_format.value", "is required for type regex: a string")
            return Constraint("response_format", "guided_regex", self.value)
        if self.type not in ("json_object", "json_schema", "json"):
            message = f"is {self.type!r}; it must be text, json_object or json_schema"
            raise InvalidRequest("response_format.type", message)
        schema = self._schema()
        if schema is None:
            if self.type != "json_object":
                place = "value" if self.type == "json" else "json_schema.schema" if self.json_schema else "json_schema"
                message = f"is required for type {self.type}; to allow any JSON object, use type json_object"
                raise InvalidRequest(f"response_format.{place}", message)
            schema = {"type": "object"}
        return Constraint("response_format", "json_schema", schema)

    def _schema(self) -> Schema | None:
        """The schema, wherever it is."""
        if self.json_schema is not None and self.json_schema.schema is not None:
            return self.json_schema.schema
        if self.schema is not None:
            return self.schema
        return None if self.value is None else decode_schema("response_format.value", self.value)


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """`structured_outputs`, vLLM's: one constraint."""

    json: Schema | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """GBNF (with a `root` rule), or Lark (with `start`)."""
    json_object: bool | None = None
    structural_tag: Any = None
    """Not supported."""
    whitespace_pattern: str | None = None
    """Not supported."""
    disable_any_whitespace: bool | None = None
    """vLLM's name for `compact_json`."""
    disable_additional_properties: bool | None = None
    """true is not supported: set `"additionalProperties": false` in the schema."""
    disable_fallback: bool | None = None
    """Ignored, like the following fields."""
    backend: str | None = None
    own_backend: str | None = msgspec.field(default=None, name="_backend")
    own_backend_was_auto: bool | None = msgspec.field(default=None, name="_backend_was_auto")

    def constraints(self) -> list[Constraint]:
        """The given constraints. Raises `InvalidRequest`."""
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise InvalidRequest(f"structured_outputs.{name}", "is not supported; leave it out")
        found = [
            Constraint(f"structured_outputs.{name}", kind, getattr(self, name))
            for name, kind in _KINDS.items()
            if getattr(self, name) is not None
        ]
        if self.json_object:
            found.append(Constraint("structured_outputs.json_object", "json_schema", {"type": "object"}))
        if not found:
            raise InvalidRequest("structured_outputs", f"contains no constraint; give one of {', '.join(_KINDS)}")
        return found


_UNSUPPORTED = ("structural_tag", "whitespace_pattern", "disable_additional_properties")
_KINDS = {"json": "json_schema", "regex": "guided_regex", "choice": "guided_choice", "grammar": "grammar"}


class StructuredFields(msgspec.Struct, kw_only=True, dict=True):
    """At most one of these fields may be given. A copy with other values (`replace`) computes `constraint` again."""

    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | str | bool | None = None
    compact_json: bool | None = None
    """Generate JSON for a schema without whitespace between tokens."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    """vLLM's field: one of `json`, `regex`, `choice`, `grammar`, `json_object`."""
    guided_json: dict[str, Any] | str | bool | None = None
    """vLLM's earlier name for `structured_outputs.json`."""
    guided_grammar: str | None = None
    """vLLM's earlier name for `structured_outputs.grammar`."""
    regex: str | None = None
    """SGLang's name for `guided_regex`."""
    ebnf: str | None = None
    """SGLang's name for `grammar`."""

    @cached_property
    def constraint(self) -> Constraint | None:
        """The constraint on the text; None: free text. Raises `InvalidRequest` if several are given."""
        wanted = self.response_format.constraint() if self.response_format else None
        found = [wanted] if wanted else []
        found += self.structured_outputs.constraints() if self.structured_outputs else []
        found += [
            Constraint(name, kind, getattr(self, name))
            for name, kind in _ALONE.items()
            if getattr(self, name) is not None
        ]
        if len(found) > 1:
            first, second = (each.field for each in found[:2])
            raise InvalidRequest(second, f"cannot be combined with {first}: give only one constraint")
        return found[0] if found else None

    def constraint_field(self, default: str) -> str:
        """The client's name for the field that constrains the text; `default` for free text. Raises
        `InvalidRequest`."""
        return self.constraint.field if self.constraint else default

    def schema(self) -> Schema | None:
        """The JSON schema of the answer; None: another constraint or free text. Raises `InvalidRequest`."""
        wanted = self.constraint
        return self.compact(decode_schema(wanted.field, wanted.value)) if wanted and wanted.is_schema else None

    @property
    def is_compact(self) -> bool:
        """Whether JSON has no whitespace between tokens."""
        theirs = self.structured_outputs is not None and self.structured_outputs.disable_any_whitespace
        return bool(self.compact_json or theirs)

    def compact(self, schema: Schema) -> Schema:
        """The schema in this request."""
        return compact_schema(schema) if self.is_compact else schema


_ALONE = {
    "json_schema": "json_schema",
    "guided_regex": "guided_regex",
    "guided_choice": "guided_choice",
    "grammar": "grammar",
    "guided_json": "json_schema",
    "guided_grammar": "grammar",
    "regex": "guided_regex",
    "ebnf": "grammar",
}
"""Fields that each are a complete constraint."""

CONSTRAINTS = frozenset({*_ALONE, "structured_outputs", "response_format"})
"""All fields that constrain the text."""


def one_schema(field: str, schema: Schema | None, body: StructuredFields) -> Schema | None:
    """The schema from an API's own field, or from `body`. Raises `InvalidRequest` if both are given."""
    other = StructuredFields.schema(body)
    if schema is not None and body.constraint:
        raise InvalidRequest(body.constraint.field, f"cannot be combined with {field}: give only one constraint")
    return other if schema is None else body.compact(schema)


def decode_schema(field: str, schema: Schema | str) -> Schema:
    """A schema, possibly given as JSON text. Raises `InvalidRequest`."""
    if not isinstance(schema, str):
        return schema
    if too_much := excess(schema.encode("utf-8", "replace")):
        raise InvalidRequest(field, too_much)
    try:
        decoded = json.loads(schema)
    except ValueError as error:
        raise InvalidRequest(field, f"is not valid JSON: {error}") from error
    if not isinstance(decoded, (dict, bool)):
        raise InvalidRequest(field, f"is {schema!r:.80}; a schema must be an object, true or false")
    return decoded
