# ruff: noqa: E501  # templates
"""What is learned from small chat templates, each of which writes calls, thoughts or text in a different form."""

from __future__ import annotations

from typing import Any

import pytest

from cppbatch.chat.chat_format import ChatFormat, ChatTurn
from cppbatch.chat.template import ChatTemplate
from cppbatch.chat.tools import ToolChoice
from tests.support.chat_families import QUESTION, TEMPLATES, TOOLS, calls_of, message
from tests.templates.round_trip import SAID, check

_TALK = """{{ tools | tojson if tools }}
{%- for m in messages %}<|role|>{{ m.role }}<|text|>
{%- if m.reasoning_content %}THOUGHT{% endif %}
{%- if m.content %}TEXT{% endif %}
{%- if m.tool_calls %}CALLS{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|role|>assistant<|text|>PROMPT{% endif %}"""


def talk(
    calls: str,
    *,
    text: str = "{{ m.content }}",
    thought: str = "<think>{{ m.reasoning_content }}</think>",
    prompt: str = "",
) -> str:
    """A template with these parts."""
    filled = _TALK.replace("CALLS", calls).replace("THOUGHT", thought).replace("TEXT", text)
    return filled.replace("PROMPT", prompt)


def each(call: str, between: str = "") -> str:
    """A loop over calls."""
    separator = f"{{{{ '{between}' if not loop.last }}}}" if between else ""
    return f"{{% for c in m.tool_calls %}}{call}{separator}{{% endfor %}}"


NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
JSON = f'{{{{ \'{{"name": "\' }}}}{NAME}", "arguments": {ARGUMENTS}}}'
ITEMS = "{% for k, v in c.function.arguments.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"

WRITTEN = {
    "JSON between tags": talk(each(f"<call>{JSON}</call>", "\\n")),
    "JSON in a list, after a word": talk(f" functools[{each(JSON, ', ')}]"),
    "JSON on lines of a section": talk("<calls>\n" + each(JSON + "\n") + "</calls>"),
    "the name is a key": talk(f"<|tools|>[{each('{{ ' + chr(39) + '{' + chr(34) + chr(39) + ' }}' + NAME + chr(34) + ': ' + ARGUMENTS + '}', ', ')}]<|end_tools|>"),
    "JSON with the number of the call": talk(
        "<|act|>[" + each('{"tool_call_id": "{{ loop.index0 }}", "tool_name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}", ", ") + "]<|end_act|>",
        text="<|say|>{{ m.content }}<|end_say|>",
    ),
    "the id comes first": talk("<|calls|>" + each(f"<|begin|>{{{{ c.id }}}}<|name|>{NAME}<|args|>{ARGUMENTS}<|done|>") + "<|end_calls|>"),
    "the name is only in the id": talk("<|calls|>" + each(f"<|begin|>functions.{NAME}:{{{{ loop.index0 }}}}<|args|>{ARGUMENTS}<|done|>") + "<|end_calls|>"),
    "a fence around JSON": talk("<|calls|>" + each(f"<|begin|>function<|sep|>{NAME}\n```json\n{ARGUMENTS}\n```<|done|>", "\\n") + "<|end_calls|>"),
    "lines between tags": talk(each(f"<call>\n<function={NAME}>\n{ITEMS}<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>\n{{% endfor %}}</function>\n</call>", "\\n")),
    "tags with the type": talk(
        "\n\n<calls>" + each(f'<invoke name="{NAME}">{ITEMS}<arg name="{{{{ k }}}}" text="{{{{ "yes" if v is string else "no" }}}}">{VALUE}</arg>{{% endfor %}}</invoke>') + "</calls>"
    ),
    "the key is a tag": talk("<calls>" + each(f'<invoke name="{NAME}">{ITEMS}<{{{{ k }}}}>{VALUE}</{{{{ k }}}}>{{% endfor %}}</invoke>') + "</calls>"),
    "CDATA around markup": talk(
        each(f'<function name="{NAME}">{ITEMS}<param name="{{{{ k }}}}">{{{{ "<![CDATA[" + v + "]]>" if v is string and "<" in v else (v if v is string else v | tojson) }}}}</param>{{% endfor %}}</function>')
    ),
    "a recipient before the text": talk(
        each(f' to={NAME}<|body|><f:calls><f:invoke name="{NAME}">{ITEMS}<f:p name="{{{{ k }}}}">{VALUE}</f:p>{{% endfor %}}</f:invoke></f:calls>', "<|next|><|role|>assistant<|text|>")
    ),
    "the prompt has the first marker": talk(
        ">>>" + each(f"{NAME}\n{ARGUMENTS}", ">>>"), text=">>>all\n{{ m.content }}", thought="", prompt=">>>"
    ),
    "the thought has no tag before it": talk(
        each(f"<call>{JSON}</call>"), thought="{{ m.reasoning_content }}[BEGIN ANSWER]", prompt="Steps:\n"
    ),
    "an empty thought is written": talk(
        each(f"<call>{JSON}</call>"), text="{{ '<think></think>' if not m.reasoning_content }}{{ m.content }}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_that_a_template_writes_are_parsed_back(name: str) -> None:
    assert ChatFormat(ChatTemplate(WRITTEN[name], bos="", eos="")).tool_format.name in ("json", "named", "tagged")
    faults = {kind: fault for kind, fault in check(WRITTEN[name]) if fault}
    assert not faults
    rendered = [kind for kind, fault in check(WRITTEN[name]) if fault is not None]
    assert len(rendered) >= len(SAID) - 1 - (name == "the prompt has the first marker")


def form_of(source: str) -> ChatFormat:
    return ChatFormat(ChatTemplate(source, bos="", eos=""))


def read(name: str, written: str) -> Any:
    """The message that a model of one of these templates writes after the prompt, with the tools at hand."""
    its = ChatFormat(ChatTemplate(WRITTEN[name], bos="", eos="")).render(
        ChatTurn(QUESTION, tools=TOOLS, choice=ToolChoice())
    )
    return message(its, [written])


def test_where_only_its_place_marks_a_call_it_has_the_name_of_a_tool() -> None:
    name = "the prompt has the first marker"
    said = read(name, "all\nIn Python:\n>>> print(1)\n1")
    assert (said.text, said.calls) == ("In Python:\n>>> print(1)\n1", [])
    said = read(name, 'all\nI look.>>>get_weather\n{"city": "Paris"}>>>print\n{}')
    assert (said.text, calls_of(said)) == ("I look.>>>print\n{}", [("get_weather", {"city": "Paris"})])


def test_values_that_are_nested_very_deeply_do_not_end_the_request() -> None:
    deep = "<a>" * 3000 + "</a>" * 3000
    said = read("the key is a tag", f'<calls><invoke name="set"><options>{deep}</options></invoke></calls>')
    assert [call.name for call in said.calls] == ["set"]


def test_a_template_without_calls_gets_a_default_form_and_one_without_tools_its_own() -> None:
    none = form_of(TEMPLATES["generic"])
    assert (none.forms.tools_described_by, none.tool_format.name) == ("message", "generic")
    own = form_of(talk(each(f"<call>{JSON}</call>")).replace("{{ tools | tojson if tools }}", ""))
    assert own.forms.tools_described_by == "message"
    asked = own.render(ChatTurn([{"role": "user", "content": "Hi."}], tools=TOOLS, choice=_auto()))
    assert '<call>{"name": "the function\'s name"' in asked.prompt
    assert message(asked, ['<call>{"name": "ping", "arguments": {}}</call>']).calls[0].name == "ping"


def test_forms_are_shown_with_placeholders() -> None:
    forms = form_of(WRITTEN["lines between tags"]).forms
    assert forms.tool_calls == "<call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</call>"
    assert forms.thoughts == "<think> ... </think>"
    assert form_of(TEMPLATES["llama3"]).forms.thoughts is None


def test_a_strict_function_is_enforced_with_tool_choice_auto() -> None:
    form, asked = form_of(WRITTEN["JSON between tags"]), [{"role": "user", "content": "Hi."}]
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    assert "grammar" in form.render(ChatTurn(asked, tools=strict, choice=_auto())).params
    assert "grammar" not in form.render(ChatTurn(asked, tools=TOOLS, choice=_auto())).params


def test_a_thought_between_two_calls_is_a_thought() -> None:
    form = form_of(WRITTEN["JSON between tags"])
    asked = form.render(ChatTurn([{"role": "user", "content": "Hi."}], tools=TOOLS, choice=_auto()))
    call = '<call>{"name": "ping", "arguments": {}}</call>'
    written = f"<think>One.</think>{call}\n<think>Two.</think>\n{call}"
    for parts in ([written], list(written)):
        whole = message(asked, parts)
        assert (whole.text, len(whole.calls)) == ("", 2)
        assert "One." in whole.reasoning
        assert "Two." in whole.reasoning


def test_learning_renders_few_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    render, n = ChatTemplate.render, 0

    def counted(*arguments: Any, **named: Any) -> str:
        nonlocal n
        n += 1
        return render(*arguments, **named)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    for source in WRITTEN.values():
        template, n = ChatTemplate(source, bos="", eos=""), 0
        assert template.form.calls
        assert n <= 20


def _auto() -> Any:
    from cppbatch.chat.tools import ToolChoice

    return ToolChoice()
