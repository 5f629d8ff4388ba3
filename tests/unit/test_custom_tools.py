"""Custom tools: the model writes a call with the argument `input`, a text that obeys the tool's grammar."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from cppbatch.chat.escaped_lark import UnsupportedGrammar, escape_lark
from cppbatch.chat.output_parser import ArgumentsDelta, AssistantMessage, ToolCallStart
from cppbatch.errors import InvalidRequest
from tests.support.chat_families import PING, TEMPLATES, pieces, turn
from tests.support.randomised import cases
from tests.unit.test_chat_grammar import random_text

Json = dict[str, Any]

SUMS = r"""
start: sum  // such as 1 + 20
sum: INT (SP "+" SP INT)*
SP: " "
%import common.INT
"""
LINES = 'start: LINE ("\\n" LINE)+ # two "lines"\nLINE: /[a-c"\\\\]{1,3}/'


def custom(syntax: str | None = None, definition: str = "", name: str = "run") -> Json:
    tool: Json = {"name": name, "description": "Runs it."}
    if syntax:
        tool["format"] = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": tool}


def read(its: Any, text: str) -> AssistantMessage:
    whole = AssistantMessage()
    whole.add(pieces(its, text))
    return whole


# --- grammars -------------------------------------------------------------------------------------------------------

GRAMMARS = {
    "sums": ("lark", SUMS, r"\d+( \+ \d+)*"),
    "lines": ("lark", LINES, r'[a-c"\\]{1,3}(\n[a-c"\\]{1,3})+'),
    "a regex": ("regex", r'[a-z]{1,9}(\n|")?', r'[a-z]{1,9}(\n|")?'),
}


@cases(ring=6, nightly=20, soak=100)
@pytest.mark.parametrize("mode", ["required", "auto"])
@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("family", TEMPLATES)
def test_a_calls_text_obeys_the_grammar(family: str, grammar: str, mode: str, n_cases: int) -> None:
    syntax, definition, regex = GRAMMARS[grammar]
    its = turn(family, tools=[custom(syntax, definition), PING], mode=mode, parallel=False)
    n_calls = 0
    for seed in range(n_cases):
        whole = read(its, random_text(family, its.params["grammar"], seed))
        for call in whole.calls:
            n_calls += call.name == "run"
            assert not call.is_custom or re.fullmatch(regex, call.arguments), call
    assert n_calls or mode == "auto"


@pytest.mark.parametrize("family", TEMPLATES)
def test_without_a_forced_call_text_is_still_allowed(family: str) -> None:
    its = turn(family, tools=[custom("lark", SUMS)])
    assert any(read(its, random_text(family, its.params["grammar"], seed, longest=20_000)).text for seed in range(20))


def test_without_a_grammar_nothing_is_enforced_unless_a_call_is() -> None:
    assert "grammar" not in turn("hermes", tools=[custom()]).params
    assert "grammar" in turn("hermes", tools=[custom()], mode="required").params


ESCAPED: dict[str, tuple[str, list[str], list[str]]] = {
    "strings": ('start: "say \\"hi\\"\\n" WORD\n%import common.WORD', ['say "hi"\nab'], ["say hi\nab", 'say "hi"\n1']),
    "any case": ('start: "abc"i "." /(?i)x|y/', ["aBc.X", "ABC.y"], ["abx.X", "aBc.z"]),
    "classes": (r'start: /[^x]/ /[\w\-"]+;/ /\d{2,3}/', ['"a-";12', '\n"1;123'], ['xa-";12', "aa;1"]),
    "any character": ("start: /a.c/s /./", ["a\ncx", 'a"c\\'], ["a\nc\n"]),
    "ranges": ('start: "a".."c" /\\//', ["a/", "c/"], ["d/", "a"]),
    "white space": ("start: A WS B\nA: /a+/\nB: A{2}\n%import common.WS", ["a \n\taa", "aa\raa"], ["aaa", "a a"]),
    "ignored": ("start: A A\nA: /[ab]/\n%ignore / +/", ["a b", "ab"], ["a", "a c"]),
    "nested rules": ('start: "(" start ")" | "\\\\"', ["(\\)", "((\\))"], ["(\\", "()"]),
}


@pytest.mark.parametrize("name", ESCAPED)
def test_the_escaped_grammar_allows_the_same_texts_in_a_json_string(name: str) -> None:
    source, right, wrong = ESCAPED[name]
    in_string = f'start: "\\"" text "\\""\ntext: %lark {{\n{escape_lark(source)}\n}}'
    for text in right + wrong:
        assert allows(source, text) == (text in right), text
        assert allows(in_string, json.dumps(text)) == (text in right), text


def allows(lark: str, text: str) -> bool:
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar_from("lark", lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("start: %json {}", "%json"),
        ("start: <|end|>", "<|end|>"),
        ("start: @other", "@other"),
        ("start: /a(?=b)/", "not supported in a grammar"),
        ("start: /(/", "not a valid regular expression"),
        ("start: X\n%import common.CPP_COMMENT", "CPP_COMMENT"),
        ('start: "\\q"', "escapes"),
    ],
)
def test_an_unsupported_grammar_is_refused(source: str, said: str) -> None:
    with pytest.raises(UnsupportedGrammar) as refused:
        escape_lark(source)
    assert said in str(refused.value)
    with pytest.raises(InvalidRequest) as invalid:
        turn("hermes", tools=[custom("lark", source)])
    assert invalid.value.field == "tools[0].custom.format.grammar.definition"


@pytest.mark.parametrize("source", ["<" * 100_000, '"' + '\\"' * 50_000, "/" + "x" * 100_000, "x" * 200_000])
def test_a_grammar_is_refused_in_linear_time(source: str) -> None:
    began = time.thread_time()
    with pytest.raises(UnsupportedGrammar, match=r"is not closed by|the limit is"):
        escape_lark(source)
    assert time.thread_time() - began < 1  # it was quadratic: 7 s for 32 KB


def test_dots_take_no_time_each() -> None:
    began = time.thread_time()
    escape_lark(f"start: /{'.' * 20_000}/")
    assert time.thread_time() - began < 2  # each took 0.2 ms


def test_other_formats_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[0\].custom.format.grammar.syntax: is 'gbnf'"):
        turn("hermes", tools=[custom("gbnf", "root ::= x")])
    with pytest.raises(InvalidRequest, match=r"tools\[0\].custom.format.type: is 'image'"):
        turn("hermes", tools=[{"type": "custom", "custom": {"name": "x", "format": {"type": "image"}}}])


# --- reading calls --------------------------------------------------------------------------------------------------

TEXT = 'SELECT "a\\b"\n\u00e9\U0001f600'


@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_text_comes_in_pieces_without_its_escapes(ascii: bool, size: int) -> None:
    arguments = json.dumps({"input": TEXT}, ensure_ascii=ascii)
    written = f'<tool_call>\n{{"name": "run", "arguments": {arguments}}}\n</tool_call>'
    deltas = pieces(
        turn("hermes", tools=[custom(), PING]), [written[i : i + size] for i in range(0, len(written), size)]
    )
    start, *more = deltas
    assert isinstance(start, ToolCallStart)
    assert (start.name, start.is_custom) == ("run", True)
    assert "".join(delta.text for delta in more if isinstance(delta, ArgumentsDelta)) == TEXT
    assert len(more) > 3 or size > 1


def test_functions_beside_it_are_called_as_ever() -> None:
    calls = ['{"name": "ping", "arguments": {}}', '{"name": "run", "arguments": {"input": "x"}}']
    whole = read(turn("hermes", tools=[custom(), PING]), "".join(f"<tool_call>\n{c}\n</tool_call>\n" for c in calls))
    assert [(call.name, call.arguments, call.is_custom) for call in whole.calls] == [
        ("ping", "{}", False),
        ("run", "x", True),
    ]


def test_other_arguments_than_the_input_are_its_text() -> None:
    for arguments in ('{"query": "x"}', '{"input": 5}', "{}"):
        written = f'<tool_call>\n{{"name": "run", "arguments": {arguments}}}\n</tool_call>'
        (call,) = read(turn("hermes", tools=[custom()]), written).calls
        assert call.arguments == arguments


def test_the_model_sees_a_function_with_an_input() -> None:
    prompt = turn("hermes", tools=[custom("regex", "[ab]+")]).prompt
    assert '"run"' in prompt
    assert "Runs it." in prompt
    assert '"input"' in prompt
    assert "[ab]+" in prompt
