"""The form in which a chat template writes tool calls, learned from renderings of calls.

Example: in `<tool_call>probe_one\\n<arg_key>probe_ka</arg_key>\\n<arg_value>probe-v00</arg_value>...` the name follows
`<tool_call>`, and each argument has its own tags.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from cppbatch.chat.template_probe import (
    IDS,
    KEYS,
    NAMES,
    TYPED,
    Json,
    Probe,
    call_of,
    common_end,
    common_start,
    message_of,
)

NAME, ID, INDEX, KEY = "\0name\0", "\0id\0", "\0index\0", "\0key\0"
"""In literals: here is the function's name, the call's id, its number in the message, or the argument's key."""
HOLES = re.compile("(\0[a-z]+\0)")

NAMED_ID = "functions.{name}:{index}"  # Kimi's: its templates write no other name
_LONG_ID = "call_probe0001"
_MARKUP = 'probe "quoted" <b>&'
_TYPED_STARTS = {"integer": "471147", "boolean": "[Tt]rue", "object": r"\{", "array": r"\["}


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


def learn_calls(probe: Probe, empty_thought: str) -> tuple[CallForm | None, str]:
    """The form of calls, and what is written after the last one."""
    ids, named_ids = list(IDS), False
    section = _section(probe, ids, empty_thought)
    if section is None:
        ids, named_ids = [NAMED_ID.format(name=name, index=i) for i, name in enumerate(NAMES)], True
        section = _section(probe, ids, empty_thought)
    if section is None:
        return None, ""
    spans: list[_Span] = []
    for name, id_ in zip(NAMES, ids, strict=True):
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
    long_id = message_of(call_of(0, {KEYS[0]: "x"}, _LONG_ID))
    short_ids = not named_ids and probe.answer(long_id) is None
    last = section[spans[-1].end :].removesuffix(probe.header if probe.always_prompts else "")
    return msgspec.structs.replace(form, short_ids=short_ids, named_ids=named_ids), common_end(last, probe.text_end)


def _section(probe: Probe, ids: list[str], empty_thought: str) -> str | None:
    """A message without its header, with two calls if the template writes two; None: it does not write any."""
    calls = [call_of(i, {key: f"probe-v{i}{j}" for j, key in enumerate(KEYS)}, id_) for i, id_ in enumerate(ids)]
    for n in (2, 1):
        text = probe.answer(message_of(*calls[:n])) or ""
        if all(name in text for name in NAMES[:n]):
            section = text[len(common_start(text, probe.before_text)) :].removeprefix(empty_thought)
            named = section.startswith(NAMES[0]) and text.startswith(probe.header) and not probe.always_prompts
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
        if sum(each in text[start:end] for each in NAMES) > 1:
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


def _decode_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins there, and its end; (None, at) if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except ValueError:
        return None, at


def _has_arguments(value: Any) -> bool:
    return isinstance(value, dict) and KEYS[0] in value


def _span(text: str, name: str, id_: str, at: int, start: int) -> _Span | None:
    """A call whose name is outside JSON."""
    id_at = text.find(id_, start, at)
    first = id_at if id_at >= 0 else at
    key = text.find(KEYS[0], at)
    if key < 0:
        return None
    brace = next((i for i in range(at, key) if text[i] == "{" and _has_arguments(_decode_at(text, i)[0])), None)
    if brace is not None:
        return _Span(first, _decode_at(text, brace)[1], _with_holes(text[first:brace], name, id_), "")
    found = re.compile(rf"{KEYS[0]}(.*?)(probe-v\d0)(.*?){KEYS[1]}(.*?)(probe-v\d1)", re.DOTALL).match(text, key)
    if found is None:
        return None
    head = _with_holes(text[first:key], name, id_)
    return _Span(
        first, found.end(), head, "", after_name=head, value_open=found[1], after_value=found[3].replace(KEYS[0], KEY)
    )


def _form(section: str, spans: list[_Span], probe: Probe) -> CallForm | None:
    first = spans[0]
    rest = section[spans[-1].end :].replace(KEYS[1], KEY)
    rest = rest.removesuffix(probe.header if probe.always_prompts else "")
    rest = rest[: len(rest) - len(common_end(rest, probe.text_end))]
    before, between = section[: first.start], ""
    opening, closing = before, rest
    if len(spans) > 1:
        between = section[first.end : spans[1].start].replace(KEYS[1], KEY)
        opening = common_end(before, between)
        between = between[: len(between) - len(opening)]
        closing = common_start(between, rest)
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


def _learn_tags(first: _Span, closing: str, probe: Probe) -> Json | None:
    """The text around keys and values."""
    key_open = common_end(first.after_name, first.after_value)
    value_close = common_start(first.after_value[: len(first.after_value) - len(key_open)], closing)
    if not key_open.strip() or not value_close.strip():
        return None
    value_open = {"string": first.value_open}
    arguments = {f"probe_k{kind}": value for kind, value in TYPED.items()}
    typed = probe.answer(message_of(call_of(0, arguments))) or ""
    for kind, start in _TYPED_STARTS.items():
        found = re.search(rf"{re.escape(key_open)}probe_k{kind}([^\0]{{0,80}}?){start}", typed)
        value_open[kind] = found[1] if found else first.value_open
    nested = f"probe_kobject{first.value_open}{key_open}" in typed
    if nested:
        value_open |= {"object": first.value_open, "array": first.value_open}
    before, found_markup, after = (probe.answer(message_of(call_of(0, {KEYS[0]: _MARKUP}))) or "").partition(_MARKUP)
    quote = before.rpartition(f"{KEYS[0]}{first.value_open}")[2] if found_markup else ""
    quotes = (quote, after[: after.index(value_close)]) if quote and value_close in after else ("", "")
    return {
        "key_open": key_open,
        "value_open": value_open,
        "value_close": value_close,
        "argument_separator": first.after_value[len(value_close) : len(first.after_value) - len(key_open)],
        "quotes": quotes,
        "nested": nested,
    }
