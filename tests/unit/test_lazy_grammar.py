"""Calls with tool_choice auto: text is free up to the marker, and the call matches its schema."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from cppbatch.chat.chat_format import PreparedChat
from cppbatch.chat.lark_grammar import MAX_TOOL_CALLS, LazyGrammar
from cppbatch.engine.grammar.structured_output import Constraint, GrammarCompiler, GrammarMasks
from cppbatch.engine.params import SamplingParams
from cppbatch.errors import InvalidRequest
from tests.support.chat_families import PING, TEMPLATES, message, turn
from tests.support.schemas import fault
from tests.unit.test_chat_grammar import ENDS, FUNCTIONS, SCHEMA_OF, Bytes, vocabulary


def of_own_accord(family: str, tools: list[Any] = FUNCTIONS, **given: Any) -> PreparedChat:
    return turn(family, tools=tools, mode="auto", token_ids=vocabulary(family)[0].ids, **given)


LAZY = [family for family in TEMPLATES if of_own_accord(family).params.get("lazy_grammar")]


@dataclass
class Writer:
    """A random model's text, with the grammar of its calls."""

    vocab: Bytes
    constraint: Constraint

    def __post_init__(self) -> None:
        self.tokens: list[int] = []

    def write(self, *tokens: int) -> None:
        for token in tokens:
            assert self.constraint.accept(token)
            self.tokens.append(token)

    def write_calls(self, seed: int, more_ends: Sequence[str] = ()) -> None:
        rng, matcher = random.Random(seed), self.constraint.matcher
        ends = [list(end.encode()) for end in [*ENDS, *more_ends]]
        while not self.constraint.is_done:
            assert self.constraint.is_active
            assert len(self.tokens) < 20_000, self.text[-200:]
            end = rng.choice(ends)
            mask = matcher.compute_bitmask()
            if rng.random() < 0.3 and matcher.validate_tokens(end) == len(end):
                self.write(*end)
            elif mask[self.vocab.eos_token_id >> 3] >> (self.vocab.eos_token_id & 7) & 1:
                return
            else:
                self.write(rng.choice([i for i in range(len(self.vocab.tokens)) if mask[i >> 3] >> (i & 7) & 1]))

    @property
    def text(self) -> str:
        return self.vocab.text(self.tokens)


def writer(family: str, lazy: LazyGrammar) -> Writer:
    return writer_of(vocabulary(family), lazy)


def writer_of(known: tuple[Bytes, LLTokenizer], lazy: LazyGrammar) -> Writer:
    vocab, tokenizer = known
    matcher = LLMatcher(tokenizer, grammar_from("grammar", lazy.grammar), log_level=0)
    return Writer(vocab, Constraint(matcher, allow_forced=True, on_limit=lambda: None, lazy=lazy))


def test_the_families_that_mark_calls_by_a_token_have_one() -> None:
    assert set(TEMPLATES) - set(LAZY) == {"generic", "llama3", "harmony"}


@pytest.mark.parametrize("family", LAZY)
def test_calls_after_the_marker_match_their_schemas_and_text_before_it_is_free(family: str) -> None:
    for seed, function in enumerate(FUNCTIONS):
        its = of_own_accord(family, [function])
        lazy = its.params["lazy_grammar"]
        new = writer(family, msgspec.structs.replace(lazy, in_thought=False))
        new.write(*b'Call {"name": } [1] ```json')
        assert not new.constraint.is_active
        assert new.constraint.forced_tokens() == []
        new.write(lazy.start)
        new.write_calls(seed)
        read = message(its, [new.text])
        assert read.calls, new.text
        assert all(fault(call.arguments, SCHEMA_OF[call.name]) is None for call in read.calls), new.text


@pytest.mark.parametrize("family", LAZY)
def test_a_marker_within_a_thought_starts_no_call(family: str) -> None:
    lazy = of_own_accord(family).params["lazy_grammar"]
    if lazy.thought is None:
        assert not lazy.in_thought
        return
    new = writer(family, lazy)
    new.write(*([] if lazy.in_thought else [lazy.thought[0]]), *b"perhaps ", lazy.start, *b"nothing")
    assert not new.constraint.is_active
    new.write(lazy.thought[1], lazy.start)
    assert new.constraint.is_active


@pytest.mark.parametrize("family", LAZY)
def test_where_it_cannot_be_followed_the_text_is_free_again(family: str) -> None:
    """Tokens that were given, as by a budget, or a draft that was sampled without the grammar."""
    lazy = of_own_accord(family).params["lazy_grammar"]
    new = writer(family, msgspec.structs.replace(lazy, in_thought=False))
    new.write(lazy.start, *b"?? what", lazy.start, *b"more")
    assert (new.constraint.is_active, new.constraint.is_done, new.constraint.error) == (False, False, None)


@pytest.mark.parametrize("family", LAZY)
def test_a_sequence_that_is_computed_again_is_where_it_was(family: str) -> None:
    lazy = of_own_accord(family).params["lazy_grammar"]
    new = writer(family, msgspec.structs.replace(lazy, in_thought=False))
    new.write(*b"So:", lazy.start)
    mask = new.constraint.matcher.compute_bitmask()
    new.constraint.rebuild(new.tokens)
    assert new.constraint.is_active
    assert new.constraint.matcher.compute_bitmask() == mask
    new.constraint.rebuild(new.tokens[:2])
    assert not new.constraint.is_active


LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
}
BAD_SCHEMAS: Any = {
    "an unknown keyword": ({"type": "array", "uniqueItems": True}, "uniqueItems is not supported"),
    "a regular expression": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
}


@pytest.mark.parametrize(("schema", "said"), BAD_SCHEMAS.values(), ids=BAD_SCHEMAS)
@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("family", LAZY)
def test_a_tool_whose_schema_does_not_compile_takes_any_object_and_the_others_keep_theirs(
    family: str, mode: Any, schema: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    bad = {"type": "function", "function": {"name": "bad_one", "parameters": parameters}}
    asked = turn(family, tools=[bad, LOOK], mode=mode, token_ids=vocabulary(family)[0].ids)
    params = SamplingParams(**{k: v for k, v in asked.params.items() if k in ("grammar", "lazy_grammar")})
    compiler = GrammarCompiler(lambda: vocabulary(family)[1])
    try:
        for _ in range(2):
            assert compiler.constraint(params), caplog.text
    finally:
        compiler.close()
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("tool bad_one: ")
    assert said in line
    definition = (params.lazy_grammar.grammar if params.lazy_grammar else params.grammar) or ""
    assert len([each for each in definition.split("\n") if "// arguments of look" in each]) >= 1


def test_the_arguments_of_the_others_match_their_schemas() -> None:
    tool = {"type": "function", "function": {"name": "bad", "parameters": {"not": {"required": ["x"]}}}}
    lazy = of_own_accord("hermes", [tool, LOOK]).params["lazy_grammar"]
    compiler = GrammarCompiler(lambda: vocabulary("hermes")[1])
    try:
        for name, arguments, is_allowed in (
            ("bad", '{"x": [1]}', True),
            ("bad", "5", False),
            ("look", '{"n": 1}', True),
            ("look", '{"n": "1"}', False),
            ("look", '{"m": 1}', False),
        ):
            constraint = compiler.constraint(SamplingParams(lazy_grammar=lazy))
            assert constraint
            assert constraint.accept(lazy.start)
            text = [*f'\n{{"name": "{name}", "arguments": {arguments}}}'.encode()]
            assert (constraint.matcher.try_consume_tokens(text) == len(text)) == is_allowed
    finally:
        compiler.close()


def test_a_strict_tool_whose_schema_does_not_compile_is_refused() -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tool = {"type": "function", "function": {"name": "bad", "parameters": parameters, "strict": True}}
    compiler = GrammarCompiler(lambda: vocabulary("hermes")[1])
    try:
        with pytest.raises(InvalidRequest, match="#/properties/a/not: not is not supported"):
            compiler.constraint(SamplingParams(grammar=of_own_accord("hermes", [tool, LOOK]).params["grammar"]))
    finally:
        compiler.close()


def test_where_the_request_bans_what_must_follow_the_text_is_free_again() -> None:
    """As with `ignore_eos`, where the end of a call is an end token: else no token could be sampled."""
    lazy = of_own_accord("hermes", [PING]).params["lazy_grammar"]
    new = writer("hermes", lazy)
    new.write(lazy.start)
    n_tokens = len(new.vocab.tokens)
    row = np.zeros(n_tokens, np.float32)
    row[ord("\n")] = -np.inf  # what must follow the marker
    assert GrammarMasks(n_tokens).apply([(new.constraint, row)]) == [None]
    assert not new.constraint.is_active
    assert np.isfinite(row).sum() == n_tokens - 1


def test_more_calls_than_may_be_required_can_be_written() -> None:
    lazy = of_own_accord("hermes", [PING]).params["lazy_grammar"]
    new = writer("hermes", lazy)
    end = vocabulary("hermes")[0].ids["</tool_call>"]
    call = [lazy.start, *b'\n{"name": "ping", "arguments": ', *b"{}", *b"}\n", end]
    new.write(*call)
    for _ in range(2 * MAX_TOOL_CALLS):
        new.write(*call)
        assert new.constraint.is_active
