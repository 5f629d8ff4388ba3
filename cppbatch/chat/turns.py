"""Arranging a conversation so that a chat template writes all of it.

Templates refuse or omit what their authors did not expect: a second system message, two messages of the user in a row,
text beside a call. What a template does is learned by rendering short conversations, and only what it does not write is
arranged differently.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

Message = dict[str, Any]
Render = Callable[[list[Message]], str | None]
"""Renders messages with calls of the functions `probe_tool`; None: the template refuses them."""

CallText = Literal["whole", "split", "split before thought", "result"]
"""Where the text of a message with calls goes: it stays there, to a message before it (with the reasoning, or without
it), or to the start of the first result."""

_SYSTEM = ("system", "developer")
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_WORDS = re.compile(r"probe-[a-z]+\d?")
_BETWEEN = "\n\n"
_ANY_PLACE = frozenset((is_only, is_last) for is_only in (True, False) for is_last in (True, False))


class TurnRules(msgspec.Struct, frozen=True, kw_only=True):
    """Which conversations a template writes as they are."""

    systems: bool
    """Several system messages at the start."""
    later_systems: frozenset[tuple[bool, bool]]
    """System messages after the start: whether one is the only one, and whether it is the last message."""
    users: bool
    """Consecutive messages of the user."""
    assistants: bool
    """Consecutive messages of the assistant."""
    assistant_first: bool
    """A conversation that the assistant starts."""
    user_after_result: bool
    """A message of the user after the result of a call."""
    calls: bool
    """Several calls in a message."""
    text_with_call: CallText
    """For a message with text and calls."""
    thought_with_call: CallText
    """For a message with reasoning, text and calls."""

    @property
    def changed(self) -> tuple[str, ...]:
        """The names of the rules by which conversations are changed."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name) not in (True, "whole", _ANY_PLACE))


def learn_turns(render: Render, *, developer: bool) -> TurnRules:
    """Renders about thirty short conversations. `developer`: whether the template has this role too."""

    def writes(*messages: Message) -> bool:
        """Whether all words of the messages are in the prompt."""
        prompt = render([*messages]) or ""
        return all(word in prompt for word in _WORDS.findall(repr(messages)))

    def say(role: str, word: str) -> Message:
        return {"role": role, "content": f"probe-{word}"}

    def call(i: int, **fields: Any) -> Message:
        function = {"name": "probe_tool", "arguments": {"probe_key": f"probe-value{i}"}}
        return {
            "role": "assistant",
            "content": None,
            **fields,
            "tool_calls": [{"id": _ids(i), "type": "function", "function": function}],
        }

    def result(i: int) -> Message:
        return {"role": "tool", "tool_call_id": _ids(i), "name": "probe_tool", "content": f"probe-result{i}"}

    def variant(variants: tuple[CallText, ...], **fields: Any) -> CallText:
        """The first one with which the message is written, also in a longer conversation, where templates may omit
        reasoning. Reasoning counts if it is written without the text."""
        after = [say("assistant", "answer"), say("user", "next")]
        plain = render([ask, call(0, **{**fields, "content": None}), result(0)]) or ""
        words = ["probe-ask", "probe-text", "probe-value0", "probe-result0"]
        more = [*words, "probe-thought"] if "probe-thought" in plain else words
        for each in variants:
            talk = _place_call_texts([ask, call(0, **fields), result(0)], each, each)
            prompt, later = render(talk) or "", render([*talk, *after]) or ""
            if all(word in prompt for word in more) and all(word in later for word in words):
                return each
        return "whole"

    roles = ("system", "developer") if developer else ("system",)
    ask, answer, ask_again = say("user", "ask"), say("assistant", "answer"), say("user", "again")
    both = {**call(0), "tool_calls": [*call(0)["tool_calls"], *call(1)["tool_calls"]]}
    samples: dict[str, list[list[Message]]] = {
        "systems": [[say(a, "first"), say(b, "second"), ask] for a in roles for b in roles],
        "users": [[ask, ask_again]],
        "assistants": [[ask, answer, say("assistant", "more"), ask_again]],
        "assistant_first": [[answer, ask]],
        "user_after_result": [[ask, call(0), result(0), ask_again]],
        "calls": [[ask, both, result(0), result(1)]],
    }
    later: dict[tuple[bool, bool], list[list[Message]]] = {}
    for is_only, is_last in _ANY_PLACE:
        first = [] if is_only else [say("system", "first")]
        for role in roles:
            end = [ask_again, say(role, "later")] if is_last else [say(role, "later"), ask_again]
            later.setdefault((is_only, is_last), []).append([*first, ask, answer, *end])

    def writes_all(talks: list[list[Message]], by: TurnRules | None = None) -> bool:
        return all(writes(*(arrange(talk, by) if by else talk)) for talk in talks)

    rules = TurnRules(
        **{name: writes_all(talks) for name, talks in samples.items()},
        later_systems=frozenset(place for place, talks in later.items() if writes_all(talks)),
        text_with_call=variant(("whole", "split", "result"), content="probe-text"),
        thought_with_call=variant(
            ("whole", "split", "split before thought", "result"),
            content="probe-text",
            reasoning_content="probe-thought",
        ),
    )
    # Where the template does not write the arranged conversation either, it stays as it is.
    return msgspec.structs.replace(
        rules,
        **{name: getattr(rules, name) or not writes_all(talks, rules) for name, talks in samples.items()},
        later_systems=frozenset(
            place for place, talks in later.items() if place in rules.later_systems or not writes_all(talks, rules)
        ),
    )


def _ids(i: int) -> str:
    return f"probe000{i}"  # nine letters and digits, as some templates require


def arrange(messages: list[Message], rules: TurnRules) -> list[Message]:
    """The conversation in the form that the template writes. Returns new messages where they differ."""
    arranged = messages
    if not rules.systems:
        arranged = _merge_first_systems(arranged)
    arranged = _move_later_systems(arranged, rules.later_systems)
    merged: list[Message] = []
    for message in arranged:
        before, role = merged[-1]["role"] if merged else "", message["role"]
        if role == "assistant" and before in ("", *_SYSTEM) and not rules.assistant_first:
            merged.append({"role": "user", "content": ""})
        is_repeated = (role == before == "user" and not rules.users) or (
            role == before == "assistant" and not rules.assistants
        )
        if is_repeated or (before == "tool" and role == "user" and not rules.user_after_result):
            merged[-1] = _merge(merged[-1], message)
        else:
            merged.append(message)
    arranged = merged if rules.calls else _separate_calls(merged)
    return _place_call_texts(arranged, rules.text_with_call, rules.thought_with_call)


def with_ids(messages: list[Message], new_id: Callable[[str, str, int], str]) -> list[Message]:
    """The conversation with other ids of calls, also in their results. `new_id`: makes one of the id, the function's
    name, and the number of the call."""
    ids: dict[str, str] = {}
    changed, n_calls = [], 0
    for message in messages:
        if calls := message.get("tool_calls"):
            renamed = []
            for call in calls:
                given = call.get("id") or f"{n_calls}"
                ids[given] = new_id(given, call["function"]["name"], n_calls)
                renamed.append({**call, "id": ids[given]})
                n_calls += 1
            changed.append({**message, "tool_calls": renamed})
        elif message["role"] == "tool" and (known := ids.get(message.get("tool_call_id") or "")):
            changed.append({**message, "tool_call_id": known})
        else:
            changed.append(message)
    return changed


def short_id(given: str, _name: str = "", _i: int = 0) -> str:
    """An id of nine letters and digits; always the same for a given one."""
    return given if _SHORT_ID.fullmatch(given) else hashlib.sha256(given.encode(errors="replace")).hexdigest()[:9]


def _merge(first: Message, second: Message) -> Message:
    """Both as one message, with the role of the first one."""
    merged = {**second, **first, "content": _join(first.get("content"), second.get("content"))}
    reasoning = [each["reasoning_content"] for each in (first, second) if each.get("reasoning_content")]
    if len(reasoning) > 1:
        merged["reasoning_content"] = _BETWEEN.join(reasoning)
    if first.get("tool_calls") and second.get("tool_calls"):
        merged["tool_calls"] = [*first["tool_calls"], *second["tool_calls"]]
    return merged


def _join(first: Any, second: Any) -> Any:
    """Two contents: text, or lists of parts."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return first + _BETWEEN + second
    return [*_as_parts(first), *_as_parts(second)]


def _as_parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _merge_first_systems(messages: list[Message]) -> list[Message]:
    n = next((i for i, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages))
    if n < 2:
        return messages
    first = messages[0]
    for message in messages[1:n]:
        first = _merge(first, message)
    return [first, *messages[n:]]


def _move_later_systems(messages: list[Message], kept: frozenset[tuple[bool, bool]]) -> list[Message]:
    """System messages after the start become part of the next message of the user, or one of their own, except those
    that are `kept`."""
    systems = [i for i, message in enumerate(messages) if message["role"] in _SYSTEM]
    later = [i for i in systems if i >= next((n for n, at in enumerate(systems) if n != at), len(systems))]
    if all((len(systems) == 1, i == len(messages) - 1) in kept for i in later):
        return messages
    moved: list[Message] = []
    waiting: list[Message] = []  # their texts, as messages of the user
    for i, message in enumerate(messages):
        if i in later:
            waiting.append({"role": "user", "content": message.get("content")})
        elif message["role"] == "user":
            texts = [*(each["content"] for each in waiting), message.get("content")]
            moved.append({**message, "content": functools.reduce(_join, texts)})
            waiting.clear()
        else:
            if message["role"] == "assistant":
                moved += waiting
                waiting.clear()
            moved.append(message)
    return [*moved, *waiting]


def _separate_calls(messages: list[Message]) -> list[Message]:
    """A message for each call, followed by its results."""
    separate: list[Message] = []
    for message, results in _with_results(messages):
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            separate += [message, *results]
            continue
        left = list(results)
        for i, call in enumerate(calls):
            first = message if i == 0 else {"role": "assistant", "content": None}
            own = [result for result in left if result.get("tool_call_id") == call.get("id")]
            left = [result for result in left if result not in own]
            separate += [{**first, "tool_calls": [call]}, *own]
        separate += left
    return separate


def _place_call_texts(messages: list[Message], with_call: CallText, with_thought: CallText) -> list[Message]:
    """Puts the texts of messages with calls where the template writes them."""
    if with_call == with_thought == "whole":
        return messages
    placed: list[Message] = []
    for message, results in _with_results(messages):
        thought, text = message.get("reasoning_content"), message.get("content")
        where = with_thought if thought else with_call
        if not message.get("tool_calls") or not text or where == "whole":
            placed += [message, *results]
            continue
        call, said = {**message, "content": None}, {"role": "assistant", "content": text}
        if where == "result" and results:
            first = {**results[0], "content": _join(text, results[0].get("content"))}
            placed += [call, first, *results[1:]]
        elif where == "split" and thought:
            call = {key: value for key, value in call.items() if key != "reasoning_content"}
            placed += [{**said, "reasoning_content": thought}, call, *results]
        else:
            placed += [said, call, *results]
    return placed


def _with_results(messages: list[Message]) -> Iterator[tuple[Message, list[Message]]]:
    """Each message with the results that follow it."""
    at = 0
    while at < len(messages):
        end = at + 1
        while end < len(messages) and messages[at].get("tool_calls") and messages[end]["role"] == "tool":
            end += 1
        yield messages[at], messages[at + 1 : end]
        at = end
