"""Schemas from the wild are compiled, or refused with the keyword and its place; what is generated matches them."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from cppbatch import SamplingParams
from cppbatch.engine.grammar.grammar_child import bytes_tokenizer, check
from cppbatch.engine.grammar.structured_output import GrammarCompiler
from cppbatch.errors import InvalidRequest
from cppbatch.generation_schema import generation_schema
from cppbatch.generation_schema.simplify import simplify
from cppbatch.json_schema import find, has_finite_instance

_FOLDER = Path(__file__).parent.parent / "support" / "json_schemas"
SUITE: dict[str, Any] = json.loads((_FOLDER / "suite.json").read_text("utf-8"))
COMPILED = {"suite": 194, "schemars": 132, "go": 160, "dotnet": 258, "typescript": 387, "python": 151, "mcp": 267}
"""The files of schemas, and how many of each compile at least."""

TOKENIZER = bytes_tokenizer()
_ENDS = [*b'"]}']
_LONGEST = 1_000
_TRIES = 5

ANY_PATTERN = {"zod-to-json-schema emoji": r"Python's `re` does not know \p"}
"""Schemas whose patterns the validator of these tests cannot check, and why."""


def validator(name: str, schema: Any) -> Any:
    """The validator of the draft that a schema names or, if it has keywords of an older one, of that."""
    text = json.dumps(schema)
    kind: Any = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    if '"exclusiveMinimum": true' in text or '"exclusiveMaximum": true' in text:
        kind = jsonschema.Draft4Validator  # OpenAPI 3.0; zod-to-json-schema's `openAi` names a newer draft beside it
    elif '"items": [' in text:
        kind = jsonschema.Draft7Validator  # typebox's tuples name no draft
    if name.removesuffix(" named") in ANY_PATTERN:
        kind = jsonschema.validators.extend(kind, {"pattern": lambda *_: None})
    return kind(schema)


def matches(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def compiled(schema: Any) -> str | None:
    """The definition of its grammar; None: it does not compile."""
    if not has_finite_instance(schema):
        return None
    return check(TOKENIZER, "json_schema", json.dumps(generation_schema(schema))).get("definition")


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(lambda: TOKENIZER)
    yield compiler
    compiler.close()


@pytest.mark.parametrize("family", COMPILED)
def test_an_answer_matches_its_schema_or_the_schema_is_refused_with_the_keyword_and_its_place(
    family: str, compiler: GrammarCompiler
) -> None:
    given = json.loads((_FOLDER / f"{family}.json").read_text("utf-8"))
    schemas = {name: each["schema"] if family == "suite" else each for name, each in given.items()}
    schemas = {name: schema for name, schema in schemas.items() if isinstance(schema, dict)}
    n_refused = n_validated = 0
    for name, schema in schemas.items():
        definition = compiled(schema)
        if definition is None:
            n_refused += 1
            with pytest.raises(InvalidRequest) as refused:
                compiler.constraint(SamplingParams(json_schema=schema))
            place, _, keyword = refused.value.message.partition(": ")[0].rpartition("/")
            assert place.startswith("#"), (name, refused.value.message)
            assert keyword in find(schema, place), (name, refused.value.message)
            continue
        seeds = (zlib.crc32(f"{name} {i}".encode()) for i in range(_TRIES))
        text = next((text for seed in seeds if (text := random_text(definition, seed)) is not None), None)
        assert text is not None, name
        error = next(validator(name, schema).iter_errors(json.loads(text)), None)
        assert error is None, (name, text, error.message)
        n_validated += 1
    n_compiled = len(schemas) - n_refused
    print(f"\n{family}: {len(schemas)} schemas, {n_compiled} compiled, {n_refused} refused, {n_validated} validated")
    assert n_validated == n_compiled >= COMPILED[family]


def test_a_simplified_schema_means_the_same() -> None:
    n = 0
    for name, group in SUITE.items():
        simple = simplify(group["schema"])
        for value, is_valid in group["tests"]:
            assert matches(simple, value) == is_valid, (name, value, simple)
            n += 1
    assert n > 900


def test_what_a_closed_schema_allows_matches_the_schema() -> None:
    for name, group in SUITE.items():
        closed = generation_schema(group["schema"])
        for value, is_valid in group["tests"]:
            assert is_valid or not matches(closed, value), (name, value, closed)


def random_text(definition: str, seed: int) -> str | None:
    """A text that the grammar lets through; None: it has not ended."""
    rng, matcher, text = random.Random(seed), LLMatcher(TOKENIZER, definition), bytearray()
    while len(text) < _LONGEST:
        if matcher.is_stopped():
            return text.decode()
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(257) if mask[i >> 3] >> (i & 7) & 1]
        ends = [i for i in allowed if i == 256 or i in _ENDS]
        plain = [i for i in allowed if 32 <= i < 127] or allowed
        token = rng.choice(ends if ends and rng.random() < 0.6 else plain)
        if token == 256:
            return text.decode()
        assert matcher.consume_token(token)
        text.append(token)
    return None
