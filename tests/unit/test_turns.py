"""Conversations that a chat template refuses, or of which it omits something, are arranged so that it writes them."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from cppbatch.chat.template import ChatTemplate

Json = dict[str, Any]

ALTERNATING = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{%- set ns = namespace(n=0) %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.n = ns.n + 1 %}{% endif %}
{%- if m.role == 'user' %}[INST]{{ system ~ '|' if system and loop.last }}{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[RESULT]{{ m.tool_call_id }}:{{ m.content }}[/RESULT]
{%- elif m.tool_calls %}{% for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids must have nine characters') }}{% endif -%}
[CALLS]{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- endfor %}</s>
{%- elif m.role == 'assistant' %}{{ m.content }}</s>
{%- else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"""
"""As in Mistral's templates: roles alternate, the first system message is written, text beside calls is omitted."""
FREE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls %}({{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}
{%- endfor %}"""
ONE_SYSTEM = """{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"""
NO_TEXT_AND_THOUGHT = """{% for m in messages %}<{{ m.role }}>
{%- if m.tool_calls and m.content and m.reasoning_content %}{{ raise_exception('both') }}{% endif %}
{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}
{%- for call in m.tool_calls %}({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}
{%- endfor %}"""
"""As in gpt-oss's template."""


def say(role: str, content: str | None, **more: Any) -> Json:
    return {"role": role, "content": content, **more}


def call(call_id: str, name: str = "look") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": '{"a": "b"}'}}


def result(call_id: str, text: str) -> Json:
    return say("tool", text, tool_call_id=call_id)


def prompt(source: str, *messages: Json) -> str:
    return ChatTemplate(source, bos="", eos="").render([*messages], add_generation_prompt=False)


ASK, ANSWER, AGAIN = say("user", "Hi."), say("assistant", "Hello."), say("user", "And?")


def test_system_messages_at_the_start_are_one_where_the_template_writes_one() -> None:
    both = [say("system", "Be brief."), say("developer", "Be kind."), ASK]
    assert prompt(ONE_SYSTEM, *both) == "Be brief.\n\nBe kind.<user>Hi."
    assert prompt(FREE, *both) == "<system>Be brief.<system>Be kind.<user>Hi."


def test_a_later_system_message_is_part_of_the_next_message_of_the_user() -> None:
    later = [say("system", "Be brief."), ASK, ANSWER, say("system", "Now in French."), AGAIN]
    assert prompt(ONE_SYSTEM, *later) == "Be brief.<user>Hi.<assistant>Hello.<user>Now in French.\n\nAnd?"
    assert prompt(FREE, *later).endswith("<system>Now in French.<user>And?")
    assert prompt(ONE_SYSTEM, ASK, say("system", "In French.")) == "<user>Hi.<user>In French."
    assert prompt(ALTERNATING, ASK, ANSWER, AGAIN, say("system", "In French.")).endswith(
        "[INST]And?\n\nIn French.[/INST]"
    )


def test_turns_of_one_role_are_merged_where_roles_must_alternate() -> None:
    assert prompt(ALTERNATING, ASK, AGAIN) == "[INST]Hi.\n\nAnd?[/INST]"
    assert prompt(ALTERNATING, ASK, ANSWER, ANSWER, AGAIN) == "[INST]Hi.[/INST]Hello.\n\nHello.</s>[INST]And?[/INST]"
    assert prompt(ALTERNATING, ANSWER, AGAIN) == "[INST][/INST]Hello.</s>[INST]And?[/INST]"
    assert prompt(FREE, ASK, AGAIN) == "<user>Hi.<user>And?"


def test_the_users_message_after_a_result_is_part_of_it_where_it_cannot_follow() -> None:
    talk = [ASK, say("assistant", None, tool_calls=[call("abcdef123")]), result("abcdef123", "Sunny."), AGAIN]
    assert prompt(ALTERNATING, *talk).endswith("[RESULT]abcdef123:Sunny.\n\nAnd?[/RESULT]")
    assert prompt(FREE, *talk).endswith("<tool>Sunny.<user>And?")


def test_text_beside_a_call_is_written_where_the_template_writes_it() -> None:
    talk = [ASK, say("assistant", "I look.", tool_calls=[call("abcdef123")]), result("abcdef123", "Sunny.")]
    assert prompt(ALTERNATING, *talk).endswith("[RESULT]abcdef123:I look.\n\nSunny.[/RESULT]")
    assert prompt(FREE, *talk).endswith('<assistant>I look.(abcdef123 look {"a": "b"})<tool>Sunny.')
    talk[1]["reasoning_content"] = "Hm."
    assert (
        prompt(NO_TEXT_AND_THOUGHT, *talk) == '<user>Hi.<assistant>(Hm.)I look.<assistant>(look {"a": "b"})<tool>Sunny.'
    )


def test_ids_of_other_servers_are_made_short_where_the_template_demands_it_and_stay_paired() -> None:
    talk = [ASK, say("assistant", None, tool_calls=[call("call_1"), call("call_2")])]
    text = prompt(ALTERNATING, *talk, result("call_1", "Sunny."), result("call_2", "Noon."))
    ids = re.findall(r'"id": "(\w{9})"', text)
    assert len({*ids}) == 2
    assert text.endswith(f"[RESULT]{ids[0]}:Sunny.[/RESULT][RESULT]{ids[1]}:Noon.[/RESULT]")
    assert "(call_1 look" in prompt(FREE, *talk)


def test_images_and_texts_are_merged_as_parts() -> None:
    image = {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "text", "text": "this."}]}
    assert prompt(ALTERNATING, image, AGAIN) == "[INST]See\nthis.\nAnd?[/INST]"


def test_the_unfinished_message_is_continued_where_messages_are_merged() -> None:
    template = ChatTemplate(ALTERNATING, bos="", eos="")
    text = template.render([ASK, ANSWER, say("assistant", "I am")], continue_final_message=True)
    assert text == "[INST]Hi.[/INST]Hello.\n\nI am"


def test_one_line_of_the_log_says_that_conversations_are_arranged(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate(ONE_SYSTEM, bos="", eos="")
    with caplog.at_level(logging.INFO, "cppbatch.chat"):
        template.render([say("system", "Be brief."), ASK])
        assert not caplog.records
        for _ in range(3):
            template.render([say("system", "Be brief."), say("system", "Be kind."), ASK])
    (line,) = caplog.messages
    assert "systems" in line


def test_a_template_that_writes_nothing_gets_its_messages_as_they_are() -> None:
    assert prompt("{{ messages | length }}", ASK, AGAIN, ANSWER) == "3"
