"""LFM2: a list of Python calls, whose strings have Python's quotes or JSON's."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from typing import Any

from cppbatch.chat.escaped_lark import input_grammar
from cppbatch.chat.lark_grammar import LarkGrammar
from cppbatch.chat.output_parser import MalformedToolCall, ToolCallEmitter, ToolParser, ToolSchemas
from cppbatch.chat.scanning import InvalidJson, JsonValueScanner, MarkerFinder, dump_json, parse_json
from cppbatch.chat.schema_types import UnsupportedSchema, object_members, standalone_schema
from cppbatch.chat.tool_formats.tool_format import FUNCTION_NAME, ToolCallFormat, call_arguments

START, END = "<|tool_call_start|>", "<|tool_call_end|>"
OF_TEMPLATES = (START, "<|tool_list_start|>", '"List of tools: ["')
"""Templates that contain one of these are LFM2's, also where they do not render calls."""
_NAME = re.compile(rf"\s*({FUNCTION_NAME.pattern})\s*\(\s*")
_KEY = re.compile(r"\s*(\w{1,256})\s*=\s*")
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'", re.DOTALL)
_WORD = re.compile(r"[\w.+\-]+")
_WORDS = {"True": True, "False": False, "None": None}
_LONGEST_LITERAL = 10_000


class PythonicFormat(ToolCallFormat):
    """`<|tool_call_start|>[get_weather(city="Paris", days=3), ping()]<|tool_call_end|>`.

    A description cannot say it: values are Python's or JSON's, and what ends them depends on their quotes and brackets.
    The arguments are emitted when the list is complete.
    """

    name = "pythonic"
    example = f'{START}[NAME(KEY="VALUE")]{END}'
    markers = (START, END)
    start_markers = (START,)
    writes_calls = True

    def tool_parser(self, start: str, calls: ToolCallEmitter) -> ToolParser:
        return _PythonicParser(calls)

    def write_calls(self, calls: list[dict[str, Any]]) -> str:
        written = []
        for call in calls:
            arguments = ", ".join(f"{key}={dump_json(value)}" for key, value in call_arguments(call).items())
            written.append(f"{call['function']['name']}({arguments})")
        return f"{START}[{', '.join(written)}]{END}"

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        """Returns the grammar of Python calls. Arguments that cannot be enforced one by one are `**{...}`."""
        calls = [self._call_grammar(lark, name, schema) for name, schema in lark.each(tools)]
        repeated = lark.repeat(lark.rule(lark.one_of(calls)), ", ", several=several)
        return f"{lark.literal(START + '[')} {repeated} {lark.literal(']' + END)}"

    def _call_grammar(self, lark: LarkGrammar, name: str, schema: Any) -> str:
        try:
            members = object_members(schema)
            if input_grammar(schema):
                raise UnsupportedSchema
            if not all(re.fullmatch(r"[a-zA-Z_]\w*", key, re.ASCII) for key, *_ in members):
                raise UnsupportedSchema
            members.sort(key=lambda member: not member[2])  # so each optional one has a comma before it
            if members and not members[0][2]:
                raise UnsupportedSchema
            parts, separator = [], ""
            for key, given, required in members:
                value = lark.json(standalone_schema(given, schema))
                argument = f"{lark.literal(f'{separator}{key}=')} {value}"
                parts.append(argument if required else f"({argument})?")
                separator = ", "
        except UnsupportedSchema:
            parts = [lark.literal("**"), lark.json(schema)]
        return " ".join([lark.literal(name + "("), *parts, lark.literal(")")])


class _PythonicParser:
    """Collects the text after the start marker, and parses it at the end marker."""

    def __init__(self, calls: ToolCallEmitter) -> None:
        self._calls = calls
        self._text, self._unread = "", ""
        self._marks = MarkerFinder([START, END])

    def push(self, text: str) -> str | None:
        """Emits the calls at the end marker."""
        before, marker, rest = self._marks.split(self._unread + text)
        self._text, self._unread = self._text + before, rest
        if marker is None:
            return None
        if marker == START:  # calls do not contain calls
            raise MalformedToolCall(self._text + marker + rest)
        self._emit(self._text, self._text + marker + rest)
        return rest

    def close(self) -> None:
        """Emits the calls; the end marker may be missing."""
        text = self._text + self._unread
        self._emit(text, text)

    def _emit(self, text: str, whole: str) -> None:
        try:
            calls = [(name, dump_json(arguments)) for name, arguments in _parse_calls(text)]
            for _, arguments in calls:
                parse_json(arguments)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            raise MalformedToolCall(whole) from None
        for name, arguments in calls:
            self._calls.start(name)
            self._calls.arguments(arguments)


def _parse_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Raises `ValueError` or `SyntaxError` for other text."""
    text = text.strip().removeprefix("[").strip().removesuffix("]")
    calls: list[tuple[str, dict[str, Any]]] = []
    at = 0
    while at < len(text):
        head = _NAME.match(text, at)
        if head is None:
            raise ValueError(text[at:])
        arguments, at = _parse_arguments(text, head.end())
        calls.append((head[1], arguments))
        at = _skip_comma(text, at)
    return calls


def _parse_arguments(text: str, at: int) -> tuple[dict[str, Any], int]:
    """The arguments from behind the bracket on, and where the call ends."""
    arguments: dict[str, Any] = {}
    while not text.startswith(")", at):
        if text.startswith("**{", at):
            value, at = _parse_value(text, at + 2)
            arguments |= dict(value)
        else:
            key = _KEY.match(text, at)
            if key is None:
                raise ValueError(text[at:])
            arguments[key[1]], at = _parse_value(text, key.end())
        at = _skip_comma(text, at)
        if at == len(text):
            raise ValueError("the call is incomplete")
    return arguments, at + 1


def _skip_comma(text: str, at: int) -> int:
    found = re.compile(r"\s*,?\s*").match(text, at)
    return found.end() if found else at


def _parse_value(text: str, at: int) -> tuple[Any, int]:
    """A value of JSON or Python, and its end."""
    with contextlib.suppress(ValueError):
        return json.JSONDecoder().raw_decode(text, at)
    if found := _STRING.match(text, at):
        return ast.literal_eval(found[0].replace("\n", "\\n")), found.end()
    if text[at : at + 1] in ("{", "["):
        try:
            end = JsonValueScanner().push(text[at:])
        except InvalidJson:
            end = None
        end = at + end if end else _end_of_brackets(text, at)
        if end - at > _LONGEST_LITERAL:
            raise ValueError("too long")
        return ast.literal_eval(text[at:end]), end
    word = _WORD.match(text, at)
    if word is None or word[0] not in _WORDS:
        raise ValueError(text[at:])
    return _WORDS[word[0]], word.end()


def _end_of_brackets(text: str, at: int) -> int:
    """The end of a Python list or dictionary."""
    depth, tokens = 0, re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[\[\]{}]", re.DOTALL)
    for token in tokens.finditer(text, at):
        depth += (token[0] in "[{") - (token[0] in "]}")
        if depth == 0:
            return token.end()
    raise ValueError(text[at:])
