"""Tool calls in the form that was learned from a chat template: one parser and one grammar for all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cppbatch.chat.call_form import HOLES, ID, INDEX, KEY, NAME, CallForm
from cppbatch.chat.lark_grammar import LarkGrammar
from cppbatch.chat.output_parser import MalformedToolCall, OutputParser, ToolCallEmitter, ToolParser, ToolSchemas
from cppbatch.chat.reasoning import ReasoningState, ReasoningTags
from cppbatch.chat.scanning import InvalidJson, JsonValueScanner, MarkerFinder, dump_json
from cppbatch.chat.schema_types import (
    UnsupportedSchema,
    coerce_to_json,
    enum_values,
    json_type_of,
    json_types,
    object_members,
    resolve_ref,
    schema_variants,
    standalone_schema,
    string_lengths,
)
from cppbatch.chat.tool_formats.json_calls import JsonCallsParser
from cppbatch.chat.tool_formats.tool_format import FUNCTION_NAME, ToolCallFormat, call_arguments, random_alphanumerics

_TAG = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z][A-Z_]*\]")
_HOLE_TEXTS: dict[str, re.Pattern[str]] = {
    ID: re.compile(r"[\w.:\-]{0,128}"),
    INDEX: re.compile(r"\d{0,3}"),
    NAME: FUNCTION_NAME,
}
_LONGEST_KEY = 256
_SHORT_ID = 9
_DEEPEST = 64


class LearnedFormat(ToolCallFormat):
    """Calls as `form` describes them. A missing or doubled tag between calls is read over.

    The grammar demands JSON arguments for schemas that cannot be enforced between tags.
    """

    writes_calls = True

    def __init__(self, form: CallForm) -> None:
        self.form = form
        self.name = "json" if form.is_json else "tagged" if form.key_open else "named"
        self.parallel_calls = form.several
        self.example = self.write_calls([{"function": {"name": "NAME", "arguments": {"KEY": "VALUE"}}}])
        self._outer, self._inner = _outer_and_inner(form)
        starts = [self._outer[0] or self._inner[0]]
        if self._inner[0][:1] in "<[" and not self._inner[0].startswith(starts[0]):
            starts.append(self._inner[0])  # models sometimes forget the first
        self.start_markers = tuple(filter(None, starts))
        literals = [form.begin, form.open, form.head, form.tail, form.close, form.end, form.key_open, form.value_close]
        found = (tag for each in [*literals, *form.value_open.values()] for tag in _TAG.findall(each))
        self.markers = tuple(dict.fromkeys(found))

    def output_parser(
        self,
        prompt: str,
        tools: ToolSchemas,
        tags: ReasoningTags | None,
        state: ReasoningState,
        dropped: tuple[str, ...] = (),
    ) -> OutputParser:
        """Returns a parser that has read a separator at the end of the prompt."""
        parser = super().output_parser(prompt, tools, tags, state, dropped)
        if self.form.prompted and prompt.endswith(self.form.separator):
            parser.push(self.form.separator)
        return parser

    def new_call_id(self) -> str:
        """Returns a short id if the template requires it."""
        return random_alphanumerics(_SHORT_ID) if self.form.short_ids else super().new_call_id()

    def tool_parser(self, start: str, calls: ToolCallEmitter) -> ToolParser:
        if self.form.is_json:
            in_list = self._outer[0].endswith("[")  # a marker that is not a tag includes the bracket
            end = self._outer[1]
            parser = JsonCallsParser(calls, known_only=False, end_marker=end, name_is_key=self.form.name_is_key)
            if in_list:
                parser.push("[")
            return parser
        opened = start == self._inner[0]
        return _Parser(self.form, calls, inner=self._inner, end=self._outer[1], opened=opened)

    def write_calls(self, calls: list[dict[str, Any]]) -> str:
        written = [self._write_call(call, i) for i, call in enumerate(calls)]
        return self.form.begin + self.form.separator.join(written) + self.form.end

    def _write_call(self, call: dict[str, Any], index: int) -> str:
        form, holes = self.form, {NAME: call["function"]["name"], ID: call.get("id") or "", INDEX: str(index)}
        head, tail = (
            HOLES.sub(lambda hole: holes[hole[0]], each) for each in (form.open + form.head, form.tail + form.close)
        )
        return head + self._write_arguments(call_arguments(call)) + tail

    def _write_arguments(self, arguments: dict[str, Any]) -> str:
        form = self.form
        if not form.key_open:
            return dump_json(arguments)
        parts = []
        for key, value in arguments.items():
            kind = json_type_of(value)
            text = value if kind == "string" else dump_json(value)
            opening = form.key_open + key + form.value_open.get(kind, form.value_open["integer"])
            parts.append(opening + text + form.value_close.replace(KEY, key))
        return form.argument_separator.join(parts)

    # --- the grammar --------------------------------------------------------------------------------------------------

    def calls_grammar(self, lark: LarkGrammar, tools: ToolSchemas, *, several: bool) -> str:
        form = self.form
        calls = lark.one_of([self._call_grammar(lark, name, schema) for name, schema in lark.each(tools)])
        repeated = lark.repeat(lark.rule(calls), form.separator, several=several)
        parts = [lark.literal(form.begin), repeated, lark.literal(form.end)]
        return " ".join(filter(None, parts))

    def _call_grammar(self, lark: LarkGrammar, name: str, schema: Any) -> str:
        form = self.form
        try:
            arguments = self._tagged_grammar(lark, schema) if form.key_open else lark.json(schema)
        except UnsupportedSchema:
            arguments = lark.json(schema)
        before = self._literal(lark, form.open + form.head, name)
        return " ".join(filter(None, [before, arguments, self._literal(lark, form.tail + form.close, name)]))

    def _literal(self, lark: LarkGrammar, text: str, name: str) -> str:
        """A literal whose holes are filled with the name, or with an id or a number."""
        id_ = f"/[a-zA-Z0-9]{{{_SHORT_ID}}}/" if self.form.short_ids else "/[a-zA-Z0-9_]{1,40}/"
        holes = {ID: id_, INDEX: "/[0-9]{1,3}/"}
        parts = HOLES.split(text.replace(NAME, name))
        return " ".join(lark.terminal(holes[part]) if part in holes else lark.literal(part) for part in parts if part)

    def _tagged_grammar(self, lark: LarkGrammar, schema: Any) -> str:
        """The expression of the arguments. Raises `UnsupportedSchema`."""
        form, parts = self.form, []
        for i, (key, given, required) in enumerate(object_members(schema)):
            if not key or re.search(r"[<>\"\n]", key) or len(key) > _LONGEST_KEY:
                raise UnsupportedSchema
            before = form.argument_separator * (i > 0) + form.key_open + key
            argument = self._value_grammar(lark, before, form.value_close.replace(KEY, key), given, schema)
            parts.append(argument if required else f"({argument})?")
        return " ".join(parts)

    def _value_grammar(self, lark: LarkGrammar, before: str, close: str, given: Any, root: Any) -> str:
        """The expression of an argument: its key, its value and what closes it. Raises `UnsupportedSchema`."""
        marker, opens = close.strip(), self.form.value_open
        types, schema = json_types(given, root), resolve_ref(given, root)
        is_typed = len(set(opens.values())) > 1
        opening = lark.literal(before + opens["string"])
        if types == {"string", "null"} and not is_typed:  # the word null is null, any other text is a string
            strings = [part for part in schema_variants(given, root) if part.get("type") != "null"]
            if any((string_lengths(part), enum_values(part)) != ((0, None), None) for part in strings):
                raise UnsupportedSchema
            return f"{opening} {lark.text_until(marker, ending=close)}"
        if types == {"string"}:
            if (listed := enum_values(schema)) is not None:
                if any(not isinstance(one, str) or one != one.strip() or marker in one for one in listed):
                    raise UnsupportedSchema
                return f"{opening} {lark.one_of([lark.literal(one) for one in listed])} {lark.literal(close)}"
            least, most = string_lengths(schema)
            return f"{opening} {lark.text_until(marker, ending=close, min_length=least, max_length=most)}"
        if not types or "string" in types:  # without quotes a string looks like other values
            raise UnsupportedSchema
        kinds = {opens.get("integer" if kind == "number" else kind) for kind in types}
        if len(kinds) > 1 or None in kinds:
            raise UnsupportedSchema
        value = lark.json(standalone_schema(given, root))
        return f"{lark.literal(before + str(kinds.pop()))} {value} {lark.literal(close)}"


def _outer_and_inner(form: CallForm) -> tuple[tuple[str, str], tuple[str, str]]:
    """The markers around all calls and around each, without white space.

    A form without a section may still have two tags before the name, as in `<tool_call><function=name>`: the first one
    begins a section, in which there may be several calls.
    """
    if form.is_json:
        begin, end = (form.begin + form.open).strip(), (form.close + form.end).strip()
        tag = begin.rstrip("[ \n")
        if tag[-1:] in ">]" or not tag:
            return (tag, end.lstrip("] \n")), ("", "")
        return (begin, end.lstrip("] \n")), ("", "")
    opening, closing = (form.separator if form.prompted else form.open).strip(), form.close.strip()
    if form.begin.strip():
        return (form.begin.strip(), form.end.strip()), (opening, closing)
    first, last = _TAG.match(opening), closing.rfind("<")
    if first and opening[first.end() :].strip() and last > 0:
        return (first[0], closing[last:]), (opening[first.end() :].strip(), closing[:last].strip())
    return ("", ""), (opening, closing)


class _Parser:
    """Parses the text after the marker of a section, or after that of a call if `opened`."""

    def __init__(
        self, form: CallForm, calls: ToolCallEmitter, *, inner: tuple[str, str], end: str, opened: bool
    ) -> None:
        self._form, self._calls = form, calls
        self._open, self._close = inner
        self._end = end
        self._json_end = end or self._close
        self._separator = "" if form.prompted else form.separator.strip()
        self._starts = MarkerFinder(dict.fromkeys(filter(None, [self._open, end])))
        self._key_open = form.key_open.strip()
        self._value_opens = MarkerFinder(each.strip() for each in form.value_open.values())
        self._strings_open = form.value_open.get("string", "").strip()
        parts = HOLES.split(form.head)
        self._head = [part if part in _HOLE_TEXTS else part.strip() for part in parts if part.strip()]
        self._unread = ""
        self._json: JsonCallsParser | None = None
        self._parts: list[str] = list(self._head)  # of the head, that are not read yet
        self._name, self._id = "", ""
        self._schema: Any = {}  # of the arguments
        self._value_schema: Any = {}
        self._types: frozenset[str] = frozenset()
        self._n_arguments = self._n_calls = 0
        self._value = ""  # what was read of a value that is not a string
        self._scanner: JsonValueScanner | None = None
        self._at_value_start = False
        self._value_end = MarkerFinder([])
        self._step: Callable[[], bool] = self._in_head if opened else self._between_calls
        self._rest: str | None = None

    def push(self, text: str) -> str | None:
        if self._json:
            return self._json.push(text)
        self._unread += text
        while self._rest is None and self._step():
            pass
        if self._json:
            return self._json.push(self._unread)
        return self._rest

    def close(self) -> None:
        """Leaves an incomplete call as it was emitted."""

    def _read_json(self) -> bool:
        """Instead of a call, a model may write `{"name": ..., "arguments": ...}`."""
        self._json = JsonCallsParser(self._calls, known_only=False, end_marker=self._json_end)
        return False

    def _between_calls(self) -> bool:
        text = self._unread = self._unread.lstrip()
        if self._n_calls and self._separator and text.startswith(self._separator):
            text = self._unread = text[len(self._separator) :].lstrip()
        if not text or (self._n_calls and self._separator.startswith(text)):
            return False
        if text[0] in "{[" and not self._n_calls and not self._open.startswith(text[0]):
            return self._read_json()
        marker = self._starts.at_start(text)
        if marker is None and self._n_calls:
            self._rest = text
        elif marker is None:
            raise MalformedToolCall(text)
        elif marker == self._open:
            self._unread, self._parts, self._step = text[len(marker) :], list(self._head), self._in_head
        elif marker:
            self._rest = text[len(marker) :]
        return bool(marker)

    # --- before the arguments -----------------------------------------------------------------------------------------

    def _in_head(self) -> bool:
        if not self._parts:
            self._start()
            return True
        self._unread = self._unread.lstrip()
        if not self._unread:
            return False
        part = self._parts[0]
        return self._in_hole(part) if part in _HOLE_TEXTS else self._in_literal(part.replace(NAME, self._name))

    def _in_literal(self, part: str) -> bool:
        text = self._unread
        if text.startswith(part):
            self._unread = text[len(part) :]
            self._parts.pop(0)
        elif part.startswith(text):
            return False
        elif self._parts[1:2] in ([ID], [INDEX]) and self._name:  # an id may be missing
            del self._parts[:2]
        elif text[0] == "{" and self._name and not self._key_open:
            self._parts.clear()
        else:
            raise MalformedToolCall(text)
        return True

    def _in_hole(self, hole: str) -> bool:
        text = self._unread
        if hole == NAME and text[0] == "{" and not self._n_calls:
            return self._read_json()
        found = _HOLE_TEXTS[hole].match(text)
        if found is None:
            raise MalformedToolCall(text)
        if found.end() == len(text):  # it may continue
            return False
        if hole == NAME:
            self._name = found[0]
        if hole == ID:
            self._id = found[0]
        self._unread = text[found.end() :]
        self._parts.pop(0)
        return True

    def _start(self) -> None:
        if self._form.prompted and self._name not in self._calls.tools:  # nothing but its place marks it as a call
            raise MalformedToolCall(self._open + self._name + self._unread)
        self._schema = self._calls.tools.get(self._name) or {}
        form, id_ = self._form, self._id or None
        if form.named_ids:
            id_ = f"functions.{self._name}:{self._calls.count}"
        if form.short_ids and id_ and len(id_) != _SHORT_ID:
            id_ = None
        self._calls.start(self._name, id_)
        self._n_arguments, self._n_calls = 0, self._n_calls + 1
        self._name = self._id = ""
        self._scanner = None
        self._step = self._in_arguments

    # --- the arguments ------------------------------------------------------------------------------------------------

    def _in_arguments(self) -> bool:
        """Before JSON arguments, or before or after a tagged one."""
        text = self._unread = self._unread.lstrip()
        if self._n_arguments:
            text = self._unread = text.removeprefix(self._form.argument_separator.strip()).lstrip()
        if not text or any(marker != text and marker.startswith(text) for marker in (self._key_open, self._close)):
            return False
        is_close = bool(self._close) and text.startswith(self._close)
        if text[0] == "{" and not self._n_arguments:
            self._scanner, self._step = JsonValueScanner(), self._in_json
        elif self._key_open and text.startswith(self._key_open) and not is_close:
            self._unread, self._step = text[len(self._key_open) :], self._in_key
        else:  # any other text ends the arguments
            self._calls.arguments("}" if self._n_arguments else "{}")
            self._step = self._after_call
        return True

    def _in_json(self) -> bool:
        assert self._scanner
        try:
            end = self._scanner.push(self._unread)
        except InvalidJson as error:
            self._calls.arguments(self._unread[: error.at])
            raise MalformedToolCall(self._unread[error.at :]) from None
        self._calls.arguments(self._unread[:end])
        self._unread = "" if end is None else self._unread[end:]
        if end is not None:
            self._step = self._after_call
        return end is not None

    def _in_key(self) -> bool:
        before, marker, rest = self._value_opens.split(self._unread)
        key = before.strip()
        if len(before) > _LONGEST_KEY or "\n" in key:
            raise MalformedToolCall(self._unread)
        if marker is None:
            return False
        properties = self._schema.get("properties") or {}
        self._value_schema = properties.get(key, {})
        self._types = json_types(self._value_schema, self._schema)
        if len({each.strip() for each in self._form.value_open.values()}) > 1:  # the form has the type
            is_string = marker == self._strings_open
            self._types = frozenset({"string"}) if is_string else self._types - {"string"}
        self._calls.arguments(f"{', ' if self._n_arguments else '{'}{dump_json(key)}: ")
        self._calls.arguments('"' if self._types == {"string"} else "")
        self._n_arguments += 1
        self._unread, self._value, self._at_value_start = rest, "", True
        self._scanner = None if "string" in self._types else JsonValueScanner()
        self._value_end = MarkerFinder([self._form.value_close.replace(KEY, key).strip()])
        self._step = self._in_value
        return True

    def _skip_json(self) -> bool:
        """Reads an object or array to its end, since its strings may contain tags. False: more text is needed."""
        if self._scanner is None:
            return True
        text = self._unread if self._value else self._unread.lstrip()
        if not text:
            return False
        if not self._value and text[0] not in "{[":
            self._scanner = None
            return True
        try:
            end = self._scanner.push(text)
        except InvalidJson as error:  # perhaps a Python literal
            end = error.at
        self._value, self._unread = self._value + text[:end], "" if end is None else text[end:]
        self._scanner = None if end is not None else self._scanner
        return end is not None

    def _in_value(self) -> bool:
        if self._at_value_start and self._unread:
            quote, closing_quote = self._form.quotes
            if quote and self._unread.startswith(quote):
                self._unread = self._unread[len(quote) :]
                self._value_end = MarkerFinder([closing_quote + marker for marker in self._value_end.markers])
            elif quote.startswith(self._unread) and quote:
                return False
            else:
                self._unread = self._unread.removeprefix("\n")
            self._at_value_start = False
        if not self._skip_json():
            return False
        before, marker, rest = self._value_end.split(self._unread)
        held = "\n" if before.endswith("\n") else ""  # may be the one before the end tag
        before = before.removesuffix(held)
        if self._types == {"string"}:
            self._calls.arguments(dump_json(before)[1:-1])
        else:
            self._value += before
        if marker is None:
            self._unread = held + rest
            return False
        value = self._value
        if self._form.nested:
            value = _from_tags(value, self._form, self._value_schema, self._schema)
        self._calls.arguments('"' if self._types == {"string"} else coerce_to_json(value, self._types))
        self._unread, self._step = rest, self._in_arguments
        return True

    def _after_call(self) -> bool:
        text = self._unread = self._unread.lstrip()
        if not text and self._close:
            return False
        if self._close and self._close != text and self._close.startswith(text):
            return False
        self._unread = text.removeprefix(self._close)
        self._step = self._between_calls
        return True


def _from_tags(text: str, form: CallForm, schema: Any, root: Any, depth: int = 0) -> str:
    """A value whose objects and arrays are tagged, as JSON text; any other value, and what is nested deeper than
    `_DEEPEST`, as it is."""
    if depth > _DEEPEST or not text.lstrip().startswith(form.key_open):
        return text
    key_open, (before_key, after_key) = re.escape(form.key_open), form.value_close.split(KEY)
    opening = re.compile(rf"\s*{key_open}([^<>]{{1,256}}?){re.escape(form.value_open['string'])}")
    members, at = [], 0
    while found := opening.match(text, at):
        close = before_key + found[1] + after_key
        again = f"{form.key_open}{found[1]}{form.value_open['string']}"
        n_open, at = 1, found.end()
        while n_open:
            end = text.find(close, at)
            if end < 0:
                return text
            n_open += text.count(again, at, end) - 1
            at = end + len(close)
        inner = _member_schema(schema, root, found[1])
        value = _from_tags(text[found.end() : end], form, inner, root, depth + 1)
        members.append((found[1], coerce_to_json(value, json_types(inner, root))))
    if all(key == "item" for key, _ in members):
        return f"[{', '.join(value for _, value in members)}]"
    return f"{{{', '.join(f'{dump_json(key)}: {value}' for key, value in members)}}}"


def _member_schema(schema: Any, root: Any, key: str) -> Any:
    """The schema of an object's member, or of the items of an array."""
    known = resolve_ref(schema, root)
    if not isinstance(known, dict):
        return {}
    properties = known.get("properties")
    return known.get("items") or (properties.get(key) if isinstance(properties, dict) else None) or {}
