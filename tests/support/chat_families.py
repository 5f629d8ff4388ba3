"""A small template for each family of tool calls, which writes past calls as the family's own templates do."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from cppbatch.chat.chat_format import ChatFormat, ChatTurn, PreparedChat
from cppbatch.chat.output_parser import AssistantMessage, Delta, ToolCall
from cppbatch.chat.template import CHATML, ChatTemplate
from cppbatch.chat.tools import ToolChoice

Json = dict[str, Any]

_CHATML = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}CALLS{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_XML_CALL = """<TAG>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</TAG>"""

_THINKING = _CHATML.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if opened %}<think>\n{% elif quick %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
)

_HERMES_CALL = (
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\\n</tool_call>' }}"
)

_NINE = "{% if call.id | length != 9 %}{{ raise_exception('ids are nine letters or digits') }}{% endif %}"

_NO_CALLS = "{# <|tool_call_start|> #}" + _CHATML.replace(
    "{%- for call in message.tool_calls or [] %}CALLS{% endfor %}", ""
)

TEMPLATES = {
    "generic": CHATML,
    "hermes": _THINKING.replace("CALLS", _HERMES_CALL),
    "qwen_xml": _THINKING.replace("CALLS", _XML_CALL.replace("TAG", "tool_call")),
    "seed": _CHATML.replace("CALLS", _XML_CALL.replace("TAG", "seed:tool_call")),
    "llama3": _CHATML.replace(
        "CALLS",
        """{{ '{"name": "' + call.function.name + '", ' }}"""
        """{{ '"parameters": ' + call.function.arguments | tojson + '}' }}""",
    ),
    "nemo": _CHATML.replace(
        "CALLS", _NINE + '[TOOL_CALLS][{{ (call.function | tojson)[:-1] + \', "id": "\' + call.id + \'"}]\' }}'
    ),
    "mistral": _CHATML.replace(
        "CALLS",
        _NINE + "[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]"
        "{{ call.function.arguments | tojson }}",
    ),
    "tags": _CHATML.replace(
        "CALLS",
        "<tool_call>{{ call.function.name }}{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}"
        "</arg_key><arg_value>{{ value if value is string else value | tojson }}</arg_value>{% endfor %}</tool_call>",
    ),
    "typed_tags": _CHATML.replace("{%- for call", "{{ '<calls>' if message.tool_calls }}{%- for call").replace(
        "CALLS{% endfor %}",
        """<invoke name="{{ call.function.name }}">{% for key, value in call.function.arguments.items() %}"""
        """<parameter name="{{ key }}" string="{{ 'true' if value is string else 'false' }}">"""
        """{{ value if value is string else value | tojson }}</parameter>{% endfor %}</invoke>{% endfor %}"""
        """{{ '</calls>' if message.tool_calls }}""",
    ),
    "numbered": _CHATML.replace("{%- for call", "{{ '<|calls|>' if message.tool_calls }}{%- for call").replace(
        "CALLS{% endfor %}",
        "<|call|>functions.{{ call.function.name }}:{{ loop.index0 }}<|arguments|>"
        "{{ call.function.arguments | tojson }}<|end_of_call|>{% endfor %}"
        "{{ '<|end_of_calls|>' if message.tool_calls }}",
    ),
    "lfm2": _NO_CALLS,
    "gemma4": "{# <|channel>thought #}"
    + _CHATML.replace(
        "CALLS",
        "<|tool_call>call:{{ call.function.name + '{' }}"
        "{% for key, value in call.function.arguments | dictsort %}{{ ',' if not loop.first }}{{ key }}:"
        "{% if value is string %}<|\"|>{{ value }}<|\"|>{% else %}{{ value | tojson }}{% endif %}{% endfor %}"
        "}<tool_call|>",
    ),
    "harmony": """{{ tools | tojson }}
{%- for message in messages %}<|start|>{{ message.role }}
{%- if message.tool_calls %} to=functions.{{ message.tool_calls[0].function.name -}}
<|channel|>commentary json<|message|>{{ message.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else %}{{ '<|channel|>final' if message.role == 'assistant' }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}""",
}  # fmt: skip


def tool(name: str, properties: Json | None = None, *optional: str) -> Json:
    """A function, with these arguments."""
    function: Json = {"name": name, "description": f"Does what {name} says."}
    if properties is not None:
        required = [key for key in properties if key not in optional]
        function["parameters"] = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": function}


WEATHER = tool("get_weather", {"city": {"type": "string"}, "days": {"type": "integer"}}, "days")
SETTINGS = tool("set", {"options": {"type": "object"}, "on": {"type": "boolean"}, "note": {"type": ["string", "null"]}})
PING = tool("ping")
TOOLS = [WEATHER, SETTINGS, PING]

QUESTION = [{"role": "user", "content": "What now?"}]


@cache
def _template(family: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[family], bos="", eos="")


def chat_format(family: str, token_ids: dict[str, int] | None = None) -> ChatFormat:
    """A model of this family."""
    return ChatFormat(_template(family), token_ids)


def turn(family: str, *, tools: list[Json] = TOOLS, mode: Any = "auto", **more: Any) -> PreparedChat:
    """The answer to a question."""
    variables: Json = {key: more.pop(key) for key in ("opened", "quick") if key in more}
    messages = more.pop("messages", QUESTION)
    choice = ToolChoice(mode=mode, name=more.pop("name", None), parallel=more.pop("parallel", True))
    form = chat_format(family, more.pop("token_ids", None))
    return form.render(ChatTurn(messages, tools=tools, choice=choice, variables=variables, **more))


def pieces(its: PreparedChat, parts: Iterable[str]) -> list[Delta]:
    """What a reader returns for a text that comes in these parts."""
    reader = its.output_parser()
    return [piece for part in parts for piece in reader.push(part)] + reader.close()


def message(its: PreparedChat, parts: Iterable[str]) -> AssistantMessage:
    """The whole message, its calls without ids."""
    whole = AssistantMessage()
    whole.add(pieces(its, parts))
    whole.calls = [ToolCall("", call.name, call.arguments) for call in whole.calls]
    return whole


def calls_of(whole: AssistantMessage) -> list[tuple[str, Any]]:
    """Names and arguments."""
    return [(call.name, json.loads(call.arguments)) for call in whole.calls]
