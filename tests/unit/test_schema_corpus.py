"""Schemas from the wild are compiled, or refused with the keyword and its place; what is generated matches them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from cppbatch import SamplingParams
from cppbatch.engine.sampling.grammar_child import bytes_tokenizer, check
from cppbatch.engine.sampling.structured_output import GrammarCompiler
from cppbatch.errors import InvalidRequest
from cppbatch.generation_schema import generation_schema, simplify
from cppbatch.json_schema import has_finite_instance

_FOLDER = Path(__file__).parent.parent / "support" / "json_schemas"
SUITE: dict[str, Any] = json.loads((_FOLDER / "suite.json").read_text("utf-8"))
GENERATED: dict[str, Any] = json.loads((_FOLDER / "generators.json").read_text("utf-8"))
SCHEMAS = {**{name: group["schema"] for name, group in SUITE.items()}, **GENERATED}

_ENDS = [*b'"]}']
_LONGEST = 1_000


def matches(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def compiled(schema: Any) -> str | None:
    """The definition of its grammar; None: it does not compile."""
    if not has_finite_instance(schema):
        return None
    return check(bytes_tokenizer(), "json_schema", json.dumps(generation_schema(schema))).get("definition")


DEFINITIONS = {name: definition for name, schema in SCHEMAS.items() if (definition := compiled(schema))}


def test_most_schemas_are_compiled() -> None:
    assert len(DEFINITIONS.keys() & GENERATED.keys()) >= 0.94 * len(GENERATED)
    assert len(DEFINITIONS.keys() & SUITE.keys()) >= 0.65 * len(SUITE)


def test_the_others_are_refused_with_the_keyword_and_its_place() -> None:
    compiler = GrammarCompiler(bytes_tokenizer)
    try:
        for name, schema in SCHEMAS.items():
            if name in DEFINITIONS or not isinstance(schema, dict):
                continue
            with pytest.raises(InvalidRequest) as refused:
                compiler.constraint(SamplingParams(json_schema=schema))
            assert refused.value.message.startswith(("#", "no finite JSON")), (name, refused.value.message)
    finally:
        compiler.close()


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
    rng, matcher, text = random.Random(seed), LLMatcher(bytes_tokenizer(), definition), bytearray()
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


def test_a_sampled_answer_matches_its_schema() -> None:
    unfinished = []
    for seed, (name, definition) in enumerate(DEFINITIONS.items()):
        text = random_text(definition, seed)
        if text is None:
            unfinished.append(name)
        else:
            assert matches(SCHEMAS[name], json.loads(text)), (name, text)
    assert len(unfinished) < 0.05 * len(DEFINITIONS), unfinished
