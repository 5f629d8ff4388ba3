"""OpenAI's other forms of tools, through its own client: custom tools, allowed tools, and `functions` of 2023."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from cppbatch.chat.output_parser import ArgumentsDelta, Delta, ToolCallStart
from cppbatch.server.models.served import MODELS, OneModel
from tests.support.fixtures import chat_server
from tests.support.scripted_chat import ENDS, ChatServer, ScriptedFormat, strictly

Json = dict[str, Any]

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER: Json = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
TIME: Json = {"name": "time", "parameters": {"type": "object", "properties": {}}}
SUM = 'start: INT (" + " INT)+\nINT: /[0-9]{1,3}/'
CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": TIME},
    {"type": "custom", "custom": {"name": "sum"}},
]
RESPONSES_TOOLS: list[Any] = [
    {"type": "function", **WEATHER, "strict": False},
    {"type": "function", **TIME, "strict": False},
    {"type": "custom", "name": "sum"},
]
CALLS: list[Delta] = [
    ToolCallStart(0, "call_a", "sum", is_custom=True),
    ArgumentsDelta(0, "1 +"),
    ArgumentsDelta(0, " 2"),
    ToolCallStart(1, "call_b", "weather"),
    ArgumentsDelta(1, "{}"),
]

server = chat_server()
pytestmark = pytest.mark.usefixtures("own_format")


def chat(client: Any, **fields: Any) -> Any:
    asked: Json = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "seed": 5, **fields}
    return client.chat.completions.create(**asked)


def scripted(server: ChatServer, script: list[Delta]) -> ScriptedFormat:
    form = ScriptedFormat(script, **ENDS)
    server.use(form)
    return form


# --- custom tools ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "regex"),
    [
        ({"syntax": "lark", "definition": SUM}, r"[0-9]{1,3}( \+ [0-9]{1,3})+"),
        ({"syntax": "regex", "definition": '[a-c"\n]{1,5}'}, '[a-c"\n]{1,5}'),
    ],
)
def test_a_forced_call_of_a_custom_tool_obeys_its_grammar(client: Any, grammar: Any, regex: str) -> None:
    tool: Any = {"type": "custom", "custom": {"name": "sum", "format": {"type": "grammar", "grammar": grammar}}}
    wanted = {"type": "custom", "custom": {"name": "sum"}}
    (choice,) = chat(client, tools=[tool], tool_choice=wanted, temperature=1.5).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "custom"
    assert call.custom.name == "sum"
    assert re.fullmatch(regex, call.custom.input)

    its_format = {"type": "grammar", **grammar}
    response = client.responses.create(
        model="tiny",
        input="hello",
        tools=[{"type": "custom", "name": "sum", "format": its_format}],
        tool_choice={"type": "custom", "name": "sum"},
        max_output_tokens=200,
    )
    (item,) = response.output
    assert item.type == "custom_tool_call"
    assert re.fullmatch(regex, item.input)


def test_calls_of_custom_tools_have_the_forms_of_the_clients_types(server: ChatServer, client: Any) -> None:
    scripted(server, CALLS)
    answer = chat(client, tools=CHAT_TOOLS)
    custom, function = answer.choices[0].message.tool_calls or []
    assert (custom.type, custom.id) == ("custom", "call_a")
    assert custom.custom.input == "1 + 2"
    assert function.type == "function"
    assert function.function.arguments == "{}"

    response = client.responses.create(model="tiny", input="hello", tools=RESPONSES_TOOLS)
    strictly(Response, response.to_dict(), "store", "timings")
    first, second = response.output
    assert (first.type, second.type) == ("custom_tool_call", "function_call")
    assert (first.name, first.call_id, first.input) == ("sum", "call_a", "1 + 2")


def test_calls_of_custom_tools_are_streamed(server: ChatServer) -> None:
    scripted(server, CALLS)
    events = server.events("/v1/responses", {"input": "hello", "tools": RESPONSES_TOOLS})
    for _, data in events:
        strictly(ResponseStreamEvent, data, "store", "timings")
    names = [name for name, _ in events]
    assert names.count("response.custom_tool_call_input.delta") == 2
    (done,) = (data for name, data in events if name == "response.custom_tool_call_input.done")
    assert done["input"] == "1 + 2"


def test_chunks_of_a_custom_call_start_with_its_name(server: ChatServer, client: Any) -> None:
    scripted(server, CALLS)
    stream = client.chat.completions.create(model="tiny", messages=HELLO, tools=CHAT_TOOLS, stream=True)
    calls = [call.to_dict() for chunk in stream if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    assert calls[0] == {"index": 0, "id": "call_a", "type": "custom", "custom": {"name": "sum", "input": ""}}
    assert [call["custom"] for call in calls[1:3]] == [{"input": "1 +"}, {"input": " 2"}]
    assert calls[3]["function"] == {"name": "weather", "arguments": ""}


def test_earlier_calls_of_custom_tools_reach_the_template(server: ChatServer, client: Any) -> None:
    form = scripted(server, CALLS)
    call = {"id": "call_a", "type": "custom", "custom": {"name": "sum", "input": "1 + 2"}}
    result = {"role": "tool", "tool_call_id": "call_a", "content": "3"}
    chat(client, messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}, result], tools=CHAT_TOOLS)
    written = {"name": "sum", "arguments": {"input": "1 + 2"}}
    assert form.asked["messages"][1]["tool_calls"] == [{"id": "call_a", "type": "function", "function": written}]

    items: Any = [
        {"type": "message", "role": "user", "content": "hello"},
        {"type": "custom_tool_call", "call_id": "call_a", "name": "sum", "input": "1 + 2"},
        {"type": "custom_tool_call_output", "call_id": "call_a", "output": "3"},
    ]
    client.responses.create(model="tiny", input=items, tools=RESPONSES_TOOLS)
    _, assistant, tool = form.asked["messages"]
    assert assistant["tool_calls"][0]["function"] == written
    assert (tool["role"], tool["tool_call_id"], tool["content"]) == ("tool", "call_a", "3")


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "function"}, "tools[0].function"),
        ({"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}}, "tools[0].custom.format.grammar"),
        (
            {
                "type": "custom",
                "custom": {
                    "name": "x",
                    "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: <a>"}},
                },
            },
            "tools[0].custom.format.grammar.definition",
        ),
    ],
)
def test_a_custom_tool_that_cannot_be_used_is_refused(client: Any, tool: Any, field: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, tools=[tool])
    assert refused.value.param == field


# --- allowed tools --------------------------------------------------------------------------------------------------


def test_only_allowed_tools_are_called(server: ChatServer, client: Any) -> None:
    named: Any = [{"type": "function", "function": {"name": "time"}}]
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    for seed in range(3):
        answer = chat(client, tools=CHAT_TOOLS, tool_choice=allowed, temperature=2, seed=seed)
        names = {call.function.name for call in answer.choices[0].message.tool_calls or [] if call.type == "function"}
        assert names == {"time"}

    form = scripted(server, CALLS)
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "sum"}]}
    response = client.responses.create(model="tiny", input="hello", tools=RESPONSES_TOOLS, tool_choice=choice)
    assert form.asked["choice"].allowed == ("sum",)
    assert response.to_dict()["tool_choice"] == choice


@pytest.mark.parametrize(
    ("allowed", "said"),
    [
        ({"mode": "auto", "tools": [{"type": "function", "function": {"name": "no"}}]}, "not one of the tools"),
        ({"mode": "auto", "tools": []}, "allows no tools"),
        ({"mode": "never", "tools": []}, "must be auto or required"),
        ({"mode": "auto", "tools": [{"type": "mcp"}]}, "must name a function or a custom tool"),
    ],
)
def test_a_wrong_choice_of_allowed_tools_is_refused(client: Any, allowed: Any, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        chat(client, tools=CHAT_TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert str(refused.value.param).startswith("tool_choice")


# --- functions, as of 2023 ------------------------------------------------------------------------------------------


def test_a_function_is_called_in_the_form_of_2023(client: Any) -> None:
    (choice,) = chat(client, functions=[WEATHER, TIME], function_call={"name": "time"}).choices
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert choice.message.content is None
    assert choice.message.function_call
    assert choice.message.function_call.name == "time"
    assert isinstance(json.loads(choice.message.function_call.arguments), dict)


def test_a_streamed_call_has_the_form_of_2023(server: ChatServer, client: Any) -> None:
    calls = [ToolCallStart(0, "a", "time"), ArgumentsDelta(0, "{"), ArgumentsDelta(0, "}"), *CALLS[3:]]
    scripted(server, calls)
    stream = client.chat.completions.create(model="tiny", messages=HELLO, functions=[TIME], stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    called = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert called[0].name == "time"
    assert "".join(each.arguments or "" for each in called) == "{}"  # the message has one call
    assert chunks[-1].finish_reason == "function_call"


@pytest.mark.parametrize(("choice", "mode"), [("none", "none"), ("auto", "auto"), (None, "auto")])
def test_function_call_chooses_as_tool_choice_does(
    server: ChatServer, client: Any, choice: str | None, mode: str
) -> None:
    form = scripted(server, [])
    chat(client, functions=[TIME], **({"function_call": choice} if choice else {}))
    assert form.asked["choice"].mode == mode
    assert form.asked["tools"] == [{"type": "function", "function": TIME}]


def test_earlier_calls_of_2023_reach_the_template_as_todays(server: ChatServer, client: Any) -> None:
    form = scripted(server, [])
    call = {"role": "assistant", "content": None, "function_call": {"name": "time", "arguments": "{}"}}
    chat(client, messages=[*HELLO, call, {"role": "function", "name": "time", "content": "noon"}], functions=[TIME])
    _, assistant, result = form.asked["messages"]
    (made,) = assistant["tool_calls"]
    assert made["function"] == {"name": "time", "arguments": "{}"}
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", made["id"], "noon")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"functions": [TIME], "tools": CHAT_TOOLS}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"functions": [TIME], "function_call": "any"}, "function_call"),
        ({"functions": [TIME], "function_call": {"name": "no"}}, "tool_choice"),
    ],
)
def test_wrong_fields_of_2023_are_refused(client: Any, fields: Json, field: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **fields)
    assert refused.value.param == field


def test_one_log_line_says_that_the_template_renders_no_tools(
    server: ChatServer, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    models = server.app[MODELS]
    assert isinstance(models, OneModel)
    models.serving._has_told_form = False
    for tools in ([], CHAT_TOOLS[:1], CHAT_TOOLS[:1]):
        chat(client, **({"tools": tools} if tools else {}), max_tokens=2)
    (line,) = (record.getMessage() for record in caplog.records if "does not render tools" in record.getMessage())
    assert "a message describes the tools" in line
