"""How messages are adapted to a chat template, and prompts that continue the last message."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from cppbatch.errors import InvalidRequest
from tests.support.conversations import CALL, CONVERSATIONS, FOUR, SUM, TOOLS, part, template_of

PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
"""Prints content as it is, and any role."""
TYPED = "{% for m in messages %}{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}"
"""Takes only parts."""
ONE = "{{ m.content if m.content is string else m.content | map(attribute='text') | join('+') }}"
EITHER = "{% for m in messages %}" + ONE + "{% endfor %}"
CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<{{ ARGUMENTS }}>{% endfor %}{% endfor %}"
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_parts_are_joined_for_templates_that_take_strings() -> None:
    assert template_of(PLAIN).render([user([part("a"), part("b")])]) == "[user] a\nb\n"
    assert template_of(PLAIN).capabilities.parts == frozenset()


def test_a_system_message_is_part_of_the_next_one_where_the_template_has_no_such_role() -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    system, parts = {"role": "system", "content": "s"}, {"role": "developer", "content": [part("s"), part("t")]}
    assert template_of(refuses + PLAIN).render([system, user("a"), FOUR]) == template_of(PLAIN).render(
        [user("s\na"), FOUR]
    )
    assert template_of(refuses + PLAIN).render([parts, user([part("a")])]) == "[user] s\nt\na\n"
    with pytest.raises(InvalidRequest, match="no"):
        template_of(refuses + PLAIN).render([system])


def test_templates_that_take_parts_get_them() -> None:
    assert template_of(EITHER).render([user([part("a"), part("b")])]) == "a+b"
    assert template_of(EITHER).render([user("ab")]) == "ab"


def test_a_string_is_a_part_for_templates_that_take_only_parts() -> None:
    assert template_of(TYPED).render([user("ab")]) == "ab|"
    assert template_of(TYPED).capabilities.strings == frozenset()


def test_one_role_may_take_parts_where_another_does_not() -> None:
    mixed = template_of(
        "{% for m in messages %}{% if m.role == 'user' %}" + ONE + "{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    assert mixed.capabilities.parts == {"user"}
    assert mixed.render([user([part("a"), part("b")]), {**FOUR, "content": [part("c"), part("d")]}]) == "a+b;c\nd;"


def test_a_developer_message_becomes_a_system_message_if_the_template_lacks_the_role() -> None:
    message = {"role": "developer", "content": "x"}
    assert template_of(PLAIN).render([message]) == "[system] x\n"
    knows = "{% for m in messages %}{{ '!' if m.role == 'developer' else '?' }}{{ m.content }}{% endfor %}"
    assert template_of(knows).render([message]) == "!x"
    refuses = "{% if messages[0].role == 'developer' %}{{ raise_exception('who?') }}{% endif %}"
    assert template_of(refuses + PLAIN).render([message]) == "[system] x\n"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("c.function.arguments | tojson", '<{"city": "Köln"}>'),
        ("c.function.arguments.city", "<Köln>"),
        ("c.function.arguments.items() | map('first') | join", "<city>"),
        ("'' + c.function.arguments", '<{"city": "K\\u00f6ln"}>'),  # as the client wrote it
        ("c.function.arguments", '<{"city": "K\\u00f6ln"}>'),
    ],
)
def test_arguments_are_an_object_or_text_as_the_template_writes_them(written: str, expected: str) -> None:
    source = CALLS.replace("ARGUMENTS", written).replace("m.content", "m.content or ''")
    assert template_of(source).render([CALL]).endswith(expected)


def test_arguments_that_are_not_an_object_stay_as_the_model_wrote_them() -> None:
    template = template_of(CALLS.replace("ARGUMENTS", "c.function.arguments | tojson").replace("m.content", "''"))
    for arguments, expected in (("{not json", '"{not json"'), ("[1]", '"[1]"'), ("", "{}"), ("[" * 50_000, None)):
        message = {**CALL, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}
        text = template.render([message])
        assert text == f"<{expected or chr(34) + arguments + chr(34)}>"


def test_a_lone_surrogate_in_arguments_does_not_get_into_the_prompt() -> None:
    template = template_of(CALLS.replace("ARGUMENTS", "c.function.arguments | tojson").replace("m.content", "''"))
    message = {**CALL, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]}
    template.render([message]).encode()


def test_the_content_of_a_message_with_calls_only_is_null_or_empty_as_the_template_writes_it_right() -> None:
    prints = template_of(CALLS.replace("ARGUMENTS", "c.function.arguments | tojson"))
    asks = template_of(
        "{% for m in messages %}{% if m.content is none %}"
        "{% for c in m.tool_calls %}<{{ c.function.arguments | tojson }}>{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    for content in (None, ""):
        call_only = {**CALL, "content": content}
        assert prints.render([call_only]) == '<{"city": "Köln"}>'
        assert asks.render([call_only]) == '<{"city": "Köln"}>'
    without = {key: value for key, value in CALL.items() if key != "content"}
    assert prints.render([without]) == '<{"city": "Köln"}>'


def test_fields_that_are_null_count_as_absent() -> None:
    source = "{{ messages[0].tool_calls is defined }} {{ messages[0].name is defined }} {{ messages[0].content }}"
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [], "name": None}
    assert template_of(source).render([message]) == "False False "


def test_reasoning_is_found_under_the_names_that_clients_use() -> None:
    source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert template_of(source).render([{**FOUR, name: "hm"}]) == "hmhm"


def test_rendering_leaves_the_clients_messages_alone() -> None:
    conversation = CONVERSATIONS["an unfinished answer"]
    before = repr((conversation, CALL))
    template_of(None).render(conversation.messages, continue_final_message=True)
    template_of(CALLS.replace("ARGUMENTS", "c.function.arguments.city")).render([CALL])
    assert repr((conversation, CALL)) == before


def test_templates_see_the_tools_and_the_clients_variables() -> None:
    source = (
        "{{ tools is none }} {{ documents is none }} {{ enable_thinking }} {{ bos_token }} {{ add_generation_prompt }}"
    )
    assert template_of(source).render([SUM], tools=[], enable_thinking=False) == "True True False <s> True"
    assert template_of(source).render([SUM], tools=TOOLS, add_generation_prompt=False) == "False True False <s> False"


def test_templates_see_llama_servers_variables() -> None:
    now = datetime.datetime.now()
    source = (
        "{{ date_string }}|{{ datetime }}|{{ strftime_now('%d %b %Y') }}|{{ enable_thinking }}|{{ preserve_thinking }}"
    )
    dates = now.strftime("%d %b %Y|%b %d %Y|%d %b %Y")
    assert template_of(source).render([SUM]) == f"{dates}|False|True"
    assert template_of(source + "<think>").render([SUM]) == f"{dates}|True|True<think>"
    assert template_of(source).render([SUM], date_string="now").startswith("now|")
    assert json.loads(template_of("{{ functions }}").render([SUM], tools=TOOLS)) == TOOLS
    assert template_of("{{ functions }}.").render([SUM]) == "."


def test_the_prompt_ends_with_the_unfinished_message() -> None:
    spaced = {"role": "assistant", "content": "It is "}
    chatml, trims = template_of(None), template_of("{% for m in messages %}{{ m.content | trim }};{% endfor %}")
    assert chatml.render([SUM, FOUR], continue_final_message=True).endswith("<|im_start|>assistant\nIt is four.")
    assert chatml.render([SUM, spaced], continue_final_message=True).endswith("<|im_start|>assistant\nIt is ")
    assert trims.render([SUM, spaced], continue_final_message=True).endswith(";It is")


@pytest.mark.parametrize(
    ("source", "messages", "complaint"),
    [
        (PLAIN, [], "requires a last message"),
        (EITHER, [user([])], "requires a last message"),
        ("{{ messages[0].content }}", [SUM, FOUR], "omits a part"),
        ("{% for m in messages %}{{ m.content[:5] }}{% endfor %}", [SUM, FOUR], "omits a part"),
        ("{% for m in messages %}{{ m.content | replace('four', '4') }}{% endfor %}", [SUM, FOUR], "omits a part"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(source: str, messages: list[Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint) as refused:
        template_of(source).render(messages, continue_final_message=True)
    assert refused.value.field == "continue_final_message"


def test_an_empty_message_can_be_continued() -> None:
    empty = {"role": "assistant", "content": ""}
    assert template_of(PLAIN).render([SUM, empty], continue_final_message=True).endswith("[assistant] ")


def test_continuing_and_a_new_turn_are_mutually_exclusive() -> None:
    with pytest.raises(InvalidRequest, match="cannot be combined"):
        template_of(None).render([SUM, FOUR], continue_final_message=True, add_generation_prompt=True)
