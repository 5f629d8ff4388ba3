"""Learns from a chat template how its model writes messages: reasoning, text and tool calls.

Renders messages whose names and values occur nowhere else: the markers are the text between them. llama.cpp derives its
parsers from templates too (docs/autoparser.md of its sources).
"""

from __future__ import annotations

import re

import msgspec

from cppbatch.chat.call_form import CallForm, learn_calls
from cppbatch.chat.template_probe import (
    KEYS,
    NAMES,
    TAG,
    TEXT,
    THOUGHT,
    Probe,
    Render,
    call_of,
    common_start,
    message_of,
    without_last_tag,
)

_TAG_WITH_WORD = re.compile(r"(<[^<>\n]{1,64}>\w+)?<[^<>\n]{1,64}>$")


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
    probe = Probe(render)
    thought, text_begin = _learn_thought(probe)
    calls, call_ending = learn_calls(probe, "".join(thought or ()))
    if calls and calls.prompted:
        text_begin = calls.separator + probe.before_text.rpartition(calls.separator)[2]
    last = str.strip if probe.always_prompts else without_last_tag
    endings = {ending for each in (probe.text_end, call_ending) if 0 < len(ending := last(each)) <= 100}
    return TemplateForm(thought=thought, dropped=tuple(sorted({*filter(None, [text_begin]), *endings})), calls=calls)


def _learn_thought(probe: Probe) -> tuple[tuple[str, str] | None, str]:
    """The text before and after reasoning, and before the text that follows it."""
    before, found, rest = (probe.answer(message_of(content=TEXT, reasoning_content=THOUGHT)) or "").partition(THOUGHT)
    between, has_text, _ = rest.partition(TEXT)
    if not (found and has_text and between.strip()):
        return _thought_before_call(probe), ""
    call = probe.answer(message_of(call_of(0, {KEYS[0]: "x"}), reasoning_content=THOUGHT)) or ""
    after = call.partition(THOUGHT)[2].partition(NAMES[0])[0]
    end = common_start(between, after).strip() or between.strip()
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


def _thought_before_call(probe: Probe) -> tuple[str, str] | None:
    """The tags of a template that only writes reasoning before a call."""
    call = probe.answer(message_of(call_of(0, {KEYS[0]: "x"}), reasoning_content=THOUGHT)) or ""
    before, found, after = call.partition(THOUGHT)
    tags = _TAG_WITH_WORD.search(before.strip()), TAG.match(after.strip())
    return (tags[0][0], tags[1][0]) if found and tags[0] and tags[1] else None
