"""Learns from a chat template how its model writes messages: reasoning, text and tool calls.

Renders messages whose names and values occur nowhere else: the markers are the text between them. llama.cpp derives its
parsers from templates too (docs/autoparser.md of its sources).

Example: in `<tool_call>probe_one\\n<arg_key>probe_ka</arg_key>\\n<arg_value>probe-v00</arg_value>...` the name follows
`<tool_call>`, and each argument has its own tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

Json = dict[str, Any]
Render = Callable[[list[Json], list[Json], bool], str | None]
"""Renders messages and tools, with or without a generation prompt; None: the template refuses them."""

NAME, ID, INDEX, KEY = "\0name\0", "\0id\0", "\0index\0", "\0key\0"
"""In literals: here is the function's name, the call's id, its number in the message, or the argument's key."""
HOLES = re.compile("(\0[a-z]+\0)")

_QUESTION, _TEXT, _THOUGHT = "probe-question", "probe-text", "probe-thought"
_NAMES, _IDS = ("probe_one", "probe_two"), ("probe0001", "probe0002")
_KEYS = ("probe_ka", "probe_kb")
NAMED_ID = "functions.{name}:{index}"  # Kimi's: its templates write no other name
_LONG_ID = "call_probe0001"
_MARKUP = 'probe "quoted" <b>&'
_TYPED: Json = {"integer": 471147, "boolean": True, "object": {"probe_i": 1}, "array": ["probe-i"]}
_TYPED_STARTS = {"integer": "471147", "boolean": "[Tt]rue", "object": r"\{", "array": r"\["}
_TAG = re.compile(r"<[^<>\n]{1,64}>|\[/?[A-Z][A-Z_ ]*\]")
_TAG_WITH_WORD = re.compile(r"(<[^<>\n]{1,64}>\w+)?<[^<>\n]{1,64}>$")


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """How a template writes the calls of a message.

    `begin`, then `open head ARGUMENTS tail close` for each call with `separator` in between, then `end`.
    """

    begin: str
    open: str
    head: str
    """Contains `NAME`, and optionally `ID` or `INDEX`."""
    tail: str
    close: str
    separator: str
    end: str
    is_json: bool
    """Whether a whole call, from `head` to `tail`, is a single JSON object."""
    name_is_key: bool = False
    """Whether that object is `{"name": {arguments}}`."""
    key_open: str = ""
    """Precedes an argument's key; "": the arguments are one JSON object."""
    value_open: dict[str, str] = {}
    """By JSON type, after the key: a template may write the type."""
    value_close: str = ""
    """Optionally with `KEY`."""
    argument_separator: str = ""
    quotes: tuple[str, str] = ("", "")
    """Around a string with markup: CDATA."""
    nested: bool = False
    """Whether objects and arrays are tagged too; array items have the key `item`."""
    several: bool = True
    """Whether a message may have several calls."""
    prompted: bool = False
    """Whether the generation prompt ends with `separator`, so that the first call follows immediately."""
    short_ids: bool = False
    """Whether ids must be nine letters and digits."""
    named_ids: bool = False
    """Whether ids contain the name and the number of the call."""


class TemplateForm(msgspec.Struct, frozen=True, kw_only=True):
    """How a template writes an assistant message."""

    thought: tuple[str, str] | None = None
    """Before and after reasoning; None: not written."""
    dropped: tuple[str, ...] = ()
    """Marks before the text that follows a thought, and after text or calls before the token that ends the turn."""
    calls: CallForm | None = None
    """None: not written, or not in a form that can be described this way."""


def learn(render: Render) -> TemplateForm:
    """Renders about ten short conversations."""
    probe = _Probe(render)
    thought, text_begin = _learn_thought(probe)
    calls, call_ending = _learn_calls(probe, "".join(thought or ()))
    if calls and calls.prompted:
        text_begin = calls.separator + probe.before_text.rpartition(calls.separator)[2]
    last = str.strip if probe.always_prompts else _without_last_tag
    endings = {ending for each in (probe.text_end, call_ending) if 0 < len(ending := last(each)) <= 100}
    return TemplateForm(thought=thought, dropped=tuple(sorted({*filter(None, [text_begin]), *endings})), calls=calls)


class _Probe:
    """Renders messages after a question."""

    def __init__(self, render: Render) -> None:
        self._render = render
        text = self.answer(_message(content=_TEXT)) or ""
        self.before_text, found, self.text_end = text.partition(_TEXT)
        if not found:
            self.before_text = ""
        prompts = [render([{"role": "user", "content": _QUESTION}], [], add) or "" for add in (True, False)]
        self.header = prompts[0].rpartition(_QUESTION)[2]
        self.always_prompts = prompts[0] == prompts[1] and self.text_end.endswith(self.header)
        if self.always_prompts:  # regardless of the argument
            self.text_end = self.text_end.removesuffix(self.header)

    def answer(self, message: Json) -> str | None:
        """The rendering after the question."""
        whole = self._render([{"role": "user", "content": _QUESTION}, message], _TOOLS, False)
        return whole.rpartition(_QUESTION)[2] if whole else None


def _message(*calls: Json, **fields: Any) -> Json:
    return {"role": "assistant", "content": "", **({"tool_calls": list(calls)} if calls else {}), **fields}


def _call(i: int, arguments: Json, call_id: str | None = None) -> Json:
    function = {"name": _NAMES[i], "arguments": arguments}
    return {"id": call_id or _IDS[i], "type": "function", "function": function}


_TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Probes.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": "A word."} for key in _KEYS}
                | {f"probe_k{kind}": {"type": kind, "description": "A value."} for kind in _TYPED},
                "required": [_KEYS[0]],
            },
        },
    }
    for name in _NAMES
]


# --- strings around needles -------------------------------------------------------------------------------------------


def _in_tag(text: str, at: int) -> bool:
    return any(tag.start() < at < tag.end() for tag in _TAG.finditer(text))


def _n_common(a: str, b: str) -> int:
    """How many characters both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _common_start(a: str, b: str) -> str:
    """The longest common start that ends within no tag."""
    n = _n_common(a, b)
    while _in_tag(a, n) or _in_tag(b, n):
        n -= 1
    return a[:n]


def _common_end(a: str, b: str) -> str:
    """The longest common end that begins within no tag."""
    n = _n_common(a[::-1], b[::-1])
    while _in_tag(a, len(a) - n) or _in_tag(b, len(b) - n):
        n -= 1
    return a[len(a) - n :]


def _without_last_tag(text: str) -> str:
    """What is before the last tag, which is the token that ends the turn."""
    tags = list(_TAG.finditer(text))
    return text[: tags[-1].start()].strip() if tags else ""


def _decode_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins there, and its end; (None, at) if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except ValueError:
        return None, at


# --- thoughts ---------------------------------------------------------------------------------------------------------


def _learn_thought(probe: _Probe) -> tuple[tuple[str, str] | None, str]:
    """The text before and after reasoning, and before the text that follows it."""
    before, found, rest = (probe.answer(_message(content=_TEXT, reasoning_content=_THOUGHT)) or "").partition(_THOUGHT)
    between, has_text, _ = rest.partition(_TEXT)
    if not (found and has_text and between.strip()):
        return _thought_before_call(probe), ""
    call = probe.answer(_message(_call(0, {_KEYS[0]: "x"}), reasoning_content=_THOUGHT)) or ""
    after = call.partition(_THOUGHT)[2].partition(_NAMES[0])[0]
    end = _common_start(between, after).strip() or between.strip()
    role = probe.header[probe.header.rfind("<") :].strip()
    if role and role in end[1:]:  # another message of the assistant follows
        end = end[: end.index(role, 1)] + role
    added = probe.header.strip().removeprefix(before.strip()).strip()
    if probe.header.strip().startswith(before.strip()) and added and not added.startswith(end):
        start = added  # the generation prompt begins the thought otherwise than the rendering
    else:
        tag = _TAG_WITH_WORD.search(before.strip())
        start = tag[0] if tag else ""
        if before.startswith(probe.header) and before.removeprefix(probe.header).strip().endswith(start):
            start = before.removeprefix(probe.header).strip() or start
    if not start or probe.before_text.strip().endswith(start):
        return None, ""
    return (start, end), between.strip().removeprefix(end).strip()


def _thought_before_call(probe: _Probe) -> tuple[str, str] | None:
    """The tags of a template that only writes reasoning before a call."""
    call = probe.answer(_message(_call(0, {_KEYS[0]: "x"}), reasoning_content=_THOUGHT)) or ""
    before, found, after = call.partition(_THOUGHT)
    tags = _TAG_WITH_WORD.search(before.strip()), _TAG.match(after.strip())
    return (tags[0][0], tags[1][0]) if found and tags[0] and tags[1] else None


# --- calls ------------------------------------------------------------------------------------------------------------


class _Span(msgspec.Struct, frozen=True):
    """A call in a rendering: from its JSON object, name or id to its end."""

    start: int
    end: int
    head: str
    tail: str
    is_json: bool = False
    name_is_key: bool = False
    after_name: str = ""
    """Up to the first key; where arguments are tagged."""
    value_open: str = ""
    after_value: str = ""
    """From a value to the next key."""


def _learn_calls(probe: _Probe, empty_thought: str) -> tuple[CallForm | None, str]:
    """The form of calls, and what is written after the last one."""
    ids, named_ids = list(_IDS), False
    section = _section(probe, ids, empty_thought)
    if section is None:
        ids, named_ids = [NAMED_ID.format(name=name, index=i) for i, name in enumerate(_NAMES)], True
        section = _section(probe, ids, empty_thought)
    if section is None:
        return None, ""
    spans: list[_Span] = []
    for name, id_ in zip(_NAMES, ids, strict=True):
        start = spans[-1].end if spans else 0
        if (at := section.find(name, start)) < 0:
            break
        span = _json_span(section, name, id_, at) or _span(section, name, id_, at, start)
        if span is None:
            return None, ""
        spans.append(span)
    form = _form(section, spans, probe)
    if form is None:
        return None, ""
    long_id = _message(_call(0, {_KEYS[0]: "x"}, _LONG_ID))
    short_ids = not named_ids and probe.answer(long_id) is None
    last = section[spans[-1].end :].removesuffix(probe.header if probe.always_prompts else "")
    return msgspec.structs.replace(form, short_ids=short_ids, named_ids=named_ids), _common_end(last, probe.text_end)


def _section(probe: _Probe, ids: list[str], empty_thought: str) -> str | None:
    """A message without its header, with two calls if the template writes two; None: it does not write any."""
    calls = [_call(i, {key: f"probe-v{i}{j}" for j, key in enumerate(_KEYS)}, id_) for i, id_ in enumerate(ids)]
    for n in (2, 1):
        text = probe.answer(_message(*calls[:n])) or ""
        if all(name in text for name in _NAMES[:n]):
            section = text[len(_common_start(text, probe.before_text)) :].removeprefix(empty_thought)
            named = section.startswith(_NAMES[0]) and text.startswith(probe.header) and not probe.always_prompts
            return text[len(probe.header) :] if named else section  # text has a name before it too: of its recipient
    return None


def _with_holes(text: str, name: str, id_: str) -> str:
    return text.replace(name, NAME).replace(id_, ID)


def _json_span(text: str, name: str, id_: str, at: int) -> _Span | None:
    """A call that is a JSON object; the name is at `at`."""
    found = None
    for start in range(at, -1, -1):
        if text[start] != "{":
            continue
        value, end = _decode_at(text, start)
        if not isinstance(value, dict) or end < at:
            continue
        if sum(each in text[start:end] for each in _NAMES) > 1:
            break
        found = start, end, value
    if found is None:
        return None
    start, end, value = found
    arguments = next((i for i in range(at, end) if text[i] == "{" and _has_arguments(_decode_at(text, i)[0])), None)
    if arguments is None:
        return None
    arguments_end = _decode_at(text, arguments)[1]
    return _Span(
        start,
        end,
        _with_holes(text[start:arguments], name, id_),
        _with_holes(text[arguments_end:end], name, id_),
        is_json=True,
        name_is_key=name in value,
    )


def _has_arguments(value: Any) -> bool:
    return isinstance(value, dict) and _KEYS[0] in value


def _span(text: str, name: str, id_: str, at: int, start: int) -> _Span | None:
    """A call whose name is outside JSON."""
    id_at = text.find(id_, start, at)
    first = id_at if id_at >= 0 else at
    key = text.find(_KEYS[0], at)
    if key < 0:
        return None
    brace = next((i for i in range(at, key) if text[i] == "{" and _has_arguments(_decode_at(text, i)[0])), None)
    if brace is not None:
        return _Span(first, _decode_at(text, brace)[1], _with_holes(text[first:brace], name, id_), "")
    found = re.compile(rf"{_KEYS[0]}(.*?)(probe-v\d0)(.*?){_KEYS[1]}(.*?)(probe-v\d1)", re.DOTALL).match(text, key)
    if found is None:
        return None
    head = _with_holes(text[first:key], name, id_)
    return _Span(
        first, found.end(), head, "", after_name=head, value_open=found[1], after_value=found[3].replace(_KEYS[0], KEY)
    )


def _form(section: str, spans: list[_Span], probe: _Probe) -> CallForm | None:
    first = spans[0]
    rest = section[spans[-1].end :].replace(_KEYS[1], KEY)
    rest = rest.removesuffix(probe.header if probe.always_prompts else "")
    rest = rest[: len(rest) - len(_common_end(rest, probe.text_end))]
    before, between = section[: first.start], ""
    opening, closing = before, rest
    if len(spans) > 1:
        between = section[first.end : spans[1].start].replace(_KEYS[1], KEY)
        opening = _common_end(before, between)
        between = between[: len(between) - len(opening)]
        closing = _common_start(between, rest)
    begin, end = before[: len(before) - len(opening)], rest[len(closing) :]
    tagged: Json = {}
    head = _common_head(spans)
    if first.after_value:
        found = _learn_tags(first, closing, probe)
        if found is None:
            return None
        tagged, head = found, head.removesuffix(found["key_open"])
        closing = closing[len(tagged["value_close"]) :]
    separator = between[len(tagged.get("value_close", "")) + len(closing) :]
    prompted = bool(separator) and not before and probe.header.endswith(separator)
    form = CallForm(
        begin=begin,
        open=opening,
        head=head,
        tail=first.tail,
        close=closing,
        separator=separator,
        end=end if begin else "",  # else it is what ends the turn
        is_json=first.is_json,
        name_is_key=first.name_is_key,
        several=len(spans) > 1,
        prompted=prompted,
        **tagged,
    )
    marked = form.begin.strip() or form.open.strip() or form.prompted
    return form if marked or form.is_json else None


def _common_head(spans: list[_Span]) -> str:
    """The head of the first call, with a placeholder where only the number of the second one differs."""
    heads = [span.head for span in spans]
    if len(set(heads)) == 1:
        return heads[0]
    numbered = {re.sub(r"\d+", INDEX, head) for head in heads}
    return numbered.pop() if len(numbered) == 1 else heads[0]


def _learn_tags(first: _Span, closing: str, probe: _Probe) -> Json | None:
    """The text around keys and values."""
    key_open = _common_end(first.after_name, first.after_value)
    value_close = _common_start(first.after_value[: len(first.after_value) - len(key_open)], closing)
    if not key_open.strip() or not value_close.strip():
        return None
    value_open = {"string": first.value_open}
    arguments = {f"probe_k{kind}": value for kind, value in _TYPED.items()}
    typed = probe.answer(_message(_call(0, arguments))) or ""
    for kind, start in _TYPED_STARTS.items():
        found = re.search(rf"{re.escape(key_open)}probe_k{kind}([^\0]{{0,80}}?){start}", typed)
        value_open[kind] = found[1] if found else first.value_open
    nested = f"probe_kobject{first.value_open}{key_open}" in typed
    if nested:
        value_open |= {"object": first.value_open, "array": first.value_open}
    before, found_markup, after = (probe.answer(_message(_call(0, {_KEYS[0]: _MARKUP}))) or "").partition(_MARKUP)
    quote = before.rpartition(f"{_KEYS[0]}{first.value_open}")[2] if found_markup else ""
    quotes = (quote, after[: after.index(value_close)]) if quote and value_close in after else ("", "")
    return {
        "key_open": key_open,
        "value_open": value_open,
        "value_close": value_close,
        "argument_separator": first.after_value[len(value_close) : len(first.after_value) - len(key_open)],
        "quotes": quotes,
        "nested": nested,
    }
